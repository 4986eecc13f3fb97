"""Finds the user's own modules: what a function or script needs and no executor has installed."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import sys
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from importlib.util import find_spec, resolve_name, spec_from_file_location
from pathlib import Path

# Executors have these, or get them otherwise, wherever the driver has them from.
_NEVER = frozenset({"__main__", "__mp_main__", "sparkdist", "pyspark", "py4j"})

Statement = tuple[int, str, tuple[str, ...]]  # level, module, names


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

    def _resolve(self, name: str) -> Iterator[tuple[str, ModuleSpec]]:
        """Yields the namespace packages above a module, then itself or the package it is in."""
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
            if not _is_namespace(above):
                return

    def _find(self, name: str, above: ModuleSpec | None) -> ModuleSpec | None:
        if name in _NEVER:
            return None
        if above is not None:
            return _find_in(name, above.submodule_search_locations or ())
        if self._folder is not None:
            return _find_in(name, [str(self._folder)])
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


def _find_in(name: str, folders: Iterable[str]) -> ModuleSpec | None:
    # PathFinder would do the same, but its namespace packages need the package above to be imported.
    portions: list[str] = []
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = finder.find_spec(name) if finder else None
        if spec and spec.loader:
            return spec
        portions += (spec and spec.submodule_search_locations) or ()
    if not portions:
        return None
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = portions
    return spec


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


def _imports(path: Path, package: str) -> Iterator[str]:
    """Yields what a file's import statements, anywhere in it, may name as modules."""
    try:
        status = path.stat()
    except OSError:
        return  # whoever packs the file says so
    for level, module, names in _statements(str(path), status.st_mtime_ns, status.st_size):
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
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys((0, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names if alias.name != "*")
            found[node.level, node.module or "", names] = None
    return tuple(found)
