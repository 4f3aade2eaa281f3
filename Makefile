# make venv     set up .venv with everything for a CPU
# make demo     prepare the embedded model and run a capacity scan on it
# make test     all tests except the slow ones;  make stress: the slow ones
# make bench    what the kernels and the bookkeeping cost
# make lint     style;  make types: a strict type check of what decides (core, scheduling, policies)
#
# PYTHON=python3.12      another interpreter, 3.11 or newer
# TORCH_INDEX=<address>  PyTorch's wheel index for CPU builds, where pip does not find torch 2.13.0+cpu
# PIP_EXTRA="..."        more options for pip install
# PYTEST_ARGS="..."      more options for pytest
# TEST_WORKERS=1         test files that run at once

PYTHON ?= python3
VENV ?= .venv
LOCK := requirements/cpu.lock
BIN := $(VENV)/bin
STAMP := $(VENV)/.vtoken-installed
# --no-compile: most modules are never imported; it halves the time of the set-up. What engines
# import is compiled by importing it once, which also shows that it loads.
# editable_mode=compat: a plain path instead of an import hook, which every start would pay for.
PIP_INSTALL = $(BIN)/python -m pip install --no-deps --no-compile \
	--disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PIP_EXTRA)

IMPORTED = typer rich.table rich.progress yaml numpy pydantic torch vllm.entrypoints.llm \
	vllm.v1.engine.core vllm.v1.worker.cpu_worker vllm.entrypoints.openai.api_server \
	transformers.models.llama.modeling_llama vllm.model_executor.models.llama \
	matplotlib.pyplot gguf safetensors.numpy
# Empty is off: with it on, every start of vtoken would compile torch and vLLM anew.
export PYTHONDONTWRITEBYTECODE =

# Tests run tiny models in one process: one thread beats two that wait for each other, so files
# run side by side instead.
TEST_WORKERS ?= 2
TEST_ENV = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

.PHONY: venv demo test stress bench lint types clean

venv: $(STAMP)

$(STAMP): $(LOCK) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("vToken needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --quiet "$$(grep '^setuptools==' $(LOCK))"
	$(PIP_INSTALL) --quiet --no-build-isolation -r $(LOCK)
	$(PIP_INSTALL) --quiet --no-build-isolation --config-settings editable_mode=compat -e .
	@$(BIN)/python -c 'import torch; assert not torch.version.cuda' 2>/dev/null || { \
		echo "torch is not the CPU build; run: make venv TORCH_INDEX=<PyTorch's wheel index for CPU>"; exit 1; }
	$(BIN)/python -m compileall -q vtoken vtoken_cli $(BIN)/../lib/python*/site-packages/typer
	$(BIN)/python -W ignore -c 'import importlib, sys; [importlib.import_module(m) for m in sys.argv[1:]]' $(IMPORTED)
	touch $(STAMP)

demo: venv
	$(BIN)/vtoken models prepare smollm2-135m
	$(BIN)/vtoken capacity-scan --gpu-mem-util 0.35 --output vtoken-demo

test: venv
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

stress: venv
	$(TEST_ENV) $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

bench: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m vtoken.policies.bench
	OMP_NUM_THREADS=1 $(BIN)/python -m vtoken.engine.bench
	$(BIN)/python -m vtoken.kernels.bench

lint: venv
	$(BIN)/ruff check vtoken vtoken_cli tests
	$(BIN)/ruff format --check vtoken vtoken_cli tests

types: venv
	$(BIN)/mypy $(wildcard vtoken/core vtoken/scheduling vtoken/policies)

clean:
	rm -rf $(VENV) build *.egg-info vtoken-demo
