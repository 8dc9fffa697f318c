# Needs make and a Python >= 3.11; everything else is installed into .venv. For another Python
# beside it: make quick PYTHON=python3.13 VENVS=build/3.13

# What `make demo` trains; its folder is a new one each time, for a run is never overwritten.
DEMO_RUN  := runs/demo/$(shell date +%Y-%m-%d-%H%M%S)
DEMO_ARGS := train ppo maze-medium --steps 500000 --folder $(DEMO_RUN)

# Test processes side by side: as many as there are cores, up to 8.
WORKERS ?= auto

candidates := python3 python3.13 python3.12 python3.11
new_enough := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
ifndef PYTHON
PYTHON := $(shell for p in $(candidates); do $$p $(new_enough) 2>/dev/null && echo $$p && break; done)
endif

# The folder in which .venv lies.
VENVS   ?= .
venv    := $(VENVS)/.venv
bin     := $(venv)/bin
runtime := $(venv)/.installed
dev     := $(venv)/.installed-dev

# A few minutes' worth of the tests, for one more Python: the core, every agent, the command.
QUICK := tests/test_imports.py tests/core tests/adapters/test_agent_contract.py tests/adapters/test_cli.py

.PHONY: demo test quick format lint types bench clean

demo: $(runtime)
	$(bin)/vernal $(DEMO_ARGS)
	$(bin)/vernal evaluate $(DEMO_RUN)
	$(bin)/vernal watch $(DEMO_RUN)
	@echo
	@echo "learning curve: $(DEMO_RUN)/curve.png"
	@echo "animation:      $(DEMO_RUN)/agent.gif"

pytest := $(bin)/pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

test: lint types
	$(pytest)

quick: lint types
	$(pytest) $(QUICK)

format: $(dev)
	$(bin)/ruff format
	$(bin)/ruff check --fix

lint: $(dev)
	$(bin)/ruff format --check
	$(bin)/ruff check

types: $(dev)
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(bin)/pyright --venvpath $(VENVS)

bench: $(runtime)
	for file in environments ppo search core; do $(bin)/python benchmarks/$$file.py || exit 1; done
	for what in seeds devices; do $(bin)/python benchmarks/scaling.py $$what || exit 1; done

clean:
	rm -rf $(venv) build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp in it is as new as the last install; whatever the metadata come from, once it
# is newer, installs again.
metadata := pyproject.toml src/vernal/__init__.py

$(runtime): $(metadata)
	$(make_venv)
	$(bin)/python -m pip install --quiet --editable .
	touch $(runtime)

$(dev): $(metadata)
	$(make_venv)
	$(bin)/python -m pip install --quiet --editable '.[dev]'
	touch $(runtime) $(dev)

define make_venv
@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found: give one, as in make PYTHON=/path/to/python3.12" >&2; exit 1; }
$(bin)/python $(new_enough) 2>/dev/null || $(PYTHON) -m venv --clear $(venv)
endef
