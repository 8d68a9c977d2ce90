# Each target sets up what it needs in .venv; a machine needs Python >= 3.11 and make.
PYTHON ?= python3
# Python keeps what it has compiled, even if the image forbids that: without it each process compiles
# TensorFlow again, and its import takes three times as long.
export PYTHONDONTWRITEBYTECODE :=
BIN := .venv/bin
READY := .venv/ready
SCRIPTS := .venv/scripts
SITE := .venv/site
RELEASE := .venv/release
NATIVE := $(wildcard src/allranks/torch/native/*.h src/allranks/torch/*/native/*)
AT_ONCE ?= 3  # tests, on two processors: some of them wait
TORCHES := 2.11.0 2.15.0
CORE := tests/test_every_strategy.py $(addprefix tests/on_torch/test_,step.py single.py layers.py \
	precision.py state.py changes.py leaving.py machine.py replicas.py checkpoint_save.py)

.PHONY: demo test test-full test-cluster test-mutants test-torch check docs dist release

demo: $(READY)
	$(BIN)/allranks train digits --ranks 2

# What holds every promise once, in minutes; needs torch alone.
test: $(READY)
	$(BIN)/pytest -n $(AT_ONCE) --dist worksteal --tier quick

# The rest: TensorFlow, scripts of every framework, products, ordeals, every page of docs/.
test-full: $(SCRIPTS)
	$(BIN)/pytest -n $(AT_ONCE) --dist worksteal --tier slow

# On a real Slurm, which is installed with apt-get where there is none; as root.
test-cluster: $(SCRIPTS)
	$(BIN)/pytest -n $(AT_ONCE) --dist worksteal tests/cluster

# Breaks on purpose, in a copy: which of them no test sees. OF="step guard", or files that changed.
test-mutants: $(SCRIPTS)
	$(BIN)/python tests/mutants/plant.py $(OF)

# The core tests on the oldest torch that is supported, and on the newest: gigabytes for each.
test-torch: $(TORCHES:%=.venv/torch-%/ready)
	for version in $(TORCHES); do .venv/torch-$$version/bin/pytest $(CORE) || exit 1; done

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, build/site/index.html, from README.md, docs/ and the docstrings: docs/conf.py.
docs: $(SITE)
	rm -rf build/site
	$(BIN)/sphinx-build --quiet --fail-on-warning --fresh-env -c docs -d build/doctrees . build/site
	@echo "built build/site/index.html"

# What is published, in dist/: source, and a wheel for every Linux with glibc 2.34 or newer, each
# tried in an empty environment.
dist: $(RELEASE)
	rm -rf dist build/wheel
	$(BIN)/python -m build --quiet --no-isolation --outdir build/wheel
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --plat manylinux_2_34_$$(uname -m) \
		--wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist
	$(BIN)/python tests/installed.py dist

# Checks, builds and tags a version, and asks before anything leaves the machine.
release:
	.ci/release "$(VERSION)"

$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[digits,test]'
	$(BIN)/python -m compileall -q src
	touch $(READY)

# allranks itself is installed: here pip adds what the extra lists, and compiles nothing again.
# TensorFlow, for its engine, and the frameworks whose scripts tests/scripts holds. DeepSpeed comes
# as source; it compiles nothing. pip compiles none of their modules, for most are never imported:
# Python compiles those that are, once.
$(SCRIPTS): $(READY)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt 'allranks[scripts]'
	$(BIN)/python -c 'import tensorflow' 2> /dev/null
	touch $(SCRIPTS)

# Sphinx, a theme, and what lets it read Markdown.
$(SITE): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt 'allranks[docs]'
	touch $(SITE)

$(RELEASE): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt 'allranks[release]'
	touch $(RELEASE)

.venv/torch-%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv/torch-$*
	grep -v '^torch==' constraints.txt > .venv/torch-$*/constraints.txt
	.venv/torch-$*/bin/pip install --quiet --constraint .venv/torch-$*/constraints.txt \
		torch==$* --editable '.[digits,test]'
	touch $@
