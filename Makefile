# make demo | test | lint | docs | bench | format | clean
#
# Every target sets itself up on a fresh machine: it installs into the active virtual environment, else into .venv.
# torch is installed only where it is missing. On a generic Linux machine PyPI's torch brings CUDA along; for the
# small CPU build:    make test TORCH_INDEX=https://download.pytorch.org/whl/cpu

# An empty environment has no PATH, and Python cannot find itself without one.
export PATH := $(or $(PATH),/usr/local/bin:/usr/bin:/bin)

MAIN_TORCH := torch==2.13.0
TORCH ?= $(MAIN_TORCH)
TORCH_INDEX ?=
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.10; do \
  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && command -v $$p && break; done)

# An active environment serves if its Python is new enough.
ENV := $(shell test -n "$$VIRTUAL_ENV" && "$$VIRTUAL_ENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
  && echo "$$VIRTUAL_ENV" || echo "$(CURDIR)/.venv")
# Another torch has an environment of its own, and runs a quick part of the tests (docs/compatibility.md).
ifneq ($(TORCH),$(MAIN_TORCH))
ENV := $(CURDIR)/.venv-$(subst =,,$(TORCH))
endif
PY := $(ENV)/bin/python
# Per checkout, because an editable install points at one.
STAMP := $(ENV)/.installed-$(shell echo '$(CURDIR)' | cksum | cut -d' ' -f1)

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint docs bench format clean setup
.NOTPARALLEL:

demo: setup
	@$(ENV)/bin/autoshard demo

QUICK := $(addprefix tests/,passes/rules/test_every_rule.py passes/rules/test_aten.py passes/lower/test_again.py \
  passes/capture/test_capture.py end_to_end/test_trust.py)

# glibc fills fresh memory with large numbers, so that a read of what nobody wrote shows in every run.
# Neighbours share captured models, so a worker takes a half of the tests and, when it is through, of what is left.
# Lint goes beside them: mypy uses one core.
ifneq ($(TORCH),$(MAIN_TORCH))
test: setup
	@PATH="$(ENV)/bin:$$PATH" MALLOC_PERTURB_=128 $(PY) -m pytest -n 2 -m "not slow" -q -rs $(QUICK)
else
test: setup
	@$(MAKE) --no-print-directory lint & lint=$$!; \
	PATH="$(ENV)/bin:$$PATH" MALLOC_PERTURB_=128 $(PY) -m pytest -n 2 --dist worksteal -m "not slow" -q -rs; tests=$$?; \
	wait $$lint || { echo "make lint failed: see above" >&2; exit 1; }; exit $$tests
endif

lint: setup
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m ruff check --quiet .
	@$(PY) .ci/check_types.py

# Into site/. Broken links, anchors and API names are warnings, which --strict makes errors (but not beside --quiet).
docs: setup
	@$(PY) -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || $(PY) -m pip install -qq -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: setup
	@for b in benchmarks/*.py; do echo "== $$b"; $(PY) $$b || exit 1; done

format: setup
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

setup: $(STAMP)

# Bytecode is made on all cores at once: tests start many processes, and some machines write none. pip uses one core, so
# torch's is made meanwhile. Of the models of transformers a run imports few, of others' tests none. The pip that comes
# with Python takes twice as long.
COMPILE := -m compileall -qq -x '/transformers/models/(?!auto/)|/site-packages/.*/tests/'
$(STAMP): pyproject.toml
	@test -x $(PY) || test -n "$(PYTHON)" || { echo "No Python >= 3.10 with venv found; set PYTHON=..." >&2; exit 1; }
	@echo "Setting up $(ENV) (once; some minutes)" >&2
	@test -x $(PY) || { $(PYTHON) -m venv $(ENV) && { $(PY) -m pip install -qq --no-compile -U pip || true; }; }
	@$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install -qq --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@$(PY) $(COMPILE) $(ENV)/lib/python*/site-packages/torch & $(PY) -m pip install -qq --no-compile -e '.[test,dev]'; \
	installed=$$?; wait; exit $$installed
	@$(PY) $(COMPILE) -j 0 $(ENV)/lib || true
	@touch $@

clean:
	rm -rf .venv build dist out site autoshard-demo .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
