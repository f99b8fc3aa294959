# Verbs of the repository; `make help` lists them. Everything they make is in target/, dist/, .venv*/ and the cache folder.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

# vLLM release that .venv holds, and the oldest supported one that `make test-all` adds.
VLLM     ?= 0.32.0
VLLM_OLD ?= 0.30.0
# auto: the CUDA build of vLLM where a GPU is found, else the CPU build. The tests always take the CPU build.
PLATFORM ?= auto
# Downloads that outlive `make clean`. The variable goes no further than this file: in a server's environment a name
# that begins with LVLLM_ is a setting, and an unknown one is an error. CACHE itself reaches make within make.
CACHE    ?= $(or $(LVLLM_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lvllm)
PIP_CACHE_DIR ?= $(if $(LVLLM_CACHE),$(CACHE)/pip)
export CACHE
$(if $(PIP_CACHE_DIR),$(eval export PIP_CACHE_DIR))
unexport LVLLM_CACHE

# A GPU machine keeps the CPU build of the tests apart from the CUDA build of the demo.
GPUS  := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
BUILD := .venv-build
VENV  := $(if $(and $(filter-out 0,$(GPUS)),$(filter cpu,$(PLATFORM))),.venv-cpu,.venv)
OLD   := .venv-$(VLLM_OLD)
PY    = $(shell tools/system_deps.sh --python)

WHEEL_SOURCES := crates python kernels Cargo.toml Cargo.lock pyproject.toml rust-toolchain.toml LICENSE README.md \
                 tools/build_wheel.sh tools/build_hwloc.sh tools/requirements-build.txt

# A kernel that is not optimised is a chain of calls; Cargo.toml sets the test profile's opt-level.
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)
CARGO_TEST := $(if $(NEXTEST),cargo nextest run --no-fail-fast,cargo test --no-fail-fast)

.PHONY: help
help: ## list the verbs
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

# --- environments -----------------------------------------------------------------------------------------------------

.PHONY: deps build-env env env-old
deps: ## system packages: installed with apt where allowed, else the line to run
	@tools/system_deps.sh

build-env: deps
	@tools/stamped.sh $(BUILD)/.stamp '$(BUILD)/bin/maturin' \
	  'echo "build-env: $(BUILD)"; "$(PY)" -m venv --clear $(BUILD); $(BUILD)/bin/python -m pip install -q --disable-pip-version-check -r tools/requirements-build.txt' \
	  tools/requirements-build.txt

env: deps ## .venv: stock vLLM (VLLM=0.32.0, PLATFORM=auto|cpu|cuda)
	@"$(PY)" tools/setup_env.py --venv $(VENV) --vllm $(VLLM) --platform $(PLATFORM) --cache "$(CACHE)"

env-old: deps
	@"$(PY)" tools/setup_env.py --venv $(OLD) --vllm $(VLLM_OLD) --platform cpu --cache "$(CACHE)"

# --- product ----------------------------------------------------------------------------------------------------------

.PHONY: wheel wheel-check install install-old demo
wheel: build-env ## release wheel in dist/
	@tools/stamped.sh target/stamps/wheel 'dist/lvllm-*.whl' 'tools/build_wheel.sh $(BUILD) "$(CACHE)"' $(WHEEL_SOURCES)

wheel-check: wheel ## what the wheel links, carries, and that it imports without vLLM
	@$(BUILD)/bin/python tools/check_wheel.py dist/lvllm-*.whl

# The wheel itself by force, since its version stays while its content changes; then what it depends on, by the
# same pins as the environment.
define INSTALL
	@tools/stamped.sh $(1)/.lvllm-stamp '$(1)/bin/lvllm' \
	  '$(1)/bin/python -m pip install -q --disable-pip-version-check --force-reinstall --no-deps --no-index dist/lvllm-*.whl
	   $(1)/bin/python -m pip install -q --disable-pip-version-check -c tools/requirements-test.txt dist/lvllm-*.whl' \
	  dist $(1)/lvllm-env.json tools/requirements-test.txt
