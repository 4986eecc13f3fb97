"""`python -m sparkdist.cli`."""

from __future__ import annotations

from sparkdist.cli import main

main()
