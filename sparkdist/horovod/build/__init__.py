"""Real Horovod, built, installed, proven and explained: what `sparkdist horovod` is made of."""

from __future__ import annotations

from sparkdist.horovod.build.diagnosis import BuildError, Diagnosis, diagnose
from sparkdist.horovod.build.state import Report, examine

__all__ = ["BuildError", "Diagnosis", "Report", "diagnose", "examine"]
