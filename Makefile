# Each target sets up what it needs in .venv; a machine needs Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test check

demo: $(READY)
	$(BIN)/allranks train digits --ranks 2

test: check
	$(BIN)/pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[digits,test]'
	touch $(READY)
