from __future__ import annotations

import functools
import io
import multiprocessing
import queue
import re
import socket
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkdist import values
from sparkdist.driver.closure import Closure, capture
from sparkdist.driver.parcel import for_function
from sparkdist.errors import ConfigurationError
from tests.driver import fresh

LIMIT = 1 << 30


def take(function, *args, **kwargs) -> Closure:
    return capture(function, args, kwargs, LIMIT)


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(ConfigurationError) as caught:
        take(function, *args, **kwargs)
    return str(caught.value)


def notebook(source: str, **variables):
    """Runs a cell as a notebook does, in a `__main__` that no file backs."""
    namespace = {"__name__": "__main__", **variables}
    exec(source, namespace)
    return namespace


# --- what travels -------------------------------------------------------------------------------


class Model:
    def __init__(self, scale):
        self.scale = scale

    def times(self, x):
        return self.scale * x

    def __call__(self, x):
        return self.scale + x


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


def test_lambdas_closures_partials_methods_and_decorated_functions_travel(tmp_path):
    offset = 10

    class Local(Model):
        pass

    @doubled
    def decorated(x):
        return x + offset

    cells = notebook("base = 7\ndef helper(x): return x + base\ndef train_fn(x): return helper(x)")
    functions = [
        lambda x: x + offset,
        decorated,
        functools.partial(lambda a, x, b=0: a * x + b, 2, b=offset),
        Local(3).times,
        Local(3),
        cells["train_fn"],
        abs,
    ]

    def train_fn(x, functions=functions):
        return [function(x) for function in functions]

    closure = take(train_fn, -1)
    parcel = for_function(closure.modules, ())
    assert fresh.call(closure.data, parcel.data, tmp_path) == "[9, 18, 8, -3, 2, 6, 1]"


def test_functions_of_main_travel(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import sys, json\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from sparkdist.driver.closure import capture\n"
        "class Config: rate = 3\n"
        "def helper(x): return x * Config.rate\n"
        "def train_fn(x, *, fn, self): return [helper(x), fn, self, json.dumps(x)]\n"
        "closure = capture(train_fn, (4,), {'fn': 1, 'self': 2}, 10**9)\n"
        "open('out', 'wb').write(closure.data)\n"
        "print('json' in closure.modules)\n"
    )
    assert fresh.run([sys.executable, str(driver)], tmp_path) == "True"
    assert fresh.call((tmp_path / "out").read_bytes(), b"", tmp_path) == "[12, 1, 2, '4']"


def test_keyword_arguments_may_have_any_name():
    def train_fn(**kwargs):
        return kwargs

    names = dict.fromkeys(["function", "args", "kwargs", "self", "carry_limit", "fn", "timeout"], 1)
    function, args, kwargs = values.loads(capture(train_fn, (), names, LIMIT).data)
    assert function(*args, **kwargs) == names


class Counted:
    pickled = 0

    def __reduce__(self):
        Counted.pickled += 1
        return Counted, ()


def test_the_closure_is_pickled_once():
    captured = Counted()
    Counted.pickled = 0
    take(lambda x: (captured, x), [captured, 1])
    assert Counted.pickled == 1


def test_the_standard_streams_travel_as_the_ranks_own(tmp_path):
    stream = sys.stdout  # pytest's, which is a temporary file
    error = sys.stderr

    def train_fn():
        import sys

        return stream is sys.stdout and error is sys.stderr

    assert fresh.call(take(train_fn).data, b"", tmp_path) == "True"


def test_buffers_in_memory_and_subclasses_that_pickle_travel(tmp_path):
    buffer = io.BytesIO(b"abc")

    class Lock(threading.Condition):
        def __reduce__(self):
            return str, ("a lock made anew",)

    lock = Lock()
    closure = take(lambda: (buffer.getvalue(), lock))
    assert fresh.call(closure.data, b"", tmp_path) == "(b'abc', 'a lock made anew')"


@pytest.mark.parametrize("thing", [3, None, "train", Model])
def test_only_what_can_be_called_is_taken(thing):
    if thing is Model:
        assert values.loads(take(thing, 3).data)[0] is Model
    else:
        assert type(thing).__name__ in refusal(thing)


# --- modules ------------------------------------------------------------------------------------


def test_modules_referred_to_and_imported_are_noted():
    import json.decoder

    def train_fn(x: Path):
        import colorsys
        from xml.etree import ElementTree

        def inner():
            from wave import open as open_wave

            return open_wave

        return json.decoder, colorsys, ElementTree, inner, Model, fresh.call

    modules = take(train_fn, queue.Empty).modules
    assert {
        "json.decoder",
        "colorsys",
        "xml.etree",
        "xml.etree.ElementTree",
        "wave",
        "tests.driver.fresh",
        __name__,
        "_queue",
    } <= modules


