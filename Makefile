# Thin: scripts/setup.sh does the set-up, and every target below starts with it.
RUN = . .venv/env.sh && .venv/bin

.PHONY: setup horovod test lint demo bench clean

setup:
	@scripts/setup.sh

# Tests run real Horovod, which has to be built: minutes the first time, from the cache later.
horovod: setup
	@$(RUN)/sparkdist horovod build

# A process holds one Spark session at a time: folders with sessions of their own get a process each.
# make test ARGS="-k torchrun -x" passes options on, to all of them; ARGS="tests/cluster -k ctrl_c" names
# one, or a file in one. make test SLOW=1 runs the slow tests too. (5: a folder had no such test.)
# tests/faults runs on a classic session and on Connect, there beside what is Connect's own.
SUITES = $(or $(filter tests%,$(ARGS)),tests tests/cluster "tests/connect tests/faults --connect")

PYTEST = $(RUN)/pytest $$suite $(if $(SLOW),,-m "not slow") $(filter-out tests%,$(ARGS))

# RETRY=1, for machines that others load too: what failed is tried once more, by itself.
test: horovod
	@for suite in $(SUITES); do \
	  ($(PYTEST)); code=$$?; \
	  if [ $$code = 1 ] && [ -n "$(RETRY)" ]; then ($(PYTEST) --last-failed); code=$$?; fi; \
	  test $$code = 0 -o $$code = 5 || exit 1; \
	done

lint: setup
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

demo: setup
	@$(RUN)/python examples/digits.py

bench: horovod
	@status=0; for file in launch results training restart horovod; do \
	  ($(RUN)/python benchmarks/$$file.py) || status=1; \
	done; exit $$status

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