endef
install: wheel env
	$(call INSTALL,$(VENV))

install-old: wheel env-old
	$(call INSTALL,$(OLD))

demo: install ## build, install beside stock vLLM, serve a small MoE model and ask it a question
	@$(VENV)/bin/python tools/demo.py

# --- checks -----------------------------------------------------------------------------------------------------------

.PHONY: test test-all lint fmt test-rust test-isa test-loom test-unit test-vllm test-vllm-old test-slow test-gpu
test: deps ## everything that needs no GPU
	@PLATFORM=cpu "$(PY)" tools/run_checks.py lint test-rust test-isa test-loom wheel-check test-unit test-vllm

test-all: deps ## test, and the slow matrices and the oldest supported vLLM
	@PLATFORM=cpu "$(PY)" tools/run_checks.py lint test-rust test-isa test-loom wheel-check test-unit test-vllm test-slow \
	  test-vllm-old bench-quick

# The golden generators are kept as they were when the goldens were made.
LINTED := python tools tests benches --extend-exclude tests/golden
lint: build-env ## rustfmt, clippy, ruff, mypy
	@cargo fmt --version >/dev/null 2>&1 || { echo "lint: cargo fmt is missing: rustup component add rustfmt" >&2; exit 1; }
	cargo clippy --version >/dev/null 2>&1 || { echo "lint: cargo clippy is missing: rustup component add clippy" >&2; exit 1; }
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(BUILD)/bin/ruff check $(LINTED)
	$(BUILD)/bin/mypy

fmt: build-env ## rustfmt, ruff's safe fixes
	@cargo fmt --all
	$(BUILD)/bin/ruff check --fix $(LINTED)

test-rust: deps ## Rust tests on the best instruction set of this CPU
	@$(CARGO_TEST) --workspace --locked
	cargo test --workspace --locked --doc

test-isa: deps ## kernel and layer tests once more on every lesser instruction set
	@tools/test_isa.sh

test-loom: deps ## model-check the pool's barriers
	@RUSTFLAGS="--cfg loom" cargo test -p lk-core --locked --target-dir target/loom --lib -- pool::

# Tests start `vllm` and `lvllm` by name, as users do.
PYTEST = bin/python -m pytest -p no:cacheprovider --timeout 600
RUN_IN = @PATH="$(CURDIR)/$(1)/bin:$$PATH" $(1)/$(PYTEST)
test-unit: install ## Python tests without vLLM's engine
	$(call RUN_IN,$(VENV)) -m "not slow" tests/unit tests/audit

test-vllm: install ## Python tests against vLLM's CPU build
	$(call RUN_IN,$(VENV)) -m "not slow" tests/vllm

test-vllm-old: install-old
	$(call RUN_IN,$(OLD)) -m "not slow" tests/vllm

test-slow: install
	$(call RUN_IN,$(VENV)) -m slow tests/unit tests/audit tests/vllm

test-gpu: install ## tests that need an NVIDIA GPU
	$(call RUN_IN,$(VENV)) tests/gpu

# --- benchmarks -------------------------------------------------------------------------------------------------------

.PHONY: bench bench-quick
BENCHES := $(patsubst crates/lk-core/benches/%.rs,--bench %,$(wildcard crates/lk-core/benches/*.rs))
bench: deps ## kernels, layer, barrier and packing beside the measured read bandwidth
	@cargo bench -p lk-core --locked $(BENCHES)

bench-quick: deps ## the same benches, briefly: do they still run
	@cargo bench -p lk-core --locked $(BENCHES) -- --quick

.PHONY: clean
clean: ## remove what the verbs made, but for the download cache
	@rm -rf target dist licenses $(BUILD) .venv .venv-cpu .venv-[0-9]* .mypy_cache .ruff_cache .pytest_cache
