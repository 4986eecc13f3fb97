"""Values of the user's between processes: pickled, unpickled, named and described.

The only place that pickles or unpickles what belongs to a user. pyspark's cloudpickle does it: it
takes functions and classes of `__main__` and of notebooks by value, and every executor has it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any, cast

# Sees each object that is about to be pickled (plain numbers, strings and containers go by unseen)
# with its reduction so far, NotImplemented where pickle is to decide; returns the one to use.
Watch = Callable[[object, object], Any]


def dumps(value: object, watch: Watch | None = None) -> bytes:
    """Pickles a value.

    Args:
        value: Anything.
        watch: Sees what goes by, may replace how an object is reduced, and may raise.

    Raises:
        Exception: Whatever the value's own pickling raises.
    """
    file = io.BytesIO()
    _pickler_type()(file, watch).dump(value)
    return file.getvalue()


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Unpickles what `dumps` made; only for bytes that came over a channel we trust.

    Raises:
        Exception: Whatever the value's own unpickling raises.
    """
    return pickle.loads(data)  # noqa: S301


def loads_and_empty(data: bytearray) -> Any:
    """Unpickles what `dumps` made, and gives back its memory while it is read.

    A tensor's pickle holds its bytes, which become a bytes object and then the tensor: with the
    pickle itself that would be three times the tensor's size.

    Raises:
        Exception: Whatever the value's own unpickling raises.
    """
    return pickle.Unpickler(_Emptied(data)).load()  # noqa: S301


class _Emptied:
    """A file over a bytearray, which loses what has been read."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def readinto(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._data))
        with memoryview(self._data) as view:
            buffer[:count] = view[:count]
        del self._data[:count]
        return count

    def read(self, size: int) -> bytes:
        data = bytes(self._data[:size])
        del self._data[:size]
        return data

    def readline(self) -> bytes:
        return self.read(self._data.find(b"\n") + 1 or len(self._data))


@cache
def _pickler_type() -> Callable[[io.BytesIO, Watch | None], pickle.Pickler]:
    # Made on first use: importing pyspark takes longer than importing all of sparkdist may.
    from pyspark.cloudpickle import CloudPickler

    class Watched(CloudPickler):
        def __init__(self, file: io.BytesIO, watch: Watch | None) -> None:
            super().__init__(file)  # type: ignore[no-untyped-call]
            self._watch = watch

        # Not persistent_id: that is called for every int of a list.
        def reducer_override(self, obj: object) -> Any:
            reduced = super().reducer_override(obj)  # type: ignore[no-untyped-call]
            return reduced if self._watch is None else self._watch(obj, reduced)

    return cast(Callable[[io.BytesIO, Watch | None], pickle.Pickler], Watched)


def type_name(value: object) -> str:
    """Returns the qualified name of a type, or of a value's type, without `builtins.`."""
    kind = value if isinstance(value, type) else type(value)
    module = kind.__module__
    # A class may define __module__ as anything, a property for one.
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def safe_text(exc: BaseException) -> str:
    """Returns an exception's text, or a sentence that says why there is none; never raises."""
    try:
        return str(exc)
    except BaseException as error:
        return f"<no text: __str__ of {type_name(exc)} raised {type_name(error)}>"


def dump_exception(exc: BaseException) -> bytes | None:
    """Pickles an exception, without its traceback, cause and context; never raises.

    Returns:
        The bytes, or None where it does not pickle or would not come back as what it is: an
        exception whose `__init__` takes something else than its `args` is common.
    """
    kept = exc.__traceback__, exc.__cause__, exc.__context__, exc.__suppress_context__
    try:
        # Plain pickling leaves these out; what tblib and others register with copyreg does not.
        exc.__traceback__ = exc.__cause__ = exc.__context__ = None
        data = dumps(exc)
        return data if _alike(exc, loads(data)) else None
    except BaseException:
        return None
    finally:
        exc.__traceback__, exc.__cause__, exc.__context__, exc.__suppress_context__ = kept


def load_exception(data: bytes | bytearray | None, expected_type_name: str) -> BaseException | None:
    """Unpickles an exception.

    Returns:
        The exception, or None where `data` does not unpickle here or holds something else than
        the type named. Raises nothing, but lets the user's Ctrl-C through.
    """
    if not data:
        return None
    try:
        exc = loads(data)
        return exc if isinstance(exc, BaseException) and expected_type_name in _names(type(exc)) else None
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None


def _names(kind: type) -> tuple[str, str]:
    # Where cloudpickle takes a class by value, its copy is not told what it was defined in.
    return type_name(kind), f"{kind.__module__}.{kind.__name__}"


def _alike(exc: BaseException, copy: object) -> bool:
    if type(copy) is not type(exc) or not isinstance(copy, BaseException):
        return False
    return str(copy) == str(exc) and _same(exc.args, copy.args)


def _same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, BaseException):
        return _alike(a, b)
    # A thing without an equality of its own can be compared by type only.
    return type(a).__eq__ is object.__eq__ or bool(a == b)
