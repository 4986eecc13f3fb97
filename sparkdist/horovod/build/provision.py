"""The story of `sparkdist horovod build`: plan, wheel, installation, proof."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import sys
from pathlib import Path

from sparkdist.horovod.build.diagnosis import BuildError
from sparkdist.horovod.build.plan import Plan, Wish, make_plan
from sparkdist.horovod.build.state import Installed, installed
from sparkdist.horovod.build.toolchain import find_toolchain
from sparkdist.horovod.build.wheel import Workshop


def provide(wish: Wish, shop: Workshop, *, rebuild: bool = False, wheel_dir: Path | None = None) -> None:
    """Has Horovod installed as wished and proven, with as little work as that takes.

    Args:
        wish: What was asked for.
        shop: Where wheels are built and kept.
        rebuild: Whether to build and install it though it is there already.
        wheel_dir: A folder that gets a copy of the wheel.

    Raises:
        ConfigurationError: What was asked for cannot be.
        BuildError: It could not be built, installed or proven.
    """
    plan = make_plan(wish, find_toolchain(shop.environ))
    for note in plan.notes:
        shop.say(note)
    found = installed()
    there = not rebuild and found is not None and found.stamp.get("key") == plan.key and found.complete
    if there and wheel_dir is None and _proven(found, shop):
        shop.say(f"{_described(found)} is installed and proven: nothing to do")
        return
    if not there or wheel_dir is not None:
        wheel = shop.wheel(plan, rebuild)
        if wheel_dir is not None:
            wheel_dir.mkdir(parents=True, exist_ok=True)
            shop.say(f"wheel: {shutil.copy2(wheel, wheel_dir)}")
        if not there:
            found = _install(plan, wheel, shop, found)
    _prove(found, shop)


def _install(plan: Plan, wheel: Path, shop: Workshop, before: Installed | None) -> Installed:
    shop.install(wheel, shop.log(plan))
    importlib.invalidate_caches()
    found = installed()
    if found is None or found.stamp.get("key") != plan.key:
        where = found.folder if found else "nowhere"
        raise BuildError(f"pip installed {wheel.name}, but this Python finds Horovod {where}; see PYTHONPATH")
    over = f" over {before.version}" if before else ""
    shop.say(f"installed {_described(found)}{over}")
    for name, cause in found.stamp.get("left_out", {}).items():
        shop.say(f"without {name}, which did not compile: {cause}")
    return found


def _described(found: Installed | None) -> str:
    assert found is not None
    frameworks = found.stamp["frameworks"].items()
    return f"Horovod {found.version} for {' and '.join(f'{name} {number}' for name, number in frameworks)}"


def _prove(found: Installed | None, shop: Workshop) -> None:
    # The engine is imported only where there is something to prove.
    from sparkdist.horovod.build.proof import prove

    assert found is not None
    for name in found.stamp["frameworks"]:
        prove(name)
        shop.say(f"proven: an allreduce of two ranks, with {name}")
    marker = _marker(shop)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps(_identity(found)))


def _proven(found: Installed | None, shop: Workshop) -> bool:
    marker = _marker(shop)
    return found is not None and marker.is_file() and marker.read_text() == json.dumps(_identity(found))


def _identity(found: Installed) -> list[object]:
    """What changes with every installation."""
    return [found.stamp["key"], str(found.folder), found.stamped_at]


def _marker(shop: Workshop) -> Path:
    return shop.cache / "proven" / hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
