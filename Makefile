# make sft rm ppo eval         train on the built-in posts, judge, and write the page
# make ppo NAME=mine SET='ppo.kl_coef=0.1 ppo.total_episodes=4096'
# make ppo DRY=1               print what would run
# make status                  the state of each stage of each run
# make help                    all targets, variables and presets
#
# The first command installs into .venv. All pipeline targets of a command run in one process,
# `python -m stages` (stages/__main__.py), which reads NAME, SET and other variables from MAKEFLAGS.

PYTHON ?= python3
# VENV= (empty) uses PYTHON as it is.
VENV ?= .venv
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
PIP := $(PY) -m pip install --quiet --no-compile --constraint constraints.txt
# Stamp files: their times say when the environment was installed. If VENV is empty, there are none.
INSTALL_STAMP := $(if $(VENV),$(VENV)/installed)
DEVELOP_STAMP := $(if $(VENV),$(VENV)/developed)
# The same list as DONE_BY_MAKE in stages/pipeline/targets.py, and help.
MAKE_TARGETS := help install check test walks simulations bench
TARGETS := $(filter-out $(MAKE_TARGETS) $(VENV)/%,$(MAKECMDGOALS))
.DEFAULT_GOAL := help
.PHONY: $(MAKE_TARGETS) $(TARGETS) pipeline

# Do not export the typed values: make would expand `$` in them. Python reads them from MAKEFLAGS.
unexport $(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name)))
unexport PYTHONDONTWRITEBYTECODE

# Every other target belongs to the pipeline. All of them run in one process. The recipe `:` does
# nothing, so that make does not print "Nothing to be done".
$(TARGETS): pipeline
	@:
pipeline: $(INSTALL_STAMP)
	@$(PY) -m stages $(TARGETS)
help:
	@$(or $(wildcard $(PY)),$(PYTHON)) -m stages.pipeline.targets

install: $(INSTALL_STAMP)
# flock: if two commands start at the same time, one installs and the other waits.
$(VENV)/installed: pyproject.toml constraints.txt
	@mkdir -p $(VENV) && flock $(VENV) sh -ec 'test $@ -nt pyproject.toml -a $@ -nt constraints.txt || { \
	    echo "installing into $(VENV)"; $(PYTHON) -m venv $(VENV); $(PIP) setuptools torch; \
	    $(PIP) --no-build-isolation .; touch $@; }'
$(VENV)/developed: $(VENV)/installed
	@$(PIP) --no-build-isolation ".[dev]" && touch $@

PYTEST := MAKEFLAGS= OMP_WAIT_POLICY=passive $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
check: $(DEVELOP_STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy stages eval reports tests
test: $(DEVELOP_STAMP)
	$(PYTEST) -m 'not walk'
# Walks: slow end-to-end tests with servers, browsers and killed processes. Then the training tests
# without AVX-512.
walks: $(DEVELOP_STAMP)
	$(PYTEST) -m walk
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -m learns
simulations: $(DEVELOP_STAMP)
	$(PY) -m tests.lib.simulations
# Speed and memory compared with TRL, which is installed into a separate environment.
bench: $(INSTALL_STAMP)
	@$(PY) -m tests.bench
