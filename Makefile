PYTHON ?= python3
BIN := .venv/bin

# Tests of what Flower calls, and of what we call in Flower.
FLOWER := tests/algorithm tests/flower tests/simulation tests/node tests/test_client.py \
	tests/test_strategy.py tests/test_legacy_api.py tests/test_engines.py \
	tests/simulations/test_engines.py tests/simulations/loopback/test_deployment.py \
	tests/test_examples.py

SEARCH := flwr_safedshb/aggregation/smea

# Sources are compiled once, and not again by each of the tests' processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup compiled peers browser proxy lint style types format check quick test \
	portable loaded compat release loops docs demo duel audit reproduce beyond withstand trainability \
	yardstick chaos bench clean

help: ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: .venv/ready ## Make .venv with the tested versions

# torch comes first and by its exact version: an open range may pull gigabytes of CUDA.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Also the search of SMEA, which takes numba 20 seconds in each process that comes first.
compiled: $(SEARCH)/__pycache__/compiled
$(SEARCH)/__pycache__/compiled: .venv/ready $(wildcard $(SEARCH)/*.py)
	$(BIN)/python -c 'import numpy; from flwr_safedshb.aggregation import SMEA; \
		x = numpy.random.default_rng(0).normal(size=(22, 9)); SMEA().weigh(x @ x.T, 7)'
	mkdir -p $(@D) && touch $@

lint: style types ## ruff and mypy, strict

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: style compiled ## While you write: lint, and all tests without processes and federations
	@$(MAKE) --no-print-directory -j 2 types quick

# A ledger waits for the disk at every charge, and memory has nothing to wait for.
MEMORY = $(shell test -w /dev/shm && df -m --output=avail /dev/shm 2> /dev/null | \
	awk 'NR == 2 && $$1 > 2000 { print "TMPDIR=/dev/shm" }')
QUICK = $(MEMORY) $(BIN)/pytest -q -n 2 -m 'not process and not federation' \
	-o tmp_path_retention_policy=failed
quick: setup
	$(QUICK) --durations=5 --durations-min=2

# Reports and pages are tested in a real browser.
browser:
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }

# So is the kit's configuration, in the proxy that it is of.
proxy:
	@test -x /usr/sbin/haproxy || \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends haproxy; }

# One process more than two processors: tests of real federations mostly wait.
test: setup browser proxy compiled ## Before you commit: all tests
	$(BIN)/pytest -q -n 3

# OpenBLAS' kernel, torch's kernels, threads: as other machines have them.
KERNELS = Nehalem,default,1 \
	$(shell grep -qs -w avx2 /proc/cpuinfo && echo Haswell,avx2,2) \
	$(shell grep -qs -w avx512f /proc/cpuinfo && echo SkylakeX,avx512,1)
portable: setup compiled ## The quick tests as other processors and threads compute
	@for kernel in $(KERNELS); do echo "$$kernel:"; set -- $$(echo $$kernel | tr , ' '); \
		OPENBLAS_CORETYPE=$$1 ATEN_CPU_CAPABILITY=$$2 OMP_NUM_THREADS=$$3 $(QUICK) || \
		failed=1; done; test -z "$$failed"

# The loops end with this shell, however it ends.
loaded: setup browser proxy compiled ## The tests with processes, beside eight busy loops
	@for _ in 1 2 3 4 5 6 7 8; do \
		(while kill -0 $$$$; do :; done) 2> /dev/null & busy="$$busy $$!"; done; \
		trap "kill $$busy 2> /dev/null" EXIT; trap 'exit 130' INT TERM; \
		$(BIN)/pytest -q -n 3 -m process $(LOADED)

# Both live in folders of their own, so that .venv stays what constraints.txt says. The
# newest flwr comes without its dependencies: its pins may exclude those of the others.
compat: setup proxy .venv/lowest/ready ## Before a release: the newest flwr, the lowest versions
	rm -rf .venv/newest
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target .venv/newest flwr
	PYTHONPATH=$(CURDIR)/.venv/newest $(BIN)/pytest -q -n 3 $(FLOWER)
	NUMBA_CACHE_DIR=$(CURDIR)/.venv/lowest/numba \
		.venv/lowest/bin/pytest -q -n 3 $(FLOWER) tests/aggregation tests/privacy

.venv/lowest/ready: .venv/ready tests/lowest.py
	$(PYTHON) -m venv .venv/lowest
	$(BIN)/python tests/lowest.py > .venv/lowest/pins.txt
	.venv/lowest/bin/pip install --quiet --disable-pip-version-check \
		-r .venv/lowest/pins.txt hatchling hypothesis nbclient ipykernel \
		pytest pytest-xdist
	.venv/lowest/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# The tools pin versions of packages that .venv has; they need none of them.
release: setup .venv/release/ready ## Wheel and sdist, built twice and compared, their SBOM, an audit
	$(BIN)/python .ci/release.py

.venv/release/ready: .venv/ready
	$(PYTHON) -m venv .venv/release
	.venv/release/bin/pip install --quiet --disable-pip-version-check \
		cyclonedx-bom pip-audit
	touch $@

# One after the other, on a machine that does nothing else.
loops: lint browser proxy compiled .venv/lowest/ready ## Time check, test and compat in one run
	@for loop in check test compat; do began=$$(date +%s); \
		$(MAKE) --no-print-directory $$loop > .venv/$$loop.log 2>&1; ended=$$?; \
		echo "$$loop: $$(($$(date +%s) - began)) s, $$(tail -1 .venv/$$loop.log)"; \
		test $$ended = 0 || failed=1; done; test -z "$$failed"

# Not --quiet, which hides warnings from --strict.
docs: setup ## The documentation, as pages in outputs/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir outputs/docs
	@echo "Written: outputs/docs/index.html"

demo: setup ## Hospitals train while some are hijacked: a table, a report
	$(BIN)/python -m simulations.study demo

duel: setup ## The rules against attacks, without training, as a table
	$(BIN)/python -m simulations.study duel

audit: setup ## Measure the privacy of the client's own code
	$(BIN)/safedshb audit --suite epsilon

reproduce: setup ## The paper's experiments: runs, panels, table
	$(BIN)/python -m simulations.study paper

beyond: setup ## Other rules, tasks and federations than the paper's
	$(BIN)/python -m simulations.study beyond

withstand: setup ## Which federations withstand colluders, against the plan's prediction
	$(BIN)/python -m simulations.study withstand

trainability: setup ## Which trainings learn in spite of their noise, against the verdict
	$(BIN)/python -m simulations.study trainability

yardstick: setup ## A public table of private, robust training, and ours beside it
	$(BIN)/python -m simulations.study yardstick

chaos: setup ## Break a real federation in every way, and check what must hold
	$(BIN)/python -m simulations.chaos

# The peers pin other versions of torch and torchvision; their aggregators need neither.
peers: .venv/peers
.venv/peers: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps byzfl==0.0.11 byzpy==0.1.4
	touch $@

bench: peers ## Benchmarks against peers and floors
	$(BIN)/python -m simulations.benchmarks

clean: ## Remove the environment and everything generated
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis outputs
