"""The `sparkdist` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command; `python -m sparkdist.cli` is the same."""
    try:
        import click  # noqa: F401
    except ImportError:
        print('sparkdist: the command needs click: pip install "sparkdist[cli]"', file=sys.stderr)
        sys.exit(2)
    from sparkdist.cli.commands import sparkdist

    sparkdist(prog_name="sparkdist")
