"""The first lines that run in a Spark task: they unpack this package and hand over to it.

Executors need not have sparkdist installed, so this module is pickled by value with the job; it
may refer to nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def bootstrap(
    digest: str, package: bytes, order: str, function: bytes, parcel: bytes
) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """Returns the function that Spark maps over each partition of the gang's barrier job.

    Args:
        digest: SHA-256 of `package`.
        package: A zip of the sparkdist package.
        order: The `Order` as JSON.
        function: The pickled function and its arguments.
        parcel: A zip of what else travels with the job.
    """

    def run(partition: Iterable[Any]) -> Iterable[Any]:
        import shutil
        import sys

        for _ in partition:
            pass  # a worker whose task left input unread is not used again
        root, own = unpack_here(digest, package)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "sparkdist" and not str(module.__file__).startswith(root):
                del sys.modules[name]  # another version, from an earlier run or installed here
        sys.path.insert(0, root)
        try:
            from sparkdist.executor.task import run_task

            return list(run_task(order, function, parcel, root))
        finally:
            sys.path.remove(root)
            if own:
                shutil.rmtree(own, ignore_errors=True)

    return run


def arrow_bootstrap(
    digest: str, package: bytes, order: str, *parts: bytes | str
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Returns the same for a job over Arrow batches, each row as a batch of `header` (JSON) and `body`.

    Args:
        digest: As for `bootstrap`.
        package: As for `bootstrap`.
        order: As for `bootstrap`.
        *parts: Its function and parcel, or the names of files of Spark's that hold them.
    """

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        import json
        from pathlib import Path

        import pyarrow
        from pyspark import SparkFiles

        read = [Path(SparkFiles.get(p)).read_bytes() if isinstance(p, str) else p for p in parts]
        for header, body in bootstrap(digest, package, order, *read)(batches):
            columns = [pyarrow.array([json.dumps(header)]), pyarrow.array([body], pyarrow.binary())]
            yield pyarrow.RecordBatch.from_arrays(columns, names=["header", "body"])

    return run


def unpack_here(digest: str, package: bytes) -> tuple[str, str | None]:
    """Unpacks the package in one of Spark's folders on an executor.

    Returns:
        The folder that holds it, and one that is to be removed at the end of the task: where none
        of Spark's can be used.

    Raises:
        OSError: There is no folder for it; the driver reads the reason in its text.
    """
    import base64
    import json
    import os
    import shutil
    import socket
    import tempfile
    import zlib

    problems = []
    for base in filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(",")):
        try:
            return unpack_package(base, digest, package), None
        except OSError as error:
            problems.append(f"{base}: {error.strerror or error}")
    own = None
    try:
        own = tempfile.mkdtemp(prefix="sparkdist-")
        return unpack_package(own, digest, package), own
    except OSError as error:
        if own:
            shutil.rmtree(own, ignore_errors=True)
        problems.append(f"{own or tempfile.tempdir or 'TMPDIR'}: {error.strerror or error}")
    message = (
        f"no folder on {socket.gethostname()} can hold the files of a run ({'; '.join(problems)}). See that "
        "one is there, has room and can be written to, or name another with spark.local.dir, or TMPDIR."
    )
    row = json.dumps([({"kind": "error", "message": message}, "")]).encode()
    text = base64.b64encode(zlib.compress(row)).decode()  # as executor/last_words.py has it
    raise OSError(f"sparkdist({text})")


def unpack_package(base: str, digest: str, package: bytes) -> str:
    """Unpacks the package below `base`, once, however many tasks come; returns the folder that holds it.

    Raises:
        PermissionError: The folder is there and is another user's.
        OSError: It cannot be made.
    """
    import io
    import os
    import shutil
    import tempfile
    import zipfile

    root = os.path.join(base, f"sparkdist-{os.geteuid()}-{digest}")
    if not os.path.isdir(root):
        fresh = tempfile.mkdtemp(dir=base)
        try:
            zipfile.ZipFile(io.BytesIO(package)).extractall(fresh)
            os.rename(fresh, root)
        except OSError:
            shutil.rmtree(fresh)
            if not os.path.isdir(root):  # else another task was first
                raise
    if os.stat(root).st_uid != os.geteuid():
        raise PermissionError(f"{root} belongs to another user")
    return root
