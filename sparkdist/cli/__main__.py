"""`python -m sparkdist.cli`."""

from __future__ import annotations

from sparkdist.cli import main

if __name__ == "__main__":
    main()