def test_relative_imports_are_resolved_in_the_functions_package():
    cell = "def train_fn():\n from . import a\n from .b import c\n from ..d import *\n"
    # `import *` is for modules only: exec compiles no such function.
    cell = cell.replace("import *", "import e")
    function = notebook(cell, __package__="top.sub")["train_fn"]
    assert {"top.sub", "top.sub.a", "top.sub.b", "top.sub.b.c", "top.d", "top.d.e"} <= take(function).modules
    assert not {"a", "b"} & take(notebook(cell, __package__=None)["train_fn"]).modules
    take(notebook(cell, __package__="top")["train_fn"])  # beyond its package: for the rank to say


# --- what is refused ----------------------------------------------------------------------------


def uses_global(value):
    return notebook("def train_fn(): return thing", thing=value)["train_fn"]


def test_spark_things_are_refused_by_name(spark):
    context = spark.sparkContext
    frame = spark.range(3)
    for value, kind, remedy in [
        (spark, "a SparkSession", "Read the data"),
        (context, "a SparkContext", "Read the data"),
        (frame, "a DataFrame of Spark", "toPandas"),
        (frame.rdd, "an RDD", "toPandas"),
        (context.parallelize([1]), "an RDD", "toPandas"),
        (context.broadcast(1), "a Broadcast", ".value"),
        (context.accumulator(0), "an Accumulator", "Return the value"),
        (context._jsc, "a handle to an object in the driver's JVM", "plain values"),
    ]:
        message = refusal(uses_global(value))
        assert message.startswith(f"train_fn uses the global 'thing', {kind}"), message
        assert "cannot leave the driver" in message
        assert remedy in message
    message = refusal(uses_global(frame.id))
    assert message.startswith("train_fn uses the global 'thing._jc', a handle to an object"), message


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("pyspark.sql.connect.session", "SparkSession", "a SparkSession"),
        ("pyspark.sql.connect.dataframe", "DataFrame", "a DataFrame of Spark"),
        ("pyspark.context", "SparkContext", "a SparkContext"),
        ("pyspark.rdd", "RDD", "an RDD"),
    ],
)
def test_spark_things_are_known_by_name_alone(module, name, kind):
    # Connect's need grpc to import; pyspark 3's have moved. Both may know how to pickle themselves.
    thing = type(name, (), {"__module__": module, "__reduce__": lambda self: (str, ())})()
    assert f"'thing', {kind}, which cannot leave the driver" in refusal(uses_global(thing))


def some_generator():
    yield 1


@pytest.mark.parametrize(
    ("make", "kind", "remedy"),
    [
        (threading.Lock, "a lock", "Create it inside"),
        (threading.RLock, "a lock", "Create it inside"),
        (multiprocessing.Lock, "a lock", "Create it inside"),
        (threading.Condition, "an object that threads wait on", "Create it inside"),
        (threading.Event, "an object that threads wait on", "Create it inside"),
        (threading.local, "a thread-local", "Create it inside"),
        (threading.Thread, "a thread", "Create it inside"),
        (queue.Queue, "a queue", "Create it inside"),
        (ThreadPoolExecutor, "a pool of threads or processes", "Create it inside"),
        (lambda: open(__file__), "an open file", "ship="),
        (lambda: open(__file__, "rb"), "an open file", "ship="),
        (lambda: open(__file__, "rb", buffering=0), "an open file", "ship="),
        (tempfile.NamedTemporaryFile, "an open file", "ship="),
        (socket.socket, "a connection", "Connect inside"),
        (some_generator, "a generator", "Pass a list"),
    ],
)
def test_things_of_this_process_are_refused_with_a_remedy(make, kind, remedy):
    thing = make()
    try:
        message = refusal(uses_global(thing))
    finally:
        getattr(thing, "close", lambda: None)()
    assert message.startswith(f"train_fn uses the global 'thing', {kind}, which cannot leave the driver.")
    assert remedy in message


def test_what_else_does_not_pickle_is_named_with_its_own_error():
    class Stubborn:
        def __reduce__(self):
            raise RuntimeError("not today")

    message = refusal(uses_global(Stubborn()))
    assert re.search(
        "global 'thing', a .*Stubborn, which cannot be pickled .RuntimeError: not today", message
    )
    assert "'thing', a mappingproxy" not in message
    frame = sys._getframe()
    assert "'thing', a frame, which cannot be pickled (TypeError" in refusal(uses_global(frame))


