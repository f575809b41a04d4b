# Two commands, both from nothing: each makes the virtual environment it needs and is quick when it is there already.
#
#   make demo            set up, then run the demo;    make demo ARGS="--model kimi --all"
#   make test            set up, then lint and test;   make test ARGS="tests/formats -k int8"
#
# For developers: make test-full (everything that CI samples, hours), make gpu-test (kernels, on this machine's GPU),
# make reproduce-quality (trains a small model, quantizes its state, checks the order of the published rows; 5 minutes).
#
# PYTHON chooses the interpreter (3.11 or newer), VENV the folder.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2

# One version of torch and of transformers, so that everybody sees the numbers the project was tested with. The second
# transformers is the oldest supported one. Packages come from whatever index pip is configured for.
TORCH := torch==2.13.0
TRANSFORMERS := transformers==5.24.0
TRANSFORMERS_OLD := transformers==5.17.0
FLA := fla-core==0.6.0 einops "triton==3.7.1; sys_platform == 'linux'"

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
ALT := $(CURDIR)/$(VENV)/alt

.DEFAULT_GOAL := help
.PHONY: help demo test test-full gpu-test reproduce-quality lint check setup setup-dev clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.demo
	$(BIN)/lattn-compile demo $(ARGS)

test: lint check

# One thread a process: with $(JOBS) processes on as many cores, more threads only wait for each other. A process takes
# tests that follow one another, whose fixtures and traces it then makes once, and at the end what another has left.
# Bytecode is kept whatever the environment says: dozens of processes that tests start import the same files.
check: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= LATTN_TEST_HF517="$(ALT)/hf517" LATTN_TEST_FLA="$(ALT)/fla" \
	    $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-full: export LATTN_CONFORMANCE := full
test-full: export LATTN_CONFORMANCE_CASES ?= 20000
test-full: export LATTN_CORPUS := full
test-full: export LATTN_PROPERTY_CASES := 2000
test-full: export LATTN_COMPILE_ALL := 1
test-full: export LATTN_SCHEDULES := 10000
test-full: test

# Uses the torch, Triton and fla-core of the environment that PYTHON is: a GPU's torch comes from its own index.
gpu-test:
	$(PYTHON) -m pytest tests/test_cuda.py $(ARGS)
	$(PYTHON) -m tests.gpu.run
	$(PYTHON) -m tests.gpu.run --sanitize
	$(PYTHON) benchmarks/kernels.py
	$(PYTHON) benchmarks/decode.py

reproduce-quality: $(VENV)/.demo
	$(BIN)/python -m benchmarks.quality --reduced $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(VENV)/.demo
setup-dev: $(VENV)/.dev

# The stamps are made last, so an interrupted setup is done again, and a changed pyproject.toml or pin is installed.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml Makefile
	@echo "Installing torch and transformers into $(VENV) (once; minutes on a slow line) ..."
	$(PIP) $(TORCH) $(TRANSFORMERS)
	$(PIP) --editable '.[hf,cli]'
	@touch $@

# The other transformers and FLA lie beside the environment: a test puts them on PYTHONPATH of a process of its own, so
# everything else is tested without FLA and Triton, as most CPU-only machines are. The transformers brings what it
# needs (torch is no dependency of it); FLA's dependencies would bring a second torch.
$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing the test tools into $(VENV) (once) ..."
	$(PIP) $(TORCH) $(TRANSFORMERS) --editable '.[dev]'
	rm -rf "$(ALT)"
	$(PIP) --target "$(ALT)/hf517" $(TRANSFORMERS_OLD)
	$(PIP) --target "$(ALT)/fla" --no-deps $(FLA)
	@touch $@

clean:
	rm -rf $(VENV)
