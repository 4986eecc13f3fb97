"""Finds the captured variable that cannot be pickled, or that is the largest.

Pickle names the object that it fails on, never the way to it. So after a failure, and only then,
what the function captures is pickled again piece by piece.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType

from sparkdist.driver.refusals import kind_of

Pickle = Callable[[object], bytes]


@dataclass(frozen=True)
class Step:
    """One step of the way to a variable.

    Attributes:
        verb: How what came before has it, such as "uses the global"; "" where it is a part of
            what came before, so that `name` continues an expression.
        name: The variable, or a continuation such as ".attribute" or "[0]".
    """

    verb: str
    name: str


Part = tuple[Step, object]


@dataclass(frozen=True)
class Call:
    """A call that is to be made on ranks."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    @property
    def name(self) -> str:
        """The function's name, as its user would say it."""
        inner = self.function
        while isinstance(inner, functools.partial):
            inner = inner.func
        name: str = getattr(inner, "__qualname__", None) or type(inner).__qualname__
        name = name.rpartition("<locals>.")[2]
        return "the lambda" if name == "<lambda>" else name

    def arguments(self) -> list[Part]:
        """Returns the arguments, by the names that the function gives them."""
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")
        names += [f"{rest}[{i}]" for i in range(len(self.args))]
        named = [*zip(names, self.args, strict=False), *self.kwargs.items()]
        return [(Step("gets the argument", name), value) for name, value in named]


def find_culprit(call: Call, pickle: Pickle) -> tuple[str, object] | None:
    """Finds the innermost variable that cannot be pickled.

    Returns:
        The way to it, as a sentence's beginning, and its value; None where every variable
        pickles by itself.
    """
    path: list[Step] = []
    seen: set[int] = set()
    value: object = None
    found = _first_failing([*call.arguments(), (Step("", ""), call.function)], pickle)
    while found:
        step, value = found
        path.append(step)
        if kind_of(type(value)) or id(value) in seen:
            break
        seen.add(id(value))
        found = _first_failing(_parts(value), pickle)
    return (_sentence(call.name, path), value) if path else None


def find_largest(call: Call, pickle: Pickle) -> tuple[str, int] | None:
    """Finds the variable that takes the most bytes.

    Returns:
        The way to it, as a sentence's beginning, and its size pickled.
    """
    path: list[Step] = []
    size = 0
    parts = [*call.arguments(), (Step("", ""), call.function)]
    while parts:
        part_size, (step, value) = max(
            ((_size(value, pickle), (step, value)) for step, value in parts), key=lambda item: item[0]
        )
        # Going deeper says more only as long as one part makes up most of what was found.
        if any(s.name for s in path) and part_size < size / 2:
            break
        path.append(step)
        size = part_size
        opened = isinstance(value, FunctionType | MethodType | functools.partial)
        parts = _parts(value) if opened or step.name in ("", "self") else []
    return (_sentence(call.name, path), size) if any(s.name for s in path) else None


def instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yields the instructions of a function's code and of all code inside it."""
    yield from (i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG")
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from instructions(const)


def _first_failing(parts: list[Part], pickle: Pickle) -> Part | None:
    """Bisects, since a list may hold millions; every piece is pickled about twice."""
    if not parts or not _fails(parts, pickle):
        return None
    while len(parts) > 1:
        half = parts[: len(parts) // 2]
        parts = half if _fails(half, pickle) else parts[len(half) :]
    return parts[0] if _fails(parts, pickle) else None


def _fails(parts: list[Part], pickle: Pickle) -> bool:
    try:
        pickle([value for _, value in parts])
    except Exception:
        return True
    return False


def _size(value: object, pickle: Pickle) -> int:
    try:
        return len(pickle(value))
    except Exception:
        return 0  # pickles only together with what surrounds it


def _sentence(subject: str, path: list[Step]) -> str:
    clauses: list[tuple[str, str]] = []
    for step in path:
        if step.verb:
            clauses.append((step.verb, step.name))
        elif clauses:
            clauses[-1] = (clauses[-1][0], clauses[-1][1] + step.name)
        elif step.name:
            clauses.append(("has", step.name.lstrip(".")))
    said = ", which ".join(f"{verb} {name!r}" for verb, name in clauses)
    return f"{subject} {said}" if said else subject


def _parts(value: object) -> list[Part]:
    if isinstance(value, FunctionType):
        return _function_parts(value)
    if isinstance(value, MethodType):
        return [(Step("uses", "self"), value.__self__), (Step("is", value.__name__), value.__func__)]
    if isinstance(value, functools.partial):
        given = [*((f"args[{i}]", arg) for i, arg in enumerate(value.args)), *value.keywords.items()]
        parts: list[Part] = [(Step("is given", name), arg) for name, arg in given]
        return [*parts, (Step("wraps", getattr(value.func, "__name__", "its function")), value.func)]
    if isinstance(value, type):
        return [(Step("defines", name), _unwrapped(part)) for name, part in vars(value).items()]
    return [*_items(value), *_attributes(value)]


def _function_parts(function: FunctionType) -> list[Part]:
    code = function.__code__
    parts: list[Part] = []
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # a cell may still be empty
            parts.append((Step("uses the closure variable", name), cell.cell_contents))
    names = dict.fromkeys(i.argval for i in instructions(code) if i.opname == "LOAD_GLOBAL")
    known = function.__globals__
    parts += [(Step("uses the global", name), known[name]) for name in names if name in known]
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    named = dict(zip(code.co_varnames[first:], defaults, strict=False)) | (function.__kwdefaults__ or {})
    parts += [(Step("has the default value of", name), value) for name, value in named.items()]
    parts += [(Step("has the attribute", name), value) for name, value in vars(function).items()]
    notes = function.__annotations__.items()
    return [*parts, *((Step("has the annotation of", name), value) for name, value in notes)]


def _unwrapped(attribute: object) -> object:
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    return attribute.fget if isinstance(attribute, property) else attribute


def _items(value: object) -> list[Part]:
    if isinstance(value, dict):
        keys = [repr(k) if isinstance(k, str | int) else "..." for k in value]
        return [(Step("", f"[{key}]"), item) for key, item in zip(keys, value.values(), strict=True)]
    if isinstance(value, list | tuple):
        return [(Step("", f"[{i}]"), item) for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [(Step("", "{...}"), item) for item in value]
    return []


def _attributes(value: object) -> list[Part]:
    names: list[str] = []
    with suppress(AttributeError):  # not every object has a __dict__; no code of the user's runs
        names += object.__getattribute__(value, "__dict__")
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    parts: list[Part] = []
    for name in names:
        with suppress(AttributeError):
            parts.append((Step("", f".{name}"), object.__getattribute__(value, name)))
    # Its class travels with it where it is defined in a notebook or __main__.
    return [*parts, (Step("is a", type(value).__name__), type(value))]
