"""The Spark session a run uses, or that there is none."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkdist import values
from sparkdist.errors import PreflightError
from sparkdist.executor.topology import address_towards

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

Confs = Callable[[str], str | None]  # looks up a conf by its name

_WITHOUT_SPARK = 4_000_000_000  # bytes
_ANSWER_TIME = 4.0  # s that a server gets to answer at all


def choose(local_mode: bool | None, given: SparkSession | None) -> SparkSession | None:
    """Returns the session whose tasks will hold the ranks, or None for ranks on the driver.

    Args:
        local_mode: True for the driver, False for Spark, None for Spark where a session is active.
        given: The session from the settings.

    Raises:
        PreflightError: Spark was asked for and no usable session is there.
    """
    if local_mode:
        return None
    session = given or _active()
    if session is None:
        if local_mode is None:
            return None
        raise PreflightError(
            "local_mode=False needs a Spark session, and none is active. Start one with "
            "SparkSession.builder.getOrCreate(), or pass spark=, or train on the driver with local_mode=True."
        )
    if is_connect(session) and not hasattr(session, "registerProgressHandler"):
        raise PreflightError("Spark Connect needs pyspark 4.0 or newer; a classic session runs on 3.5, too")
    if is_stopped(session):
        raise PreflightError("the Spark session has been stopped; start a new one")
    return session


def confs(session: SparkSession) -> Confs:
    """Returns how to look up a conf: the application's, or one set in the session while it runs.

    Raises:
        PreflightError: The server of a Connect session does not know it any more, or does not answer.
    """
    if is_connect(session):
        if not server_answers(session, _ANSWER_TIME):  # else the client would try for ten minutes
            raise PreflightError(f"the Spark Connect server ({session.client.host}) does not answer")
        try:
            return dict(session.conf.getAll).get  # one call to the server for all of them
        except Exception as error:
            raise PreflightError(f"the Spark Connect session cannot be used: {first_lines(error)}") from None
    return lambda name: session.conf.get(name, None)


def cores_per_task(conf: Confs, profile: ResourceProfile | None) -> int:
    """Returns the cores that Spark counts for a task of the session, or of a resource profile."""
    requests = profile.taskResources if profile else {}
    return int(requests["cpus"].amount if "cpus" in requests else conf("spark.task.cpus") or 1)


def carry_limit(session: SparkSession | None) -> int:
    """Returns how many bytes of function and arguments can be carried to ranks.

    Spark holds them in the driver's heap on their way: a gigabyte ends a JVM of that size, 600 MB
    do not. Half of the heap leaves room for what else is in it.
    """
    if session is None or is_connect(session):  # there, what is large travels as a file
        return _WITHOUT_SPARK
    heap = session.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory()  # type: ignore[union-attr]
    return min(int(heap) // 2, _WITHOUT_SPARK)


def is_local(master: str | None) -> bool:
    """Says whether executors are in the driver's JVM: `local`, `local[n]`, `local[*]`."""
    return master == "local" or bool(master and master.startswith("local["))


def _active() -> SparkSession | None:
    if "pyspark.sql" not in sys.modules:
        return None  # nobody can have started one
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    if connect := sys.modules.get("pyspark.sql.connect.session"):
        # Before the classic one: behind remote("local[2]") that is the server's own, in this process too.
        client = connect.SparkSession.getActiveSession() or connect.SparkSession._get_default_session()
        if client is not None or is_remote():
            return client  # type: ignore[no-any-return]
    # The first is the thread's own; a thread that has none sees the application's.
    session = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    return None if session is None or is_stopped(session) else session  # stopped, and so not active


def is_stopped(session: SparkSession) -> bool:
    """Says whether a session has been stopped."""
    if is_connect(session):
        return session.is_stopped  # type: ignore[attr-defined,no-any-return]
    return session.sparkContext._jsc is None


def is_connect(session: SparkSession) -> bool:
    """Says whether a session is a client of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def server_answers(session: SparkSession, timeout: float) -> bool:
    """Says whether a Connect session has, or gets in time, a connection to its server."""
    import grpc

    try:
        ready = grpc.channel_ready_future(session.client._channel)
    except ValueError:  # it has been closed
        return False
    try:
        ready.result(timeout)
    except (grpc.FutureTimeoutError, ValueError):
        ready.cancel()
        return False
    return True


def first_lines(error: BaseException) -> str:
    """Returns what a Connect server says of an error, without its own stack."""
    details = getattr(error, "details", None)  # of gRPC
    text = str(details() if callable(details) else error)
    return text.partition("\n\nJVM stacktrace:")[0].strip() or type(error).__name__


def message_of(error: BaseException) -> str:
    """Returns an error's message, of one from Spark's side what the JVM says."""
    try:
        return str(error.java_exception.getMessage())  # type: ignore[attr-defined]
    except Exception:  # it is none of py4j's, or there is no JVM any more
        return values.safe_text(error)


def control_endpoint(session: SparkSession, conf: Confs) -> tuple[str, str]:
    """Returns the addresses on which the control channel listens, and that it tells executors.

    On Connect spark.driver.host names the server. So it is this client's own route to the server,
    or, where the server is on this host, the server's route to its executors.
    """
    host = (conf("spark.driver.host") or "127.0.0.1").strip("[]")  # Spark's way to write one of IPv6
    if not is_connect(session):
        return (conf("spark.driver.bindAddress") or host).strip("[]"), host
    try:
        own = address_towards(session.client.host.strip("[]"))
        if ipaddress.ip_address(own).is_loopback and not is_local(conf("spark.master")):
            own = address_towards(host)
    except OSError:  # a name that only a proxy knows
        own = "127.0.0.1"
    return own, own
