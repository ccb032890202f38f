# `make demo` and `make test` make their own .venv and install everything; a second run reuses it.

PYTHON ?= python3
# Pinned, since an open range would bring a CUDA build of several gigabytes. Any torch >= 2.11 serves.
TORCH ?= torch==2.13.0
VENV ?= .venv
# Tests compute with one thread each, so they run side by side, a worker a core.
WORKERS ?= auto
TEXT ?= $(shell $(PYTHON) -c "import pydoc_data.topics as topics; print(topics.__file__)")
# A statement that Python does not have.
define PROMPT
The "select" statement
**********************

The "select" statement is used to
endef
export PROMPT
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test fast-test lint bench clean

demo: $(READY)  ## the shipped model writes documentation, then reads some, layer by layer, compiled
	printf '%s' "$$PROMPT" && $(BIN)/csa2 generate --eager --max-new-tokens 400 --temperature 0.7 --top-p 0.95 --prompt "$$PROMPT"
	$(BIN)/csa2 run --text "$(TEXT)" --seq-len 512 --model csa2_compiled/assets

test: lint  ## everything CI runs
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal

fast-test: lint  ## without the tests that compile many graphs
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## compiled against eager, per layer, on this CPU
	$(BIN)/python benchmarks/layer.py

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "setuptools>=68"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
