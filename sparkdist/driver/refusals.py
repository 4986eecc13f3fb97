"""Kinds of things that cannot leave the driver, each with what to do instead."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdist.values import type_name


@dataclass(frozen=True)
class Kind:
    """A kind of thing that cannot travel.

    Attributes:
        name: Its name with an article, such as "a SparkSession".
        remedy: What the user can do, as a sentence.
    """

    name: str
    remedy: str


class Refused(Exception):
    """Ends the pickling of a function at something of a kind that cannot travel."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.kind = kind


_READ = "Read the data on the driver and pass it, or read files inside the function."
_DATA = "Write it to files that the ranks read, or pass a small one as toPandas() or collect()."
_INSIDE = "Create it inside the function."

_SESSION = Kind("a SparkSession", _READ)
_CONTEXT = Kind("a SparkContext", _READ)
_FRAME = Kind("a DataFrame of Spark", _DATA)
_RDD = Kind("an RDD", _DATA)
_BROADCAST = Kind("a Broadcast, which only Spark's own tasks can read", "Pass its .value.")
_ACCUMULATOR = Kind("an Accumulator", "Return the value from the function instead.")
_JVM = Kind("a handle to an object in the driver's JVM", "Pass the plain values that it holds.")
_LOCK = Kind("a lock", _INSIDE)
_LOCAL = Kind("a thread-local", _INSIDE)
_EVENT = Kind("an object that threads wait on", _INSIDE)
_THREAD = Kind("a thread", _INSIDE)
_QUEUE = Kind("a queue", _INSIDE)
_EXECUTOR = Kind("a pool of threads or processes", _INSIDE)
_FILE = Kind(
    "an open file", "Open it inside the function; ship= sends a file to the ranks if they cannot reach it."
)
_SOCKET = Kind("a connection", "Connect inside the function.")
_GENERATOR = Kind("a generator", "Pass a list, or make the generator inside the function.")
_COROUTINE = Kind("a coroutine", "Call the async function inside the function.")

# By qualified name, or by module for all of its classes: to know them costs no import that way.
_KINDS = {
    "pyspark.sql.session.SparkSession": _SESSION,
    "pyspark.sql.connect.session.SparkSession": _SESSION,
    "pyspark.core.context.SparkContext": _CONTEXT,
    "pyspark.context.SparkContext": _CONTEXT,  # pyspark 3
    "pyspark.sql.dataframe.DataFrame": _FRAME,
    "pyspark.sql.connect.dataframe.DataFrame": _FRAME,
    "pyspark.pandas.frame.DataFrame": _FRAME,
    "pyspark.core.rdd.RDD": _RDD,
    "pyspark.rdd.RDD": _RDD,
    "pyspark.core.broadcast.Broadcast": _BROADCAST,
    "pyspark.broadcast.Broadcast": _BROADCAST,
    "pyspark.accumulators.Accumulator": _ACCUMULATOR,
    "py4j.java_gateway": _JVM,
    "py4j.java_collections": _JVM,
    "_thread.lock": _LOCK,
    "_thread.RLock": _LOCK,
    "threading._RLock": _LOCK,
    "multiprocessing.synchronize": _LOCK,
    "_thread._local": _LOCAL,
    "threading.Condition": _EVENT,
    "threading.Event": _EVENT,
    "threading.Semaphore": _EVENT,
    "threading.Barrier": _EVENT,
    "threading.Thread": _THREAD,
    "queue.Queue": _QUEUE,
    "_queue.SimpleQueue": _QUEUE,
    "multiprocessing.queues": _QUEUE,
    "concurrent.futures._base.Executor": _EXECUTOR,
    "multiprocessing.pool.Pool": _EXECUTOR,
    "_io.TextIOWrapper": _FILE,
    "_io.BufferedReader": _FILE,
    "_io.BufferedWriter": _FILE,
    "_io.BufferedRandom": _FILE,
    "_io.FileIO": _FILE,
    "tempfile._TemporaryFileWrapper": _FILE,
    "socket.socket": _SOCKET,
    "multiprocessing.connection": _SOCKET,
    "generator": _GENERATOR,
    "async_generator": _GENERATOR,
    "coroutine": _COROUTINE,
}
_OWN_PICKLING = {"__reduce__", "__reduce_ex__", "__getstate__"}


def kind_of(cls: type) -> Kind | None:
    """Returns the kind of thing that cannot travel which instances of `cls` are, or None."""
    for base in cls.__mro__:
        kind = _KINDS.get(type_name(base)) or _KINDS.get(str(base.__module__))
        if kind:
            return kind
        if not _OWN_PICKLING.isdisjoint(vars(base)):
            return None  # a subclass that knows how to travel
    return None
