# Everything a checkout can do.  The commands make .venv themselves; they need Python >= 3.10, a C++20
# compiler and make, nothing else.
#
# `make test` tests what users get: a normal (not editable) installation of the package, made again only
# when a source changed.  The objects are kept in build/, so that costs seconds.

PYTHON ?= python3
CXX := $(if $(filter default,$(origin CXX)),c++,$(CXX))
export CXX

# Containers often set it, and then every process compiles torch's Python again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# cmake and ninja come from PyPI into .venv.
TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"

# The list of sources is itself a file, rewritten when a source is added or removed.
SOURCES := $(shell find src cpp CMakeLists.txt pyproject.toml constraints.txt -type f \
             -not -name '*.so' -not -name '*.pyc' | LC_ALL=C sort)
MANIFEST := build/sources
$(shell mkdir -p build; echo '$(SOURCES)' | cmp -s - $(MANIFEST) || echo '$(SOURCES)' > $(MANIFEST))
CPP := $(filter %.cc %.h,$(SOURCES))

.PHONY: help demo test matrix gpu nightly stress rounds chaos sanitize arm bench bootstrap scaling controller training lint type \
        format docs wheel core clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):[^#]*##/  make \1  \t/p' $(MAKEFILE_LIST)

demo: $(DONE)/shoal  ## train a small network on handwritten digits with two ranks
	$(BIN)/shoal run -n 2 examples/digits.py

# Four processes share the files among them, also on two cores, because many tests wait for processes,
# deadlines and the network.
# tests/conftest.py sorts the files.
test: $(DONE)/shoal  ## every test but the long ones; ARGS="..." goes to pytest; RETRY=1 runs a module that failed again
	$(BIN)/python -m $(if $(RETRY),tools.retry,pytest) -m "not stress" -n 4 --dist loadfile --no-loadscope-reorder \
	  --durations=20 $(ARGS)

matrix: $(DONE)/shoal  ## tests with other releases of torch, an hour; TORCH=2.14.1 for one of them
	PYTHONPATH=. $(BIN)/python -m tools.matrix $(TORCH) $(ARGS)

# It uses the torch of PYTHON, not .venv: on a machine with a GPU that is the one with CUDA.
gpu:  ## the tests for a GPU, with the torch of PYTHON; WHEELS=folder without a network; NCCL=libnccl.so.2
	$(PYTHON) benchmarks/gpu.py $(if $(WHEELS),--wheels $(WHEELS)) $(if $(NCCL),--nccl $(NCCL)) $(ARGS)

nightly: stress chaos sanitize  ## everything that is too long for `make test`, three hours

# The races are run again and again, in fresh processes, because one good run of a race proves little.
stress: $(DONE)/shoal  ## the long tests, the races 20 times, a million collectives
	for run in $$(seq 20); do $(BIN)/python -m pytest -q -m "concurrency and not stress" $(ARGS) || exit 1; done
	$(BIN)/python -m pytest -m stress -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)
	$(MAKE) rounds ROUNDS=long

rounds: $(BIN)/ruff  ## random rounds of the core, 2 minutes; ROUNDS=long for ten times as many
	$(CORE_TESTS) -B build/stress
	$(TOOLS) cmake --build build/stress --target stress
	build/stress/stress --operations $(if $(filter long,$(ROUNDS)),1000000,100000)
	build/stress/stress --frames 100000
	build/stress/stress --passes 100000
	build/stress/stress --endpoints $(if $(filter long,$(ROUNDS)),200,20)
	build/stress/stress --packets 100000
	build/stress/stress --agreements $(if $(filter long,$(ROUNDS)),1000000,50000)

# A minute of random rounds each, in builds of their own.  `build/tsan/stress --seed K --operations 1` plays
# one round again.
CORE_TESTS := $(TOOLS) cmake -S . -G Ninja -DCMAKE_BUILD_TYPE=Release -DSHOAL_TESTS=ON \
                -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" --log-level=WARNING
