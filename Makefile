# Every target makes its own virtual environment (.venv) if there is none.
#
#   PYTHON  interpreter to make it with (3.11 or newer)
#   TORCH   torch requirement: plain `torch` takes a CUDA build; on a CPU machine a smaller one may be named here
#   TORCHVISION of `make test-cellmap`: one that goes with TORCH
#   WORKERS processes that share the tests, by default one more than there are cores, since tests often wait; 1 runs the
#           tests one after another in this process
#   FUZZ_S  seconds of `make fuzz`, for all kinds of files together
#   EXTRAS  cuda12 (also right on machines without a GPU) or cuda13, to match the driver
PYTHON ?= python3
TORCH ?= torch
TORCHVISION ?= torchvision
EXTRAS ?= dev,cuda12
PYTEST_ARGS ?=
WORKERS ?= $(shell nproc | awk '{ print $$1 < 8 ? $$1 + 1 : 8 }')
FUZZ_S ?= 60

# The order is that of tests/conftest.py: files that take long come first, so that no process is left with one at the end.
IN_PARALLEL = $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)
FAST := tests/corpus tests/schedule tests/config $(addprefix tests/loader/test_,token_loader.py state.py resume.py) \
  $(addprefix tests/operators/test_,rows.py permute.py segments.py)

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CELLMAP := .venv-cellmap

# Tests are compiled in every process that runs some, unless a run before has kept what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test test-fast test-slow test-browser browser-packages test-cellmap test-gpu gpu-check soak fuzz check style format bench clean

demo: $(READY)  ## train a small GPT on a mixture of plays and code
	$(BIN)/python benchmarks/train_gpt.py

test: $(READY)  ## all tests that are quick and do not need a GPU
	$(BIN)/python -m pytest -m "not slow and not gpu and not browser" $(IN_PARALLEL) $(PYTEST_ARGS)

test-fast: $(READY)  ## those of corpora, the schedule, the operators and the loader's basics, in a minute
	$(BIN)/python -m pytest -m "not slow and not gpu and not browser" --hypothesis-profile fast $(IN_PARALLEL) $(FAST) $(PYTEST_ARGS)

test-slow: $(READY)  ## the long ones, and more random examples
	$(BIN)/python -m pip install --quiet -e ".[ray]"
	$(BIN)/python -m pytest -m "(slow or hypothesis) and not gpu and not browser" --hypothesis-profile thorough $(IN_PARALLEL) $(PYTEST_ARGS)

test-browser: $(READY) browser-packages  ## the page of `dali-pipes report` in Chromium (apt-get install chromium), the notebook in a kernel
	$(BIN)/python -m pytest -m browser tests/tools/test_report_in_browser.py tests/docs/test_notebook.py $(PYTEST_ARGS)

browser-packages: $(READY)  ## what `make test-browser` needs, without Chromium
	@$(BIN)/python -c "import ipykernel, playwright" 2>/dev/null || $(BIN)/python -m pip install --quiet -e ".[$(EXTRAS),browser]"

test-cellmap: $(CELLMAP)/.ready  ## with the cellmap-data package, which needs zarr < 3, in a separate environment
	$(CELLMAP)/bin/python -m pytest -m cellmap tests/adapters/test_cellmap.py $(PYTEST_ARGS)

# Without dependencies: with them, pip replaces a CPU build of torch by a CUDA build.
$(CELLMAP)/.ready: pyproject.toml
	test -x $(CELLMAP)/bin/python || $(PYTHON) -m venv $(CELLMAP)
	$(CELLMAP)/bin/python -m pip install --quiet "$(TORCH)"
	$(CELLMAP)/bin/python -m pip install --quiet --no-deps cellmap-data==2026.3.20.1935 $(TORCHVISION)
	$(CELLMAP)/bin/python -m pip install --quiet -e . "zarr<3" "numcodecs<0.16" matplotlib pillow scipy tqdm universal-pathlib
	$(CELLMAP)/bin/python -m pip install --quiet hypothesis pytest
	@touch $@

test-gpu: $(READY)  ## on a CUDA host
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

gpu-check: $(READY)  ## on a CUDA host: parity, lifetimes, cost, training and faults
	$(BIN)/python benchmarks/gpu_check.py

soak: $(READY)  ## 200,000 batches of every kind of rows: order exact, memory flat, with a plot
	$(BIN)/python benchmarks/soak.py

fuzz: $(READY)  ## damaged files of every kind, for FUZZ_S seconds; what is found is kept in runs/fuzz
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_S)

style: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check dali_pipes/ operators tests benchmarks docs
	$(BIN)/ruff check dali_pipes/ operators tests benchmarks docs
	$(BIN)/mypy dali_pipes tests benchmarks docs

check: style test  ## what must pass before a commit

format: $(READY)
	$(BIN)/ruff format dali_pipes/ operators tests benchmarks docs
	$(BIN)/ruff check --fix dali_pipes/ operators tests benchmarks docs

docs: $(READY)  ## the manual as a site in site/; a broken link or an unknown name fails
	$(BIN)/python docs/generate.py --check
	$(BIN)/zensical build --strict

bench: $(READY)  ## side by side with other loaders; see benchmarks/README.md
	$(BIN)/python -m pip install --quiet -e ".[$(EXTRAS),bench]"
	$(BIN)/python benchmarks/compare.py --all-sizes

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, PYTHON=... names one; found " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV) $(CELLMAP) build dist runs site .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