def test_every_way_to_a_variable_is_named():
    lock = threading.Lock()

    def closing():
        return lock

    def with_default(x, y=lock):
        return x

    def with_keyword_default(*, z=lock):
        return z

    def clean(first, second=None, *rest, **named):
        return first

    def tagged():
        return 1

    tagged.tag = {"k": [0, lock]}  # type: ignore[attr-defined]

    class Trainer:
        def __init__(self, lock):
            self.lock = lock

        def fit(self):
            return self.lock

        def __call__(self):
            return self.lock

    class Slotted:
        __slots__ = ("inner",)

        def __init__(self, inner):
            self.inner = inner

    deep = SimpleNamespace(table={"row": (1, Slotted(lock))})
    cells = notebook(
        "def helper(): return thing\n"
        "class Job:\n"
        "    @staticmethod\n"
        "    def go(): return helper()\n"
        "job = Job()\n"
        "def outer(): return helper()\n"
        "def train_fn(): return job\n"
        "def inner_code():\n"
        "    def inner(): return thing\n"
        "    return inner\n",
        thing=lock,
    )
    for function, args, kwargs, way in [
        (closing, (), {}, "closing uses the closure variable 'lock'"),
        (with_default, (), {}, "with_default has the default value of 'y'"),
        (with_keyword_default, (), {}, "with_keyword_default has the default value of 'z'"),
        (tagged, (), {}, "tagged has the attribute \"tag['k'][1]\""),
        (clean, (lock,), {}, "clean gets the argument 'first'"),
        (clean, (1, [lock]), {}, "clean gets the argument 'second[0]'"),
        (clean, (1, 2, 3, lock), {}, "clean gets the argument 'rest[1]'"),
        (clean, (1,), {"self": lock}, "clean gets the argument 'self'"),
        (clean, (deep,), {}, "clean gets the argument \"first.table['row'][1].inner\""),
        (clean, (closing,), {}, "clean gets the argument 'first', which uses the closure variable 'lock'"),
        (Trainer(lock).fit, (), {}, "Trainer.fit uses 'self.lock'"),
        (Trainer(lock), (), {}, "Trainer has 'lock'"),
        (functools.partial(clean, lock), (), {}, "clean is given 'args[0]'"),
        (functools.partial(clean, first=lock), (), {}, "clean is given 'first'"),
        (
            functools.partial(closing),
            (),
            {},
            "closing wraps 'closing', which uses the closure variable 'lock'",
        ),
        (lambda: lock, (), {}, "the lambda uses the closure variable 'lock'"),
        (cells["outer"], (), {}, "outer uses the global 'helper', which uses the global 'thing'"),
        (cells["inner_code"], (), {}, "inner_code uses the global 'thing'"),
        (
            cells["train_fn"],
            (),
            {},
            "train_fn uses the global 'job', which is a 'Job', which defines 'go', "
            "which uses the global 'helper', which uses the global 'thing'",
        ),
        (print, (lock,), {}, "print gets the argument 'args[0]'"),
    ]:
        message = refusal(function, *args, **kwargs)
        assert message.startswith(f"{way}, a lock, which cannot"), message


def test_a_global_that_is_not_used_is_no_ones_fault():
    cells = notebook(
        "class Config: pass\ndef train_fn(config): return config.spark, other\nother = lambda: unused_name\n",
        spark=threading.Lock(),
    )
    take(cells["train_fn"], 1)  # `spark` is an attribute's name here
    message = refusal(cells["train_fn"], threading.Event())
    assert message.startswith("train_fn gets the argument 'config', an object that threads wait on")


def test_one_bad_item_among_many_is_found():
    items: list[object] = list(range(100_000))
    items[77_777] = threading.Lock()
    assert refusal(uses_global(items)).startswith("train_fn uses the global 'thing[77777]', a lock")


def test_loops_end():
    loop: dict[str, object] = {"lock": threading.Lock()}
    loop = {"self": loop, **loop}
    loop["self"] = loop
    assert "a lock" in refusal(uses_global(loop))


# --- size ---------------------------------------------------------------------------------------


def test_a_large_closure_warns_and_names_the_largest_variable():
    weights = bytes(11_000_000)
    small = bytes(1_000_000)

    def train_fn(x):
        return weights, small, x

    with pytest.warns(UserWarning, match="closure variable 'weights'") as caught:
        take(train_fn, 1)
    text = str(caught[0].message)
    assert text.startswith("train_fn and what it captures take 12.0 MB pickled; the largest part is 11.0 MB")
    assert "Load it inside the function" in text

    class Trainer:
        def __init__(self, weights):
            self.weights = weights

        def fit(self):
            pass

        __call__ = fit

    for function, args, way in [
        (len, (weights,), "gets the argument"),
        (Trainer(weights).fit, (), "Trainer.fit uses 'self.weights'"),
        (Trainer(weights), (), "Trainer has 'weights'"),
        (lambda: train_fn, (), "'train_fn', which uses the closure variable 'weights'"),
        (functools.partial(len, weights), (), "len is given 'args[0]'"),
    ]:
        with pytest.warns(UserWarning, match=re.escape(way)):
            take(function, *args)


def test_the_largest_of_many_middling_variables_is_named():
    a, b, c = bytes(4_000_000), bytes(5_000_000), bytes(4_500_000)
    with pytest.warns(UserWarning, match="5.0 MB: the lambda uses the closure variable 'b'"):
        take(lambda: (a, b, c))


def test_below_ten_megabytes_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(len, bytes(9_900_000))


def test_above_the_limit_is_an_error_with_both_sizes():
    def train_fn(data):
        return data

    with pytest.raises(ConfigurationError) as caught:
        capture(train_fn, (bytes(3_000_000),), {}, carry_limit=2_000_000)
    assert "take 3.0 MB pickled, more than the 2.0 MB" in str(caught.value)
    assert "the largest part is 3.0 MB: train_fn gets the argument 'data'" in str(caught.value)