# The programs in C++, against an archive with a sanitizer; libtorch has none.  In a forked child the search
# for leaks complains about the threads of its parent, and checks of types need free descriptors.
CPP_TESTS = CPP_SECONDS=30 $(BIN)/python -m pytest -q -m "" -k "not compile$(1)" tests/frontend
sanitize: $(DONE)/shoal  ## the core under the thread, address and undefined behaviour sanitizers
	$(CORE_TESTS) -B build/tsan -DSHOAL_SANITIZE=thread
	$(TOOLS) cmake --build build/tsan --target stress shoal_frontend
	build/tsan/stress --seconds 60
	build/tsan/stress --endpoints 20
	$(CORE_TESTS) -B build/asan -DSHOAL_SANITIZE=address,undefined
	$(TOOLS) cmake --build build/asan --target stress shoal_frontend
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/asan/stress --seconds 60
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/asan/stress --frames 100000
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/asan/stress --passes 20000
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/asan/stress --endpoints 20
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/asan/stress --packets 100000
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build/asan/stress --agreements 20000
	CPP_ARCHIVE=$(CURDIR)/build/tsan/libshoal.a CPP_FLAGS="-O1 -fsanitize=thread" $(call CPP_TESTS)
	CPP_ARCHIVE=$(CURDIR)/build/asan/libshoal.a UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  CPP_FLAGS="-O1 -fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer" \
	  $(call CPP_TESTS, and not forks and not descriptors)

# Cross-compiled and emulated.  The emulator keeps the memory order of the machine that it runs on, so this
# shows that the code is right for the processor, not that it has no races there.
arm: $(BIN)/ruff  ## rounds of the core for 64-bit ARM, 10 minutes; needs g++-aarch64-linux-gnu and qemu-user-static
	$(CORE_TESTS) -B build/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
	$(TOOLS) cmake --build build/arm --target stress
	qemu-aarch64-static build/arm/stress --operations 20000
	qemu-aarch64-static build/arm/stress --endpoints 10
	qemu-aarch64-static build/arm/stress --frames 20000
	qemu-aarch64-static build/arm/stress --packets 20000
	qemu-aarch64-static build/arm/stress --passes 20000
	qemu-aarch64-static build/arm/stress --agreements 20000

bench: $(DONE)/shoal  ## every collective beside Gloo and MPI, 20 minutes; rewrites the tables of docs/benchmark.md
	$(BIN)/shoal bench --readme $(ARGS)

training: $(DONE)/shoal  ## what a training step with DDP costs beyond computing alone, beside torch's over Gloo, 14 minutes
	$(BIN)/python benchmarks/training.py $(ARGS)

scaling: $(DONE)/shoal  ## how the cost of a group grows from 2 to 64 ranks on this machine
	$(BIN)/python benchmarks/scaling.py $(ARGS)

hosts: $(DONE)/shoal  ## the algorithms between hosts, beside Gloo, on simulated hosts; needs root
	$(BIN)/python benchmarks/hosts.py $(ARGS)

lanes: $(DONE)/shoal  ## what concurrency=k brings on one host and on simulated hosts
	$(BIN)/python benchmarks/lanes.py $(ARGS)

chaos: $(DONE)/shoal  ## deaths, standstills, joins and leaves at random moments, 8 minutes; rewrites the table of docs/failures.md
	$(BIN)/python benchmarks/chaos.py $(ARGS)

bootstrap: $(DONE)/shoal  ## how long 100 to 10,000 ranks take to meet, and what it costs the store, beside torch's, 3 minutes
	$(BIN)/python benchmarks/bootstrap.py $(ARGS)

controller: $(DONE)/shoal  ## what an operation of the master-worker mode costs, beside local torch, 4 minutes
	$(BIN)/python benchmarks/controller.py $(ARGS)

