"""Any Python function on N ranks; no framework at all."""

from __future__ import annotations

from sparkdist.frameworks.base import Framework


class Plain(Framework):
    """Ranks that know their number and nothing else."""
