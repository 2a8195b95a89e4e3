# On a fresh machine with Python 3.11+ and nothing else: `make demo` and `make test` set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Exact versions for development and CI; the package itself keeps ranges.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow test-gpu test-vllm check docs docs-results install install-dev clean

demo: $(VENV)/installed
	$(BIN)/ladder demo

# One worker per core; tests of one file share a worker, so that fixtures are made once.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile

test: check
	$(PYTEST)

test-slow: $(VENV)/installed-dev
	$(PYTEST) -m slow

# On a machine with a GPU, with the Python that has torch, Triton and transformers there; needs no pytest. Several ranks share the GPU:
# start MPS first (docs/sharing-a-gpu.md). Everything that is printed goes to gpu-tests.log too.
test-gpu:
	@failed=""; : > gpu-tests.log; for file in tests/gpu/test_*.py; do \
	  PYTHONPATH=src:. $(PYTHON) $$file > gpu-tests.part 2>&1 || failed="$$failed $$file"; cat gpu-tests.part | tee -a gpu-tests.log; done; \
	rm -f gpu-tests.part; \
	if [ -z "$$failed" ]; then echo "GPU tests: all files passed"; else echo "GPU tests: failed in$$failed"; exit 1; fi

# vLLM has requirements of its own, so it gets an environment of its own.
test-vllm:
	PYTHON=$(PYTHON) lab/make-vllm-env.sh .venv-vllm
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -o addopts= -q --confcutdir=tests/vllm tests/vllm

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The documentation as a site in site/, without anything from elsewhere; a broken link fails. `make docs SERVE=1` serves it on localhost:8000.
docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(SERVE),serve,build --quiet)

# Every generated page of docs/results, from the JSON in results/.
docs-results: $(VENV)/installed-dev
	$(BIN)/python -m lab.reports

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
	rm -rf $(VENV) .venv-vllm build site dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
