# `make demo` and `make test` do all the set-up; `make venv` only builds .venv with everything in it.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PROJECTS := core $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
SOURCES := $(addsuffix /src,$(PROJECTS))
TEMPLATES := $(wildcard plugins/devkit/src/rlhf_devkit/templates/*/src)
INSTALL := $(BIN)/pip install -q --no-compile
CPU_INDEX := https://download.pytorch.org/whl/cpu
# Files of few long tests come first, so that both workers end together.
TESTS ?= $(filter-out core/tests,$(addsuffix /tests,$(PROJECTS))) tests core/tests
# Two workers with a pool of ranks each: a test of two ranks leaves cores idle while it waits.
WORKERS ?= 2
# Without bytecode, each of the many processes that tests start would compile the sources again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --durations=25 \
	--numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-rest test-all lint docs dist venv base shapes clean

demo: venv
	$(BIN)/rlhf run dpo

# Every promise once.
test: venv lint
	$(PYTEST) -m "not matrix" $(TESTS)

# The same promises under more settings. PART may be --minutes N --first N, for a part of them.
test-rest: venv
	$(PYTEST) $(PART) -m matrix $(TESTS)

test-all: test test-rest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/mypy benchmarks
	MYPYPATH=core/src:$(subst $() ,:,$(TEMPLATES)) $(BIN)/mypy \
		$(foreach src,$(TEMPLATES),-p $(notdir $(wildcard $(src)/*)))

# The documentation as a site, in site/.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Wheel and source distribution of every project, checked, in dist/.
dist: venv
	rm -rf dist
	$(foreach project,$(PROJECTS),$(BIN)/python -m build --no-isolation --outdir dist $(project) >/dev/null &&) true
	$(BIN)/python .ci/check_dist.py dist

venv: $(VENV)/.installed

# Editable installs see every change of the sources: only the metadata and the development tools count.
$(VENV)/.installed: Makefile requirements-dev.txt $(addsuffix /pyproject.toml,$(PROJECTS))
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rlhf needs Python >= 3.11: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# A machine without an NVIDIA driver gets the CPU build of torch, which is gigabytes smaller.
	$(BIN)/python -c 'import torch' 2>/dev/null || if command -v nvidia-smi >/dev/null; \
		then $(INSTALL) '$(TORCH)'; \
		else $(INSTALL) --retries 1 --extra-index-url $(CPU_INDEX) '$(TORCH)+cpu' \
			|| $(INSTALL) '$(TORCH)'; fi
	$(INSTALL) -r requirements-dev.txt
	# All have one build backend, which is installed by now: not once more for each of them.
	$(INSTALL) --no-build-isolation $(addprefix -e ,$(PROJECTS))
	# On all cores, which pip does not; some packages have files for other versions of Python.
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	touch $@

# The embedded base model, made again from random weights by the recipe beside it.
base: venv
	mkdir -p build
	$(BIN)/python -m rlhf_devkit.scratch build/scratch
	$(BIN)/rlhf run sft plugins/demo/src/rlhf_demo/base.yaml --overwrite
	rm build/base/model/README.md
	cp build/base/model/* plugins/demo/src/rlhf_demo/base/

# The base model of `demo:shapes`, made again from random weights.
shapes: venv
	$(BIN)/python -m rlhf_vision.demo.recipe plugins/vision/src/rlhf_vision/demo/base

clean:
	rm -rf $(VENV) build dist runs site
