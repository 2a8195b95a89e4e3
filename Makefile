# On a fresh machine with Python 3.11+ and nothing else: `make demo` and `make test` set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Exact versions for development and CI; the package itself keeps ranges.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow test-vllm check install install-dev clean

demo: $(VENV)/installed
	$(BIN)/ladder demo

test: check
	$(BIN)/python -m pytest

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

# vLLM has requirements of its own, so it gets an environment of its own.
test-vllm:
	PYTHON=$(PYTHON) scripts/make-vllm-env.sh .venv-vllm
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -o addopts= -q --confcutdir=tests/vllm tests/vllm

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
