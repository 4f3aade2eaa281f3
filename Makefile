# make venv     set up .venv with everything for a CPU
# make demo     prepare the embedded model and run a capacity scan on it
# make test     all tests except the slow ones;  make stress: the slow ones
# make bench    what the kernels and the bookkeeping cost
# make lint     style
#
# PYTHON=python3.12      another interpreter, 3.11 or newer
# TORCH_INDEX=<address>  PyTorch's wheel index for CPU builds, where pip does not find torch 2.13.0+cpu
# PIP_EXTRA="..."        more options for pip install
# PYTEST_ARGS="..."      more options for pytest

PYTHON ?= python3
VENV ?= .venv
LOCK := requirements/cpu.lock
BIN := $(VENV)/bin
STAMP := $(VENV)/.vtoken-installed
# `override` options reach pip in one place only.
PIP_INSTALL = $(BIN)/python -m pip install --no-deps --no-compile \
	--disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PIP_EXTRA)

# Tests run tiny models in one process: one thread beats two that wait for each other.
TEST_ENV = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

.PHONY: venv demo test stress bench lint clean

venv: $(STAMP)

$(STAMP): $(LOCK) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("vToken needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --quiet "$$(grep '^setuptools==' $(LOCK))"
	$(PIP_INSTALL) --quiet --no-build-isolation -r $(LOCK)
	$(PIP_INSTALL) --quiet --no-build-isolation -e .
	@$(BIN)/python -c 'import torch; assert not torch.version.cuda' 2>/dev/null || { \
		echo "torch is not the CPU build; run: make venv TORCH_INDEX=<PyTorch's wheel index for CPU>"; exit 1; }
	touch $(STAMP)

demo: venv
	$(BIN)/vtoken models prepare smollm2-135m
	$(BIN)/vtoken capacity-scan --gpu-mem-util 0.35 --output vtoken-demo

test: venv
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

stress: venv
	$(TEST_ENV) $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

bench: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m vtoken.policies.bench
	$(BIN)/python -m vtoken.kernels.bench

lint: venv
	$(BIN)/ruff check vtoken vtoken_cli tests
	$(BIN)/ruff format --check vtoken vtoken_cli tests

clean:
	rm -rf $(VENV) build *.egg-info vtoken-demo
