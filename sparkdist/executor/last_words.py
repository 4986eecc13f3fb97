"""Rows as text, for a task that must raise: Spark then ends the gang's other tasks, and loses their rows.

Where the driver cannot be reached nothing else ends the ranks of other nodes when one has failed.
What happened travels in the text of the exception, which Spark shows the driver.
"""

from __future__ import annotations

import base64
import json
import re
import zlib

from sparkdist.executor.leader import LINES, Row

_LIMIT = 256 << 10  # bytes of bodies that come along; a failure's text is in its header
_MARK = re.compile(r"sparkdist\(([A-Za-z0-9+/=]+)\)")


class GangLost(Exception):
    """Ends the whole gang by Spark's means.

    Args:
        rows: What became of this node.
    """

    def __init__(self, rows: list[Row]) -> None:
        room, told = _LIMIT, []
        # What is said of ranks is worth more than lines, and of these the last ones.
        for header, body in sorted(rows, key=lambda row: row[0]["kind"] in LINES):
            if len(body) <= room:
                room -= len(body)
                told.append((header, base64.b64encode(body).decode()))
            elif header["kind"] in ("report", "log"):
                told.append((header, base64.b64encode(body[len(body) - room :]).decode()))
                room = 0
            elif header["kind"] != "record":
                told.append((header, ""))
        text = base64.b64encode(zlib.compress(json.dumps(told).encode())).decode()
        super().__init__(f"sparkdist({text})")


def rows_in(text: str) -> list[Row] | None:
    """Returns the rows in an error's text, or None if there are none in it."""
    found = _MARK.search(text)
    if found is None:
        return None
    told = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return [(header, base64.b64decode(body)) for header, body in told]
