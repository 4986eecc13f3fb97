"""What of the driver's environment, and of the user's, every rank gets."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase

from sparkdist.errors import ConfigurationError
from sparkdist.settings import Settings
from sparkdist.validation import looks_secret

_GLOB = re.compile(r"[*?\[]")


def for_ranks(settings: Settings, reserved: frozenset[str]) -> dict[str, str]:
    """Returns the variables that `forward_env` and `env` set, `env` winning.

    Args:
        settings: The settings.
        reserved: Names that the framework computes; the driver's own (it may be a rank itself)
            are not forwarded.

    Raises:
        ConfigurationError: `env` sets a reserved name.
    """
    taken = sorted(set(settings.env) & reserved)
    if taken:
        raise ConfigurationError(f"env: {taken[0]} is computed for each rank and cannot be set")
    forwarded = {
        name: value
        for name, value in os.environ.items()
        if name not in reserved and any(_matches(name, pattern) for pattern in settings.forward_env)
    }
    return {**forwarded, **settings.env}


def _matches(name: str, pattern: str) -> bool:
    if not _GLOB.search(pattern):
        return name == pattern
    return fnmatchcase(name, pattern) and not looks_secret(name)
