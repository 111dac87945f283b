# Every target makes .venv first, from requirements.lock; that takes no time once it is there.
# Variables: PYTHON=... the interpreter for .venv; EXPERIMENT=... a name from experiments/.
SHELL = /bin/sh

.PHONY: help setup repro test lint lock

help:
	@echo "make repro [EXPERIMENT=name]  from raw text to a committed model, with dvc repro"
	@echo "make test                     run the tests"
	@echo "make lint                     ruff and mypy"
	@echo "make setup [PYTHON=python3]   only make .venv"
	@echo "make lock                     resolve requirements.lock anew"

setup:
	@sh tools/setup.sh

repro: setup
	@if [ -n "$$EXPERIMENT" ]; then .venv/bin/reproduce use "$$EXPERIMENT"; fi
	.venv/bin/dvc repro
	@.venv/bin/reproduce show

test: setup
	.venv/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

lock:
	@sh tools/lock.sh
