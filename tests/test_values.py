from __future__ import annotations

import copyreg
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sparkdist import values

ROOT = Path(__file__).parent.parent


class NeedsTwo(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class Doubles(Exception):
    def __init__(self, text, code=0):
        super().__init__(f"{text} {code}")


class Counts(Exception):
    def __init__(self, number):
        super().__init__(number + 1)

    def __str__(self):
        return "the same text each time"


class Keeps(Exception):
    def __init__(self, text, code=0):
        super().__init__(text)
        self.code = code


class Mute(Exception):
    def __str__(self):
        raise SystemExit(3)


class BadPickle(Exception):
    def __reduce__(self):
        raise KeyboardInterrupt


class Exits(Exception):
    def __reduce__(self):
        return sys.exit, (0,)


class Plain:
    pass


def test_values_travel_to_a_process_that_knows_nothing_of_the_test():
    scale = 3
    data = values.dumps({"f": lambda x: x * scale, "g": {1, 2}})
    script = (
        "import sys; from sparkdist import values\n"
        "d = values.loads(sys.stdin.buffer.read()); print(d['f'](14), d['g'])"
    )
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, cwd=ROOT)
    assert done.stdout == b"42 {1, 2}\n", done.stderr


def test_importing_values_does_not_import_pyspark():
    code = "import sys, sparkdist.values; print('pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True)
    assert done.stdout == b"False\n"


def test_watch_sees_objects_and_may_replace_or_refuse_them():
    seen = []

    def watch(obj, reduced):
        seen.append(obj)
        return (str, ("replaced",)) if isinstance(obj, Plain) else reduced

    plain = Plain()
    assert values.loads(values.dumps([1, "a", plain], watch)) == [1, "a", "replaced"]
    assert plain in seen
    assert 1 not in seen

    def refuse(obj, reduced):
        raise LookupError(type(obj).__name__)

    with pytest.raises(LookupError, match="Plain"):
        values.dumps([plain], refuse)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (3, "int"),
        (ValueError, "ValueError"),
        (threading.Event(), "threading.Event"),
        (pickle.PicklingError("x"), "_pickle.PicklingError"),
        (type("Odd", (), {"__module__": 5})(), "5.Odd"),
    ],
)
def test_type_name(value, name):
    assert values.type_name(value) == name


def test_safe_text():
    assert values.safe_text(ValueError("boom")) == "boom"
    assert "Mute raised SystemExit" in values.safe_text(Mute())


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("boom"),
        KeyError("a", 1),
        OSError(2, "gone", "file"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        ExceptionGroup("two", [ValueError("a"), TypeError("b")]),
        SystemExit(3),
        KeyboardInterrupt(),
    ],
)
def test_exceptions_make_the_round_trip(exc):
    back = values.load_exception(values.dump_exception(exc), values.type_name(exc))
    assert type(back) is type(exc)
    assert str(back) == str(exc)


def test_attributes_and_notes_travel():
    exc = Keeps("text", code=7)
    exc.add_note("a note")
    back = values.load_exception(values.dump_exception(exc), values.type_name(exc))
    assert isinstance(back, Keeps)
    assert (back.code, back.__notes__) == (7, ["a note"])


def test_an_argument_without_equality_does_not_stop_an_exception():
    class Silent(Exception):
        def __str__(self):
            return "silent"

    assert values.dump_exception(Silent(Plain())) is not None


@pytest.mark.parametrize(
    "exc",
    [
        NeedsTwo(1, "x"),
        Doubles("text", 5),
        Counts(1),
        Mute(),
        BadPickle(),
        Exits(),
        ValueError(threading.Lock()),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_exceptions_that_would_not_come_back_are_not_sent(exc):
    assert values.dump_exception(exc) is None


def test_traceback_cause_and_context_stay_here_and_stay_put(monkeypatch):
    # As tblib registers it: a reduction that takes everything along.
    monkeypatch.setitem(
        copyreg.dispatch_table,
        ValueError,
        lambda e: (_rebuild, (e.args, repr(e.__cause__), repr(e.__context__), repr(e.__traceback__))),
    )
    with pytest.raises(ValueError) as caught:
        _raise_from_another()
    exc = caught.value
    before = exc.__traceback__, exc.__cause__, exc.__context__, exc.__suppress_context__
    data = values.dump_exception(exc)
    assert data is not None
    assert b"secret" not in data
    assert b"traceback object" not in data
    assert before == (exc.__traceback__, exc.__cause__, exc.__context__, exc.__suppress_context__)
    assert exc.__traceback__ is not None


def _raise_from_another():
    try:
        raise KeyError("secret cause")
    except KeyError as cause:
        raise ValueError("boom") from cause


def _rebuild(args, *_rest):
    return ValueError(*args)


def test_load_exception_gives_none_for_all_else():
    good = values.dump_exception(ValueError("boom"))
    assert values.load_exception(good, "KeyError") is None
    assert values.load_exception(values.dumps("text"), "str") is None
    assert values.load_exception(None, "ValueError") is None
    assert values.load_exception(b"", "ValueError") is None
    assert values.load_exception(b"junk", "ValueError") is None
    assert good is not None
    assert values.load_exception(good[:-5], "ValueError") is None
    assert values.load_exception(pickle.dumps(Exits()), "Exits") is None


@pytest.mark.parametrize("value", [b"x" * 3_000_000, [b"y" * 100_000] * 3, {"a": (1, "z" * 70_000)}, 5, None])
def test_a_pickle_is_emptied_as_it_is_read(value):
    data = bytearray(values.dumps(value))
    assert values.loads_and_empty(data) == value
    assert not data


def test_arrays_and_old_protocols_are_read_and_emptied():
    import numpy
    import torch

    tensor, array = torch.rand(1000, 100), numpy.arange(100_000.0)
    found = values.loads_and_empty(bytearray(values.dumps([tensor, array])))
    assert torch.equal(found[0], tensor) and numpy.array_equal(found[1], array)
    found[1][0] = 7.0  # as writable as one that was pickled whole
    # A user's __reduce__ may hold a pickle of any protocol; the lines of 0 are read one by one.
    assert values.loads_and_empty(bytearray(pickle.dumps({"a": [1.5, "b"]}, protocol=0))) == {"a": [1.5, "b"]}
    with pytest.raises(Exception, match="."):
        values.loads_and_empty(bytearray(values.dumps(b"x" * 100_000)[:-10]))
