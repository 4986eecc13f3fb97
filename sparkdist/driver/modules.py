"""Finds the user's own modules: what a function or script needs and no executor has installed."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from importlib.util import find_spec, resolve_name, spec_from_file_location
from pathlib import Path

from sparkdist.executor.checks import find_in, missing_part

# Executors have these, or get them otherwise, wherever the driver has them from.
_NEVER = frozenset({"__main__", "__mp_main__", "sparkdist", "pyspark", "py4j"})

Statement = tuple[int, str, tuple[str, ...], bool]  # level, module, names, whether on a file's top level


@dataclass(frozen=True)
class Unit:
    """What travels as one: a module, or the whole of a package.

    Attributes:
        place: Its path below a folder on sys.path, such as `helper.py` or `space/package`.
        paths: The module's file, or the package's folders. Nothing for a namespace package, which
            travels as far as it is needed only: its modules are units of their own.
    """

    place: str
    paths: tuple[Path, ...]


_CACHES = threading.Lock()


class Finder:
    """Looks for modules without importing any."""

    def __init__(self, folder: Path | None = None) -> None:
        """Makes a finder.

        Args:
            folder: Where to look; default: wherever this process imports from.
        """
        self._folder = folder
        self._specs: dict[str, ModuleSpec | None] = {}
        # A file written a moment ago may not be in the listings that the import system keeps.
        with _CACHES:  # two threads that do this at once get in each other's way
            importlib.invalidate_caches()

    def needed_by(self, script: Path) -> Iterator[Unit]:
        """Yields the user's own modules that a script imports, and those that they import."""
        return self.needed(list(_imports(script, "")))

    def needed(self, names: Collection[str]) -> Iterator[Unit]:
        """Yields the user's own among the modules named, and those that they import."""
        todo = list(names)
        done = set()
        while todo:
            for name, spec in self._resolve(todo.pop()):
                if name in done:
                    continue
                done.add(name)
                yield _unit(name, spec)
                # Only after the unit was taken: a folder that is too large ends it before.
                todo += dict.fromkeys(_imports_of_unit(name, spec))

    def installed(self, names: Iterable[str]) -> Iterator[str]:
        """Yields the installed modules among those named and those that the user's own import for certain.

        Without the standard library, and without what this process has not got either.
        """
        todo, done = list(names), set[str]()
        for name in todo:  # which grows
            if name in done or name.partition(".")[0] in sys.stdlib_module_names | _NEVER:
                continue
            done.add(name)
            chain = list(self._chain(name))
            for prefix, spec in chain:
                if not _is_namespace(spec):
                    package = prefix if spec.submodule_search_locations else prefix.rpartition(".")[0]
                    todo += _imports(Path(spec.origin or ""), package, at_once=True)
            if (not chain or chain[-1][0] != name) and not missing_part(name):
                yield name

    def _resolve(self, name: str) -> Iterator[tuple[str, ModuleSpec]]:
        """Yields the namespace packages above a module, then itself or the package it is in."""
        for prefix, spec in self._chain(name):
            yield prefix, spec
            if not _is_namespace(spec):
                return

    def _chain(self, name: str) -> Iterator[tuple[str, ModuleSpec]]:
        """Yields the packages above a module and itself, as far as they are the user's own."""
        parts = name.split(".")
        above: ModuleSpec | None = None
        for end in range(1, len(parts) + 1):
            prefix = ".".join(parts[:end])
            if prefix not in self._specs:
                self._specs[prefix] = self._find(prefix, above)
            above = self._specs[prefix]
            if above is None or not _is_users(above):
                return
            yield prefix, above

    def _find(self, name: str, above: ModuleSpec | None) -> ModuleSpec | None:
        if name in _NEVER:
            return None
        if above is not None:
            return find_in(name, above.submodule_search_locations or ())
        if self._folder is not None:
            return find_in(name, [str(self._folder)])
        return _find_top(name)


def _find_top(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if module is None:
        try:
            return find_spec(name)
        except (ImportError, ValueError):
            return None
    spec = getattr(module, "__spec__", None) or PathFinder.find_spec(name)
    file = getattr(module, "__file__", None)
    return spec or (spec_from_file_location(name, file) if file else None)


def _is_namespace(spec: ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None and not spec.has_location


def _is_users(spec: ModuleSpec) -> bool:
    """Says whether a module has files of its own, outside of what is installed."""
    if _is_namespace(spec):
        return any(os.path.isdir(p) and not _is_installed(p) for p in spec.submodule_search_locations or ())
    # Built-in modules have no file, and what is imported from a zip Spark delivers.
    return spec.has_location and os.path.isfile(spec.origin or "") and not _is_installed(spec.origin or "")


def _is_installed(path: str) -> bool:
    if not {"site-packages", "dist-packages"}.isdisjoint(Path(os.path.abspath(path)).parts):
        return True
    return os.path.realpath(path).startswith(_standard_library())


@cache
def _standard_library() -> tuple[str, ...]:
    return tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))


def _unit(name: str, spec: ModuleSpec) -> Unit:
    place = name.replace(".", "/")
    if _is_namespace(spec):
        return Unit(place, ())
    if spec.submodule_search_locations is not None:
        return Unit(place, tuple(Path(p) for p in spec.submodule_search_locations if os.path.isdir(p)))
    origin = Path(spec.origin or "")
    suffix = next((s for s in all_suffixes() if origin.name.endswith(s)), ".py")
    # Under the module's name: a file loaded by its path may have another.
    return Unit(place + suffix, (origin,))


def _imports_of_unit(name: str, spec: ModuleSpec) -> Iterator[str]:
    unit = _unit(name, spec)
    for path in unit.paths:
        if not path.is_dir():
            yield from _imports(path, name.rpartition(".")[0])
            continue
        for folder, _, files in os.walk(path):
            inner = os.path.relpath(folder, path)
            package = name if inner == "." else f"{name}.{inner.replace(os.sep, '.')}"
            for file in files:
                if file.endswith(".py"):
                    yield from _imports(Path(folder, file), package)


def imports_at_once(script: Path) -> Iterator[str]:
    """Yields what a script imports for certain: on its top level, in no function, condition or `try`."""
    return _imports(script, "", at_once=True)


def _imports(path: Path, package: str, at_once: bool = False) -> Iterator[str]:
    """Yields what a file's import statements, anywhere in it or on its top level, may name as modules."""
    try:
        status = path.stat()
    except OSError:
        return  # whoever packs the file says so
    for level, module, names, is_top in _statements(str(path), status.st_mtime_ns, status.st_size):
        if at_once and not is_top:
            continue
        try:
            target = resolve_name("." * level + module, package)
        except ImportError:
            continue  # beyond its package: the rank will say so
        yield target
        yield from (f"{target}.{name}" for name in names)


@lru_cache(maxsize=10_000)
def _statements(path: str, _mtime: int, _size: int) -> tuple[Statement, ...]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes; they come when the module is run
            tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()  # the rank that imports it reports it
    found: dict[Statement, None] = {}
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys((0, alias.name, (), node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names if alias.name != "*")
            found[node.level, node.module or "", names, node in top] = None
    return tuple(found)
