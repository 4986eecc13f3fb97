from __future__ import annotations

import io
import os
import py_compile
import stat
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest

from sparkdist import Launcher
from sparkdist.driver import parcel
from sparkdist.driver.closure import capture
from sparkdist.driver.parcel import for_function, for_script, package_zip
from sparkdist.errors import ConfigurationError
from sparkdist.executor.unpack import unpack
from tests.driver import fresh

ROOT = Path(__file__).parents[2]


def write(folder: Path, **files: str) -> None:
    """Writes modules: `a__b="..."` makes a/b.py, `a__init` a/__init__.py."""
    for name, text in files.items():
        *above, last = name.split("__")
        path = folder.joinpath(*above, "__init__.py" if last == "init" else f"{last}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(data: bytes) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(data)).namelist()) if data else set()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder on the driver's sys.path; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__spec__", "")):
            del sys.modules[name]


# --- functions ----------------------------------------------------------------------------------


def test_a_function_finds_its_modules_and_theirs_on_a_rank(tmp_path):
    project = tmp_path / "project"
    write(
        project,
        helper="import json, deeper\nfrom own.sub import tool\n"
        "def compute(x): return tool.plus(deeper.twice(x))",
        deeper="def twice(x):\n    import lazily\n    return lazily.TWO * x",
        lazily="TWO = 2",
        unrelated="raise SystemExit('nobody imports this')",
        own__init="",
        own__sub__init="from .. import constants",
        own__sub__tool="from ..constants import ONE\nfrom importlib import resources\n"
        "def plus(x): return x + ONE + int(resources.files('own').joinpath('data/five.txt').read_text())",
        own__constants="ONE = 1",
        space__inside__leaf="SEVEN = 7",
        space__other="raise SystemExit('nobody imports this either')",
        driver="import sys\n"
        f"sys.path.insert(1, {str(ROOT)!r})\n"
        "import helper\n"
        "def train_fn(x):\n"
        "    from space.inside import leaf\n"
        "    if x < 0: import numpy, pyspark, torch\n"
        "    return helper.compute(x) + leaf.SEVEN\n"
        "from sparkdist.driver.closure import capture\n"
        "from sparkdist.driver.parcel import for_function\n"
        "closure = capture(train_fn, (10,), {}, 10**9)\n"
        "open('closure.bin', 'wb').write(closure.data)\n"
        "open('parcel.bin', 'wb').write(for_function(closure.modules, ()).data)\n",
    )
    (project / "own/data").mkdir()
    (project / "own/data/five.txt").write_text("5")
    fresh.run([sys.executable, str(project / "driver.py")], tmp_path)
    data = (tmp_path / "parcel.bin").read_bytes()
    assert names(data) == {
        "code/helper.py",
        "code/deeper.py",
        "code/lazily.py",
        "code/own/",
        "code/own/__init__.py",
        "code/own/constants.py",
        "code/own/data/",
        "code/own/data/five.txt",
        "code/own/sub/",
        "code/own/sub/__init__.py",
        "code/own/sub/tool.py",
        "code/space/",
        "code/space/inside/",
        "code/space/inside/leaf.py",
    }
    assert fresh.call((tmp_path / "closure.bin").read_bytes(), data, tmp_path) == "33"


def test_what_is_installed_does_not_travel():
    installed = ["os", "json", "sys", "email.message", "numpy", "torch", "pyspark.sql", "py4j", "pytest"]
    assert (
        for_function([*installed, "sparkdist.values", "__main__", "no_such_module", "os.path"], ()).data
        == b""
    )


def test_nothing_is_imported_to_find_out(project):
    write(project, top_a__init="raise SystemExit", top_a__b="from top_c import d", top_c="raise SystemExit")
    assert {"code/top_a/b.py", "code/top_c.py"} <= names(for_function(["top_a.b"], ()).data)
    assert not {"top_a", "top_c"} & set(sys.modules)


def test_caches_stay_behind(project):
    write(project, cached__init="", cached__one="")
    for path in ["__pycache__/one.cpython-311.pyc", ".git/config", "old.pyc", "sub/.git/x"]:
        (project / "cached" / path).parent.mkdir(parents=True, exist_ok=True)
        (project / "cached" / path).write_text("")
    assert names(for_function(["cached"], ()).data) == {
        "code/cached/",
        "code/cached/__init__.py",
        "code/cached/one.py",
        "code/cached/sub/",
    }