lint: $(BIN)/ruff type  ## style, format, types and layers; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/python -m tools.class_names
	$(BIN)/python -m tools.prose
	$(BIN)/clang-format --dry-run -Werror $(CPP)

type: $(BIN)/ruff  ## mypy --strict
	$(BIN)/mypy

format: $(BIN)/ruff  ## rewrite every source in the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

docs: $(DONE)/docs  ## the documentation with the API reference as a site in out/docs; a dead link is an error
	PYTHONPATH=. $(BIN)/mkdocs build --strict --site-dir out/docs

# The tag says which glibc the wheel needs, which is that of the machine that builds it, or an older one.
wheel: $(DONE)/shoal  ## a wheel for manylinux, checked and named by auditwheel, into dist/
	rm -f dist/shoal-*.whl
	$(TOOLS) $(BIN)/auditwheel repair -w dist build/wheel/shoal-*.whl
	@ls dist/shoal-*.whl

core: $(DONE)/shoal  ## bring the native module into src/shoal, for work with PYTHONPATH=src
	install $(VENV)/lib/python3*/site-packages/shoal/_core*.so src/shoal/

clean:  ## remove everything the other commands made, .venv too
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f src/shoal/_core*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- how .venv comes to be: one stamp a step ------------------------------------------------------

$(DONE)/venv:
	@command -v $(PYTHON) >/dev/null \
	  || { echo "shoal needs Python >= 3.10 and found no '$(PYTHON)': install it, or name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	  || { echo "shoal needs Python >= 3.10 and '$(PYTHON)' is older or does not start: name another one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "shoal needs Python's venv module and '$(PYTHON)' has none: on Debian, apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
	  || { echo "shoal needs Python.h and '$(PYTHON)' has none: on Debian, apt install python3-dev" >&2; exit 1; }
	@echo '#include <span>' | $(CXX) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null \
	  || { echo "shoal needs a C++20 compiler and '$(CXX)' is none: install g++ >= 11 or clang >= 13, or name one with make CXX=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(DONE) && touch $@

# What builds the core goes first.  Then the core is built while pip brings what others made, which waits for
# the network and uses one core of the machine.
$(DONE)/builders: $(DONE)/venv
	$(PIP) cmake nanobind ninja scikit-build-core
	@touch $@

# HolisticTraceAnalysis reads traces in a test, which needs no more of the dependencies: they take 500 MB, and
# pandas in .venv would change what other packages do.
HTA := HolisticTraceAnalysis pandas plotly narwhals python-dateutil pytz six tzdata

# Without bytecode, which Python writes for the few modules that are used.
$(DONE)/packages: $(DONE)/builders pyproject.toml constraints.txt
	$(BIN)/python tools/requirements.py bench examples dev > build/requirements
	$(PIP) --no-compile -r build/requirements
	rm -rf build/hta
	$(PIP) --no-compile --no-deps --target build/hta $(HTA) || echo "without HolisticTraceAnalysis, a test is skipped" >&2
	@touch $@

# Without build isolation the tools keep their paths, so that CMake compiles again only what changed.  Make's
# own flags would tell ninja to use one core.
$(DONE)/built: $(DONE)/builders $(MANIFEST) $(SOURCES)
	rm -rf build/wheel
	MAKEFLAGS= $(TOOLS) $(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps -w build/wheel .
	@touch $@

$(DONE)/shoal: $(DONE)/builders $(MANIFEST) $(SOURCES)
	@$(MAKE) --no-print-directory -j2 $(DONE)/built $(DONE)/packages
	$(PIP) --force-reinstall --no-deps build/wheel/shoal-*.whl
	@touch $@

# What checks and builds needs the tools, not an up-to-date installation.
$(BIN)/ruff:
	@$(MAKE) --no-print-directory $(DONE)/shoal

$(DONE)/docs: $(BIN)/ruff constraints.txt
	$(PIP) mkdocs 'mkdocstrings[python]' Pygments
	@touch $@
