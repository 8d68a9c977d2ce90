# Each target sets up what it needs in .venv; a machine needs Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
SCRIPTS := .venv/scripts

.PHONY: demo test test-cluster check

demo: $(READY)
	$(BIN)/allranks train digits --ranks 2

test: check $(SCRIPTS)
	$(BIN)/pytest

# On a real Slurm, which is installed with apt-get where there is none; as root.
test-cluster: $(SCRIPTS)
	$(BIN)/pytest tests/cluster

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[digits,test]'
	touch $(READY)

# TensorFlow, for its engine, and the frameworks whose scripts tests/scripts holds. DeepSpeed comes
# as source; it compiles nothing.
$(SCRIPTS): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[scripts]'
	touch $(SCRIPTS)