def test_a_namespace_package_is_there_on_ranks_even_if_nothing_in_it_is_needed(project, tmp_path):
    write(project, hollow__part="")
    data = for_function(["hollow"], ()).data
    assert names(data) == {"code/hollow/"}
    unpack(data, tmp_path / "rank")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'rank/code')!r}); import hollow"
    fresh.run([sys.executable, "-I", "-c", code], tmp_path)


def test_a_package_inside_a_namespace_travels_whole(project):
    write(project, wide__box__init="", wide__box__x="", wide__box__y="", wide__else_="")
    assert names(for_function(["wide.box.x"], ()).data) == {
        "code/wide/",
        "code/wide/box/",
        "code/wide/box/__init__.py",
        "code/wide/box/x.py",
        "code/wide/box/y.py",
    }


def test_a_module_loaded_by_its_path_travels_under_its_name(project, tmp_path):
    from importlib.util import module_from_spec, spec_from_file_location

    write(project, **{"file-of-another-name": "NINE = 9"})
    spec = spec_from_file_location("by_path", project / "file-of-another-name.py")
    assert spec is not None
    sys.modules["by_path"] = module_from_spec(spec)
    assert names(for_function(["by_path"], ()).data) == {"code/by_path.py"}
    # Some tools make modules by hand and say no more than where the file is.
    sys.modules["by_hand"] = ModuleType("by_hand")
    sys.modules["by_hand"].__file__ = str(project / "file-of-another-name.py")
    assert names(for_function(["by_hand"], ()).data) == {"code/by_hand.py"}
    del sys.modules["by_hand"], sys.modules["by_path"]


def test_modules_without_a_source_travel_too(project, tmp_path):
    write(project, plain="FOUR = 4")
    py_compile.compile(str(project / "plain.py"), cfile=str(project / "sourceless.pyc"))
    # Any shared object will do: it is not imported here.
    (project / "native.abi3.so").write_bytes(b"\x7fELF")
    data = for_function(["sourceless", "native"], ()).data
    assert names(data) == {"code/sourceless.pyc", "code/native.abi3.so"}
    unpack(data, tmp_path / "rank")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'rank/code')!r})\n"
    code += "import sourceless; print(sourceless.FOUR)"
    assert fresh.run([sys.executable, "-I", "-c", code], tmp_path) == "4"


def test_a_module_given_to_addPyFile_travels(spark, tmp_path, project):
    source = "import given_too\ndef train_fn(): return given_too.THREE"
    write(tmp_path, given_to_spark=source, given_too="THREE = 3")
    for name in ("given_to_spark.py", "given_too.py"):
        spark.sparkContext.addPyFile(str(tmp_path / name))
    from given_to_spark import train_fn  # type: ignore[import-not-found]

    closure = capture(train_fn, (), {}, 1 << 30)
    data = for_function(closure.modules, ()).data
    assert names(data) == {"code/given_to_spark.py", "code/given_too.py"}
    assert fresh.call(closure.data, data, tmp_path) == "3"


