"""The plug-ins, by name. A new framework is one file here and one in `distributors/`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from sparkdist.errors import ConfigurationError
from sparkdist.frameworks.base import Framework, Place

__all__ = ["Framework", "Place", "resolve"]

# (framework, launcher) -> where its plug-in lives; modules load only when asked for.
_PLUGINS = {
    ("plain", "fast"): "sparkdist.frameworks.plain:Plain",
    ("horovod", "fast"): "sparkdist.frameworks.horovod:Horovod",
    ("torch", "fast"): "sparkdist.frameworks.torch:Torch",
    ("torch", "torchrun"): "sparkdist.frameworks.torchrun:Torchrun",
}


def resolve(framework: str, launcher: str = "fast") -> Framework:
    """Makes the plug-in of a framework and launcher.

    Raises:
        ConfigurationError: There is none.
    """
    try:
        module, _, name = _PLUGINS[framework, launcher].partition(":")
    except (KeyError, TypeError):
        names = sorted({known for known, _ in _PLUGINS})
        if framework in names:
            raise ConfigurationError(f"framework {framework!r} has no launcher {launcher!r}") from None
        raise ConfigurationError(f"framework must be one of {', '.join(names)}, not {framework!r}") from None
    return cast(Callable[[], Framework], getattr(import_module(module), name))()
