"""Temporary folders that are full, read-only or missing: the driver's, and Spark's on the executors.

Each driver has a small disk of its own, at argv[1], of which argv[2] says what becomes of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.driving import drive

FAULTS = ["full", "read-only", "missing"]
REASONS = {"full": "No space left", "read-only": "Read-only file system", "missing": "No such file"}

# --- the driver's -------------------------------------------------------------------------------

ON_THE_DRIVER = """
folder, how, moment = sys.argv[1:4]
(large := Path(sys.argv[4], "large")).write_bytes(os.urandom(5 << 20))
driving.mount(folder)
os.environ["TMPDIR"] = folder
assert tempfile.gettempdir() == folder
home = f"sparkdist-{os.getpid()}-"
rest = lambda: [name for name in os.listdir(folder) if not name.startswith(home)]
if moment == "between two runs":
    assert driving.launch(True).values == [0, 1]
    assert support.wait_until(lambda: not rest(), 5)  # an agent cleans up when the values are here
driving.spoil(folder, how)
told = [driving.attempt(True), driving.attempt(True, ship=[large])]
driving.mend(folder, how)
driving.ends_well(True)
support.wait_until(lambda: not rest(), 5)
print(json.dumps([*told, rest()]))
"""


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("moment", ["before the first", "between two runs"])
def test_the_temporary_folder_of_a_run_on_the_driver(
    disks: Sequence[str], tmp_path: Path, clean: None, how: str, moment: str
):
    (folder := tmp_path / "disk").mkdir()
    small, large, left = json.loads(drive(ON_THE_DRIVER, folder, how, moment, tmp_path, within=disks))
    assert left == []
    # A warm server needs no room. Where its folder cannot be used, one for the run alone is elsewhere.
    works = {"small": how == "full" or (moment, how) == ("between two runs", "read-only")}
    works["large"] = works["small"] and how != "full"
    for text, name in ((small, "small"), (large, "large")):
        if works[name]:
            assert text == "works"
        else:
            assert str(folder) in text and REASONS[how] in text and "TMPDIR" in text


ON_SPARK = """
folder, elsewhere = sys.argv[1:3]
(large := Path(elsewhere, "large")).write_bytes(os.urandom(5 << 20))
driving.mount(folder)
os.environ["TMPDIR"] = folder
assert tempfile.gettempdir() == folder
spark = driving.session(local__dir=elsewhere)
told = []
for how in ("missing", "read-only", "full"):
    driving.spoil(folder, how)
    told += [driving.attempt(False), driving.attempt(False, ship=[large])]
    driving.mend(folder, how)
    driving.ends_well(False)
spark.stop()
print(json.dumps(told))
"""


@pytest.mark.slow
def test_the_drivers_temporary_folder_on_spark(disks: Sequence[str], tmp_path: Path, clean: None):
    (folder := tmp_path / "disk").mkdir()
    *works, small, large = json.loads(drive(ON_SPARK, folder, tmp_path, within=disks))
    assert works == ["works"] * 4  # Spark's own folder serves
    for text in (small, large):  # warm servers of a local master have theirs with the driver
        assert str(folder) in text and REASONS["full"] in text and "TMPDIR" in text


# --- Spark's ------------------------------------------------------------------------------------

SPARKS = """
folder, how, moment = sys.argv[1:4]
driving.mount(folder)
spark = driving.session(local__dir=folder)
if moment == "between two runs":
    assert driving.launch(False).values == [0, 1]
driving.spoil(folder, how)
told = [driving.attempt(False), driving.attempt(False)]
driving.mend(folder, how)
if how != "missing":
    driving.ends_well(False)
spark.stop()
spark = driving.session(local__dir=folder)
driving.ends_well(False)
spark.stop()
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("moment", ["before the first", "between two runs"])
def test_sparks_folder(disks: Sequence[str], tmp_path: Path, clean: None, how: str, moment: str):
    (folder := tmp_path / "disk").mkdir()
    for text in json.loads(drive(SPARKS, folder, how, moment, within=disks)):
        if how == "full":
            assert text == "works"
        else:  # Spark itself writes there before each job
            assert str(folder) in text and REASONS[how] in text and "spark.local.dir" in text


NOWHERE = """
folder, elsewhere = sys.argv[1:3]
places = [folder, "/tmp", "/var/tmp"]
driving.mount(folder)
tempfile.tempdir = elsewhere  # the driver is well
os.chdir(folder)  # Python's last resort
os.environ |= {"TMPDIR": folder, "SPARK_LOCAL_DIRS": folder}
spark = driving.session()
for place in places:
    if place != folder:
        driving.mount(place)
    driving.spoil(place, "full")
print(json.dumps(driving.attempt(False)))
for place in places:
    driving.mend(place, "full")
driving.ends_well(False)
spark.stop()
"""


@pytest.mark.slow
def test_no_folder_of_an_executor_has_room(disks: Sequence[str], clean: None, request: pytest.FixtureRequest):
    home = Path(__file__).with_name(".disks")  # /tmp is one of those
    elsewhere = home / "elsewhere"
    request.addfinalizer(lambda: shutil.rmtree(home))
    (folder := home / "disk").mkdir(parents=True)
    elsewhere.mkdir()
    text = json.loads(drive(NOWHERE, folder, elsewhere, within=disks))
    assert text.startswith("no folder on ") and "spark.local.dir" in text
    assert f"{folder}" in text and REASONS["full"] in text
