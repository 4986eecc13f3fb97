"""`LogCallback`, for whichever Keras the user has."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sparkdist.rank_context import log_to_driver

_KERAS = ("keras", "tf_keras", "tensorflow")  # tensorflow.keras is an attribute, and no module of its own


class LogCallback:
    """A Keras callback that tells the driver how far a rank's training is, by `log_to_driver`.

    An instance is a `keras.callbacks.Callback` of the Keras that is loaded, else of one that is
    installed: Keras 3, tf_keras or tensorflow.keras. Ranks log where it is used: to hear of one only, add
    it on that one.

    Args:
        per_batch_log: Whether to log after each batch of the training, too.

    Raises:
        ImportError: There is no Keras.
    """

    # Keras's own, from the class that is made with it.
    params: dict[str, Any] | None

    def __new__(cls, *args: Any, **kwargs: Any) -> LogCallback:
        """Makes an instance of this class with Keras's callback below it."""
        made = _made(cls, _callback())  # type: ignore[arg-type]  # mypy takes a class for its instance
        return object.__new__(made)

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self.per_batch_log = per_batch_log
        self._epoch = ""
        self._began = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # Not the class that was made: where this is unpickled, one is made with that process's Keras.
        return _new, (type(self).__mro__[1],), vars(self).copy()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Logs that an epoch begins."""
        self._epoch = f"epoch {epoch + 1}{_of(self.params, 'epochs')}"
        self._began = time.monotonic()
        log_to_driver(f"{self._epoch} begins")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Logs how an epoch went."""
        seconds = time.monotonic() - self._began
        log_to_driver(f"{self._epoch} ended after {seconds:.1f} s{_behind(logs)}")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Logs how the training is after a batch, if that is wanted."""
        if self.per_batch_log:
            log_to_driver(f"{self._epoch}, batch {batch + 1}{_of(self.params, 'steps')}{_behind(logs)}")


def _new(cls: type[LogCallback]) -> LogCallback:
    return cls.__new__(cls)


@cache
def _made(cls: type, callback: type) -> type:
    return type(cls.__name__, (cls, callback), {"__doc__": cls.__doc__, "__module__": cls.__module__})


def _callback() -> type:
    """Returns the base class of callbacks, of the Keras that is loaded or else of one that is installed."""
    for name in sorted(_KERAS, key=lambda name: name not in sys.modules):
        if name in sys.modules or find_spec(name):
            module = import_module(name)
            keras = module.keras if name == "tensorflow" else module
            found: type = keras.callbacks.Callback
            return found
    raise ImportError(f"LogCallback needs Keras; none of these is installed: {', '.join(_KERAS)}")


def _of(params: Mapping[str, Any] | None, count: str) -> str:
    """Returns how many epochs or batches there are, as far as Keras knows."""
    number = (params or {}).get(count)
    return f"/{number}" if number else ""


def _behind(logs: Mapping[str, Any] | None) -> str:
    shown = ", ".join(f"{name}={_value(value)}" for name, value in (logs or {}).items())
    return f": {shown}" if shown else ""


def _value(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)
