# Targets for a fresh machine with Python 3.11+ and make.  `make serve` and `make test` install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
# Only for bit-for-bit comparison, so it is installed where nothing imports it by accident.
TORCHVISION := $(VENV)/torchvision-reference
KERNELS := src/keepsight/models/_cpu_kernels*.so
# One more than the number of cores, since many tests wait for a server.
WORKERS = $(shell expr $$(nproc) + 1)

$(if $(word 2,$(VENV)),$(error VENV must have no space, as make would take its parts for several folders: $(VENV)))
# Its scripts and the installed package name the folder that it was made for. Only a recipe may act on that: all that
# stands here is done in dry runs too, and as a shell completes a word.
IS_MOVED := $(shell [ ! -s '$(VENV)/installed' ] || [ "$$(cat '$(VENV)/installed')" = "$$(pwd -P)" ] || echo yes)

.PHONY: install borrow-compiler install-test serve test check bench clean

ifneq ($(IS_MOVED),)
.PHONY: $(BIN)/python $(VENV)/installed
endif

# This folder's own environment was moved or copied with it: it is set aside until another is installed. One that is
# named by VENV may be another clone's.
# A partial one, or one of another Python, would count as made from then on, so it is removed.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python " + sys.version.split()[0] \
		+ ", and 3.11 or newer is needed: make PYTHON=python3.11, for example")'
	$(if $(IS_MOVED),$(if $(filter file,$(origin VENV)),mv -T '$(VENV)' '$(VENV).moved',@echo \
		"$(VENV) was made in $$(cat '$(VENV)/installed'): remove it, or name another as VENV" >&2; exit 1))
	$(PYTHON) -m venv '$(VENV)' || { rm -rf '$(VENV)'; exit 1; }

# torch is installed first and pinned, so that no other package's requirement pulls in another build.
$(VENV)/installed: pyproject.toml setup.py constraints.txt $(wildcard src/keepsight/models/*.[ch]) | $(BIN)/python
	$(PIP) torch
	$(PIP) -e '.[fast,pdf]'
	ls $(KERNELS) > /dev/null 2>&1 || $(MAKE) -s borrow-compiler || echo "No compiler: torch's own kernels serve, slower"
	pwd -P > $@
	rm -rf '$(VENV).moved'

# The CPU kernels are compiled when the package is installed.  If there is no compiler, one is installed temporarily.
borrow-compiler:
	$(PIP) ziglang
	# Plain `zig cc` would target this machine's CPU only.  A path relative to the clone: CC is split at spaces.
	CC="$$(echo $(VENV)/lib/python3*/site-packages/ziglang/zig) cc -mcpu=baseline" $(PIP) -e .
	$(BIN)/python -m pip uninstall -q -y ziglang
	ls $(KERNELS)

# Lists what '.[test]' would install; '.[test]' itself would compile the kernels again.
LIST_TEST_EXTRA := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"]["test"], sep="\n")

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -c '$(LIST_TEST_EXTRA)' | $(PIP) -r /dev/stdin
	test -d $(TORCHVISION) || $(PIP) --no-deps --target $(TORCHVISION) torchvision
	touch $@

# The page is tested in a real browser.  If there is none and it cannot be installed, its tests are skipped.
$(VENV)/browser: $(VENV)/installed-test
	tests/install_browser && touch $@ || true

# Tiers are tested against a real Redis.  If there is none and it cannot be fetched, these tests are skipped.
$(VENV)/redis/redis-server: $(VENV)/installed-test
	tests/install_redis $(VENV)/redis || true

install: $(VENV)/installed

install-test: $(VENV)/installed-test $(VENV)/browser $(VENV)/redis/redis-server

serve: install
	$(BIN)/keepsight serve $(ARGS)

# Without cached bytecode, each process that a test starts would recompile everything it imports.
test: export PYTHONDONTWRITEBYTECODE :=
test: install-test
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

check: install-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

bench: install-test
	PYTHONPATH=. $(BIN)/python benchmarks/preprocess.py
	PYTHONPATH=. $(BIN)/python benchmarks/cold_time.py
	PYTHONPATH=. $(BIN)/python benchmarks/scheduler_cost.py

clean:
	rm -rf '$(VENV)' '$(VENV).moved' build dist