def test_modules_in_zips_are_left_to_spark(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "delivered.zip", "w") as archive:
        archive.writestr("zipped_module.py", "x = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "delivered.zip"))
    assert for_function(["zipped_module"], ()).data == b""


def test_a_module_that_does_not_compile_travels_as_it_is(project):
    write(project, broken="def (:\n", nul="\0")
    assert names(for_function(["broken", "nul"], ()).data) == {"code/broken.py", "code/nul.py"}


def test_a_module_written_a_moment_ago_is_found(project):
    assert for_function(["just_now"], ()).data == b""
    write(project, just_now="import and_then")
    assert names(for_function(["just_now"], ()).data) == {"code/just_now.py"}
    write(project, and_then="", just_now="import and_then  # once more")
    assert names(for_function(["just_now"], ()).data) == {"code/just_now.py", "code/and_then.py"}


def test_a_folder_that_is_too_large_is_named(project, tmp_path):
    write(project, heavy__init="")
    with open(project / "heavy/data.bin", "wb") as file:
        file.truncate(parcel.MAX_BYTES + 1)  # with nothing on the disk
    with pytest.raises(ConfigurationError, match=r"heavy' makes .* larger than 256 MB. Move its data"):
        for_function(["heavy"], ())
    with pytest.raises(ConfigurationError, match=r"heavy' makes .* larger than 256 MB. Put it on storage"):
        for_function([], (project / "heavy", project / "heavy/data.bin"))


# --- scripts ------------------------------------------------------------------------------------


def test_a_script_travels_with_the_modules_beside_it(tmp_path):
    folder = tmp_path / "job"
    write(
        folder,
        **{
            "train-it": "import helper, json\nfrom pack import thing\n"
            "if helper.A < 0: import numpy, torch\n"
            "print(helper.A, thing.B, __file__)",
            "helper": "from pack.thing import B\nA = B + 1",
            "pack__init": "",
            "pack__thing": "B = 1",
            "not_imported": "",
        },
    )
    packed = for_script(folder / "train-it.py", ())
    assert packed.script == "train-it.py"
    assert names(packed.data) == {
        "code/train-it.py",
        "code/helper.py",
        "code/pack/",
        "code/pack/__init__.py",
        "code/pack/thing.py",
    }
    unpack(packed.data, tmp_path / "rank")
    script = tmp_path / "rank/code/train-it.py"
    assert fresh.run([sys.executable, str(script)], tmp_path) == f"2 1 {script}"


def test_only_the_scripts_own_folder_counts(tmp_path, project):
    write(project, elsewhere="")
    write(tmp_path / "job", train="import elsewhere, random", random="MINE = True")
    packed = for_script(tmp_path / "job/train.py", ())
    assert names(packed.data) == {"code/train.py", "code/random.py"}  # as sys.path[0] has it


def test_a_link_to_a_script_has_its_targets_neighbours_and_its_own_name(tmp_path):
    write(tmp_path / "job", train="import beside", beside="")
    (tmp_path / "link.py").symlink_to(tmp_path / "job/train.py")
    packed = for_script(tmp_path / "link.py", ())
    assert packed.script == "link.py"
    assert names(packed.data) == {"code/link.py", "code/beside.py"}


def test_helpers_that_import_the_script_back_are_no_loop(tmp_path):
    write(tmp_path, train="import beside", beside="import train")
    assert names(for_script(tmp_path / "train.py", ()).data) == {"code/train.py", "code/beside.py"}


def test_a_script_that_does_not_compile_is_for_the_rank_to_report(tmp_path):
    write(tmp_path, train="def (:\n")
    assert names(for_script(tmp_path / "train.py", ()).data) == {"code/train.py"}


def test_a_script_that_cannot_be_read_is_named(tmp_path):
    for path, says in [
        (tmp_path / "gone.py", "there is no script"),
        (tmp_path, "is not a file"),
        (Path("/proc/self/mem"), "cannot read"),  # fails for root, too
    ]:
        with pytest.raises(ConfigurationError, match=f"{says}.*") as caught:
            for_script(path, ())
        assert str(path) in str(caught.value)


# --- ship ---------------------------------------------------------------------------------------


def test_shipped_things_arrive_with_their_content_and_permissions(tmp_path):
    source = tmp_path / "source"
    (source / "folder/inner").mkdir(parents=True)
    (source / "folder/empty").mkdir()
    (source / "folder/inner/run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "folder/inner/run.sh").chmod(0o755)
    (source / "folder/text").write_text("text")
    (source / "folder/text").chmod(0o644)
    (source / "folder/link").symlink_to(source / "single")
    (source / "folder/dangling").symlink_to(source / "nothing")
    (source / "folder/inner/loop").symlink_to(source / "folder")
    (source / "folder/linked").symlink_to(source / "aside")
    (source / "aside").mkdir()
    (source / "aside/x").write_text("x")
    (source / "single").write_text("single")
    os.mkfifo(source / "folder/pipe")
    data = for_function([], (source / "folder", source / "single")).data
    unpack(data, tmp_path / "rank")
    ship = tmp_path / "rank/ship"
    assert {str(p.relative_to(ship)) for p in ship.rglob("*")} == {
        "single",
        "folder",
        "folder/empty",
        "folder/inner",
        "folder/inner/loop",
        "folder/inner/run.sh",
        "folder/link",
        "folder/linked",
        "folder/linked/x",
        "folder/text",
    }
    assert (ship / "folder/link").read_text() == "single"
    assert not (ship / "folder/link").is_symlink()
    assert subprocess.run([ship / "folder/inner/run.sh"], capture_output=True, check=True).stdout == b"ran\n"
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [ship, *ship.rglob("*")]}
    assert (modes["run.sh"], modes["text"], modes["single"]) == (0o700, 0o600, 0o600)
    assert {modes[name] for name in ("ship", "folder", "empty", "inner", "linked")} == {0o700}


def test_a_script_and_shipped_things_travel_in_one_parcel(tmp_path):
    write(tmp_path, train="", data="")
    assert names(for_script(tmp_path / "train.py", (tmp_path / "data.py",)).data) == {
        "code/train.py",
        "ship/data.py",
    }


def test_odd_names_in_ship(tmp_path):
    (tmp_path / "one/two").mkdir(parents=True)
    (tmp_path / "one/file").write_text("")
    assert names(for_function([], (tmp_path / "one/two/..",)).data) == {
        "ship/one/",
        "ship/one/file",
        "ship/one/two/",
    }
    with pytest.raises(ConfigurationError, match="'/' has no name"):
        for_function([], (Path("/"),))
    with open(os.fsencode(tmp_path) + b"/one/\xff", "wb"):
        pass
    with pytest.raises(ConfigurationError, match="not valid UTF-8"):
        for_function([], (tmp_path / "one",))
    with pytest.raises(ConfigurationError, match=r"cannot read '.*gone'"):
        for_function([], (tmp_path / "gone",))


def test_equal_contents_make_equal_bytes(tmp_path):
    write(tmp_path, a="1", b="2")
    first = for_function([], (tmp_path / "a.py", tmp_path / "b.py")).data
    os.utime(tmp_path / "a.py", (0, 0))
    assert for_function([], (tmp_path / "b.py", tmp_path / "a.py")).data == first


# --- unpacking ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "a/..", ".", "//x"])
def test_names_that_lead_out_are_refused_before_anything_is_written(tmp_path, name):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("good", "x")
        archive.writestr(name, "x")
    with pytest.raises(ValueError, match="lead out"):
        unpack(file.getvalue(), tmp_path / "rank")
    assert list(tmp_path.rglob("*")) == [tmp_path / "rank"]


def test_links_that_wait_in_the_folder_are_not_followed(tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("trap", "x")
    (tmp_path / "rank").mkdir()
    (tmp_path / "rank/trap").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        unpack(file.getvalue(), tmp_path / "rank")
    assert not (tmp_path / "victim").exists()


def test_a_link_in_a_parcel_becomes_a_file(tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    unpack(file.getvalue(), tmp_path / "rank")
    assert not (tmp_path / "rank/link").is_symlink()
    assert (tmp_path / "rank/link").read_text() == "/etc/passwd"


def test_an_empty_parcel_makes_the_folder(tmp_path):
    unpack(b"", tmp_path / "rank")
    assert stat.S_IMODE((tmp_path / "rank").stat().st_mode) == 0o700


# --- sparkdist itself ---------------------------------------------------------------------------


def test_the_package_travels_and_packs_itself_from_where_it_arrived(tmp_path):
    digest, data = package_zip()
    assert sha256(data).hexdigest() == digest
    assert package_zip() is package_zip()
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "sparkdist").rglob("*.py")}
    assert names(data) == sources | {"sparkdist/py.typed"}
    code = (
        "import sys; sys.path.insert(0, {!r})\n"
        "from sparkdist.driver.parcel import package_zip; print(package_zip()[0])"
    )
    unpack(data, tmp_path / "unpacked")
    assert (
        fresh.run([sys.executable, "-I", "-c", code.format(str(tmp_path / "unpacked"))], tmp_path) == digest
    )
    (tmp_path / "zipped.zip").write_bytes(data)
    assert (
        fresh.run([sys.executable, "-I", "-c", code.format(str(tmp_path / "zipped.zip"))], tmp_path) == digest
    )


def test_on_the_driver_a_script_may_lie_beside_any_amount(tmp_path, monkeypatch):
    (tmp_path / "large.py").write_text("answer = 42  # more than may be sent")
    (tmp_path / "train.py").write_text("import large; assert large.answer == 42")
    monkeypatch.setattr(parcel, "MAX_BYTES", 10)
    with pytest.raises(ConfigurationError, match="larger than"):
        parcel.for_script(tmp_path / "train.py", ())
    assert Launcher("plain", local_mode=True).run(tmp_path / "train.py") is None
