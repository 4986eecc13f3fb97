"""The user's function with its arguments, pickled once, on the driver."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import resolve_name
from itertools import takewhile
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from sparkdist import values
from sparkdist.driver.blame import Call, find_culprit, find_largest, instructions
from sparkdist.driver.refusals import Kind, Refused, kind_of
from sparkdist.errors import ConfigurationError

_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
WARN_ABOVE = 10_000_000  # bytes
_SMALLER = (
    "Load it inside the function from storage that every rank can read, or write it to a file "
    "and name that in ship=."
)


@dataclass(frozen=True)
class Closure:
    """A function with its arguments, ready to travel.

    Attributes:
        data: What `values.loads` turns into `(function, args, kwargs)` on a rank.
        modules: Names of modules that it needs there; some may not exist, since
            `from package import name` does not say whether `name` is a module.
        at_once: Those of them that unpickling imports, or the function before it can branch.
    """

    data: bytes
    modules: frozenset[str]
    at_once: tuple[str, ...] = ()


def capture(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], carry_limit: int
) -> Closure:
    """Pickles a function with its arguments.

    Args:
        function: The function; what `__main__`, a notebook or `exec` defined goes by value.
        args: Its positional arguments.
        kwargs: Its keyword arguments, whatever their names.
        carry_limit: Bytes that the session can carry to a rank.

    Raises:
        ConfigurationError: The function cannot be called, something in it cannot travel, or it
            is larger than `carry_limit`. The message names the variable.
    """
    if not callable(function):
        raise ConfigurationError(
            "the first argument must be a function or the path of a script, "
            f"not a {values.type_name(function)}"
        )
    call = Call(function, args, kwargs)
    watch = _Watch()
    try:
        data = values.dumps((function, args, kwargs), watch)
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigurationError(_refusal(call, error)) from error
    _check_size(call, len(data), carry_limit)
    return Closure(data, frozenset(watch.modules), (*watch.at_once, *_imports_at_once(function)))


class _Watch:
    """Sees what is pickled: refuses what cannot travel, notes the modules that are referred to."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.at_once: dict[str, None] = {}
        # By type: its kind, and whether pickle may refer to its instances by name.
        self._types: dict[type, tuple[Kind | None, bool]] = {}

    def __call__(self, obj: object, reduced: Any) -> Any:
        # These exist on every rank, and are no files here when a notebook or pytest replaced them.
        if obj is sys.stdout or obj is sys.stderr:
            return getattr, (sys, "stdout" if obj is sys.stdout else "stderr")
        cls = type(obj)
        if cls not in self._types:
            self._types[cls] = kind_of(cls), isinstance(obj, type) or inspect.isroutine(obj)
        kind, named = self._types[cls]
        if kind:
            raise Refused(kind)
        if isinstance(obj, ModuleType):
            self._note_at_once(obj.__name__)
        elif named and reduced is NotImplemented:
            self._note_at_once(getattr(obj, "__module__", None))
        elif isinstance(obj, FunctionType):
            self._note(*_imports(obj.__code__, obj.__globals__.get("__package__")))
        return reduced

    def _note_at_once(self, name: object) -> None:
        self._note(name)
        if isinstance(name, str):
            self.at_once[name] = None

    def _note(self, *names: object) -> None:
        self.modules.update(name for name in names if isinstance(name, str))


def _imports_at_once(function: object) -> Iterator[str]:
    """Yields the modules that a call imports for certain: before the code branches, in no `try`."""
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if not isinstance(function, FunctionType) or inspect.isgeneratorfunction(function):
        return
    code = dis.Bytecode(function.__code__)
    guarded = [(entry.start, entry.end) for entry in code.exception_entries]  # type: ignore[attr-defined]
    plain = (step for step in code if step.opname != "EXTENDED_ARG")
    steps = list(takewhile(lambda step: step.opcode not in _JUMPS, plain))
    sure = [not any(start <= step.offset < end for start, end in guarded) for step in steps]
    yield from _named(steps, sure, function.__globals__.get("__package__"))


def _imports(code: CodeType, package: str | None) -> Iterator[str]:
    """Yields the modules that the import statements in a function's code may mean."""
    steps = list(instructions(code))
    yield from _named(steps, [True] * len(steps), package)


def _named(steps: list[dis.Instruction], counted: list[bool], package: str | None) -> Iterator[str]:
    for i, step in enumerate(steps):
        if step.opname != "IMPORT_NAME" or not counted[i]:
            continue
        # The compiler pushes the level, 0 for an absolute import, and then the names after `import`.
        level, names = steps[i - 2].argval, steps[i - 1].argval
        try:
            target = resolve_name("." * level + step.argval, package)
        except ImportError:
            continue  # a relative import without, or beyond, a package: the rank will say so
        yield target
        yield from (f"{target}.{name}" for name in names or () if name != "*")


def _pickle(value: object) -> bytes:
    return values.dumps(value, _Watch())


def _refusal(call: Call, error: Exception) -> str:
    found = find_culprit(call, _pickle)
    where, culprit = found or (call.name, None)
    # What the search ended at may hold the refused thing where no attribute shows it.
    kind = kind_of(type(culprit)) if found else None
    if kind is None and isinstance(error, Refused):
        kind = error.kind
        where = f"{where}, which holds" if found else f"{where} holds"
        return f"{where} {kind.name}, which cannot leave the driver. {kind.remedy}"
    if kind:
        return f"{where}, {kind.name}, which cannot leave the driver. {kind.remedy}"
    thing = f", a {values.type_name(culprit)}, which" if found else ""
    text = values.safe_text(error)
    return (
        f"{where}{thing} cannot be pickled ({values.type_name(error)}: {text}). "
        "Create it inside the function, or pass what it is made from."
    )


def _check_size(call: Call, size: int, carry_limit: int) -> None:
    if size <= min(WARN_ABOVE, carry_limit):
        return
    # The second pickling of what is this large is worth a name.
    found = find_largest(call, _pickle)
    largest = f"; the largest part is {_mb(found[1])}: {found[0]}" if found else ""
    head = f"{call.name} and what it captures take {_mb(size)} pickled"
    if size > carry_limit:
        raise ConfigurationError(
            f"{head}, more than the {_mb(carry_limit)} that can be sent to a rank{largest}. {_SMALLER}"
        )
    warnings.warn(f"{head}{largest}. {_SMALLER}", UserWarning, stacklevel=3)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
