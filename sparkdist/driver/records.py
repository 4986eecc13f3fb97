"""What ranks say through Python's logging, as JSON lines in a file of the driver's."""

from __future__ import annotations

import json
import os
import threading
import warnings
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from sparkdist.errors import ConfigurationError

# A pipe without a reader is refused, and one that is full costs lines, rather than wait.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK


class RecordFile:
    """Appends records to a file; other runs may do so at the same time.

    Args:
        path: The file.
        **common: What every record is marked with, such as the run.

    Raises:
        ConfigurationError: It cannot be written to.
    """

    def __init__(self, path: Path, **common: Any) -> None:
        self._path = path
        self._common = common
        self._lock = threading.Lock()
        self._is_torn = False
        self._lost = 0
        self._reason = ""
        try:
            self._fd = os.open(path, _FLAGS, 0o600)
        except OSError as error:
            raise ConfigurationError(f"logs_json: cannot write to {str(path)!r}: {error.strerror}") from error

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file, and warns if it has not taken everything."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1
        if self._lost:
            warnings.warn(
                f"logs_json: {self._lost} lines could not be written to {str(self._path)!r}: {self._reason}",
                stacklevel=2,
            )

    def write(self, rank: int, lines: bytes) -> None:
        """Appends one line for each record of a rank.

        Args:
            rank: The rank.
            lines: What it said, each record as a line of JSON with `host` and with `time` in seconds
                since 1970; or how many were `dropped` on the way.
        """
        with self._lock:
            for text in lines.splitlines():
                record = json.loads(text)
                if "dropped" in record:
                    self._lose("they came faster than they were read", record["dropped"])
                    continue
                try:
                    said = datetime.fromtimestamp(record.pop("time"), UTC).isoformat(timespec="microseconds")
                except (ValueError, OverflowError, OSError):
                    self._lose("a record has no time that there is")
                    continue
                line = {"time": said, "rank": rank, "host": record.pop("host"), **record, **self._common}
                self._append(json.dumps(line).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        if self._is_torn:
            line = b"\n" + line  # so that this one can be read
        try:
            # In one call: so the lines of runs that share the file stay whole.
            written = os.write(self._fd, line)
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        self._is_torn = written < len(line)
        if self._is_torn:
            self._lose("there was no room for all of a line")

    def _lose(self, reason: str, count: int = 1) -> None:
        self._lost += count
        self._reason = self._reason or reason
