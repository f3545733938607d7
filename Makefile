# Two commands: `make up` serves a model on this machine, `make test` runs every test.

VENV := .venv
BIN := $(VENV)/bin
# The environment is made anew, in place, when what it is made from changes.
STAMP := $(VENV)/.made-from-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
# The first interpreter that Weir supports; PYTHON=... overrides.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null \
	&& command -v $$name && break; done)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv up test test-full lint format protos secret clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-18s %s\n", $$1, $$2 }'

venv: $(STAMP)  ## make .venv with everything that serving and testing need

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "weir needs Python 3.11, 3.12 or 3.13; name one with PYTHON=..." >&2; exit 2; }
	@echo "weir: making $(VENV) with $(PYTHON); the first time takes some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
	@rm -f $(VENV)/.made-from-*
	@touch $@

up: $(STAMP)  ## serve the default model on 127.0.0.1:8000; ARGS="--prefill 2 --decode 2"
	@exec $(BIN)/weir up $(ARGS)

test: $(STAMP)  ## run the tests, under 20 minutes on two cores; ARGS="-k name"
	@$(BIN)/python -m pytest $(ARGS)

test-full: $(STAMP)  ## run every long form as well
	@WEIR_TEST_FULL=1 $(BIN)/python -m pytest -o faulthandler_timeout=3600 $(ARGS)

lint: $(STAMP)  ## ruff and mypy, both strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP)  ## let ruff format every file
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

protos: $(STAMP)  ## generate protos/*_pb2* from protos/*.proto
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc \
		-I. --python_out=. --mypy_out=. protos/*.proto
	@$(BIN)/python -m grpc_tools.protoc -I. --grpc_python_out=. $$(grep -l '^service ' protos/*.proto)

secret: deploy/secrets/transfer_secret  ## make the key that workers under Docker Compose prove themselves with

# The folder keeps others out; the file is readable, since the services in the containers run as a user of their own.
deploy/secrets/transfer_secret:
	@mkdir -p -m 700 $(@D)
	@head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > $@
	@chmod 444 $@

clean:  ## remove the environment and every cache
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
