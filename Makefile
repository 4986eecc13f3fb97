# Thin: scripts/setup.sh does the set-up, and every target below starts with it.
RUN = . .venv/env.sh && .venv/bin

.PHONY: setup test lint demo bench clean

setup:
	@scripts/setup.sh

# Spark Connect needs a process of its own: of a process's sessions all are classic, or all Connect's.
# make test ARGS="-k torchrun -x" passes options on; make test SLOW=1 runs the slow tests too.
test: setup
	$(RUN)/pytest $(if $(SLOW),,-m "not slow") $(ARGS)
	$(if $(ARGS),,$(RUN)/pytest tests/connect $(if $(SLOW),,-m "not slow"))

lint: setup
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

demo: setup
	@$(RUN)/python examples/digits.py

bench: setup
	@$(RUN)/python benchmarks/launch.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
