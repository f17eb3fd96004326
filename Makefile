# Everything works on a fresh clone with Python >= 3.11, make and a C library: the first call of any
# target makes .venv and installs into it, later ones find the stamp and install nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HELP := dashboard/help/index.html
STACKS_VENV := .venv-stacks
STACKS_STAMP := $(STACKS_VENV)/.installed
SBOM_VENV := .venv-sbom
CHART_VENV := .venv-chart
CHART_STAMP := $(CHART_VENV)/.installed
ARGS ?=
# Of `make test`, each with the files that are next; 0 tests in pytest's own process (for --pdb, -s).
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install test test-jobs test-stacks test-chart check fix demo faultlab drawn chaos bench docs screenshot pictures sbom clean

help:
	@echo "make demo        train on 4 ranks, break one, watch Rankscope find it; ARGS=\"--list-faults\""
	@echo "make faultlab    break trainings in every known way and score what is said; ARGS=\"--list\""
	@echo "make drawn       draw trainings and faults by chance, score what is said; ARGS=\"run FOLDER\""
	@echo "make chaos       kill, stop, cut off and fill up servers; ARGS=\"--rounds 200\""
	@echo "make bench       speed and size, beside other trackers; ARGS=\"--quick\" or \"--peers none\""
	@echo "make corpus      train small models, healthy and broken, judge them; ARGS=\"--seeds 0 1\""
	@echo "make test        the test suite; ARGS=\"tests/wire -x\" goes to pytest; WORKERS=2"
	@echo "make test-jobs   more real jobs, healthy and broken, and what is said of them; 4 minutes"
	@echo "make test-stacks real jobs of Horovod, TensorFlow and all other stacks; ARGS=\"-k horovod\""
	@echo "make test-chart  the Helm chart, by Helm's engine and Kubernetes' schemas; 350 MB"
	@echo "make check       format, lint, types, who may import whom"
	@echo "make fix         mend what ruff can mend by itself"
	@echo "make docs        write the generated pages of docs/, build the site that a server has at /help"
	@echo "make screenshot  take docs/images/*.png from a demo run, in a real browser"
	@echo "make pictures    pictures of every page, 2 to 1,024 ranks, light, dark, wide, narrow; ARGS=\"-o FOLDER\""
	@echo "make sbom        list of what an installed server consists of (CycloneDX), in dist/"
	@echo "make install     .venv with the project (editable) and its pinned development packages"
	@echo "make clean       remove .venv and what the tools left"

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt agent/fingerprint/kernel.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Rankscope needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: its modules venv and ensurepip are missing." >&2; \
	  echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf dashboard/help $(VENV); exit 1; }
	@echo "Installing into $(VENV) (the first time this takes some minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: $(STAMP)
	@.ci/browser
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# What is said of jobs is scored here; that it is said at all, `make test` tries with others of them.
test-jobs: $(STAMP)
	$(BIN)/pytest tests/e2e -m jobs -n $(WORKERS) --dist loadfile $(ARGS)

$(STACKS_STAMP): tests/stacks/install.sh tests/stacks/constraints.txt tests/stacks/horovod.txt
	@echo "Installing the stacks into $(STACKS_VENV) (the first time this takes 10 minutes) ..."
	@tests/stacks/install.sh $(STACKS_VENV) $(PYTHON)
	@touch $@

test-stacks: $(STAMP) $(STACKS_STAMP)
	STACKS_VENV=$(abspath $(STACKS_VENV)) STACKS_RESULTS=docs/stacks/results.json \
	  $(BIN)/pytest tests/stacks -m stacks $(ARGS)

$(CHART_STAMP): Makefile
	@$(PYTHON) -m venv $(CHART_VENV)
	@$(CHART_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  helm-python-sdk==0.2.2 kubernetes-validate==1.37.0
	@touch $@

test-chart: $(STAMP) $(CHART_STAMP)
	CHART_VENV=$(abspath $(CHART_VENV)) $(BIN)/pytest tests/test_helm_chart.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The pages that the dashboard's Help leads to.
$(HELP): $(STAMP) mkdocs.yml docs/site_hooks.py $(wildcard docs/*.md docs/*/*.md docs/stylesheets/*.css)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

demo: $(STAMP) $(HELP)
	@$(BIN)/rankscope demo $(ARGS)

faultlab: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.lab.faults $(ARGS)

drawn: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.lab.drawn $(ARGS)

chaos: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.lab.chaos $(ARGS)

bench: $(STAMP)
	@$(BIN)/python -m benchmarks.run $(ARGS)

corpus: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.lab.corpus table .corpus --coverage docs/coverage.md $(ARGS)

docs: $(STAMP)
	$(BIN)/python -m docs.generate
	$(MAKE) $(HELP)

screenshot: $(STAMP)
	@.ci/browser
	$(BIN)/python -m docs.demo_screenshot $(ARGS)

# For people to look at, one by one; they are not kept.
pictures: $(STAMP)
	@.ci/browser
	$(BIN)/python -m tests.dashboard.pictures $(ARGS)

# Of what the container image installs, in an environment with nothing else in it.
sbom: $(STAMP)
	@$(PYTHON) -m venv --clear --without-pip $(SBOM_VENV)
	@$(BIN)/python -m pip --python $(SBOM_VENV)/bin/python install --quiet --disable-pip-version-check \
	  --constraint constraints.txt '.[server,postgres,notify,otel]'
	@mkdir -p dist
	@.ci/sbom $(SBOM_VENV) dist/rankscope.cdx.json

clean:
	rm -rf $(VENV) $(STACKS_VENV) $(SBOM_VENV) $(CHART_VENV) .venv-peers build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
