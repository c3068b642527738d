# make demo    train on synthetic scenes, then segment a large one
# make test    the test suite
# make slow    tests that build environments
# make lint    style, types, spelling
#
# The build of torch is yours to choose: make demo TORCH='torch==2.13.0'
TORCH ?= torch>=2.4
PYTHON ?= python3

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install
DEMO := configs/infvit_seg_demo.py
DEMO_DIR := work_dirs/demo

.DELETE_ON_ERROR:
.PHONY: demo test slow lint

demo: $(VENV)/installed
	$(RUN) tools/train.py $(DEMO) --work-dir $(DEMO_DIR)
	$(RUN) tools/infer_large.py $(DEMO) "$$(cat $(DEMO_DIR)/last_checkpoint)" \
	    scene:2048 --out $(DEMO_DIR)/large --max-memory 2GiB --overview \
	    --overwrite

# A file's tests stay together: they share what they have trained.
PYTEST := $(RUN) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test: $(VENV)/installed-tests
	$(PYTEST)

slow: $(VENV)/installed-tests
	$(PYTEST) -m slow

lint: $(VENV)/installed-dev
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(VENV)/bin/codespell

# Each file says that a step was done with what it depends on. Torch comes
# first and alone: pip would otherwise choose a build by itself, and fetch
# gigabytes twice.
$(VENV)/installed-torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	touch $@

$(VENV)/installed: $(VENV)/installed-torch setup.py pyproject.toml \
    requirements/runtime.txt requirements/mminstall.txt \
    requirements/raster.txt infsa_seg/version.py
	$(PIP) -e '.[mim,raster]'
	touch $@

$(VENV)/installed-tests: $(VENV)/installed requirements/tests.txt
	$(PIP) -r requirements/tests.txt
	touch $@

$(VENV)/installed-dev: $(VENV)/installed-tests requirements/dev.txt
	$(PIP) -r requirements/dev.txt
	touch $@
