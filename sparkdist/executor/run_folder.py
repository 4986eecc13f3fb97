"""The folder that a run has on its node: the parcel's content, error files, ranks' sockets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir

from sparkdist.executor import process
from sparkdist.executor.kept import Kept
from sparkdist.executor.order import NodeError
from sparkdist.executor.shortage import unusable
from sparkdist.executor.unpack import unpack

_NAME = "run-{agent}"


class RunFolder:
    """A run's folder.

    Args:
        runs: Where each run of a server has one.
        agent: The pid of the run's agent.

    Attributes:
        path: Its path.
        code: Where code is that came with the parcel, if any did.
        ship: Where files are that did.
        kept: What outlives it, once it is made.
        sockets: A folder for the sockets of ranks' multiprocessing, or None where there is no room.
    """

    kept: Kept | None = None

    def __init__(self, runs: Path, agent: int) -> None:
        self.path = runs / _NAME.format(agent=agent)
        self.code, self.ship = self.path / "parcel/code", self.path / "parcel/ship"
        self.sockets: str | None = None

    def make(self, run_id: str, keep: float) -> None:
        """Makes it.

        Args:
            run_id: The run.
            keep: Seconds for which what ranks keep is there for another attempt.

        Raises:
            NodeError: That is not possible.
        """
        with self._usable():
            self.path.mkdir(mode=0o700)
            self.kept = Kept(self.path.parent, run_id, keep)
        with suppress(OSError):  # a full or missing disk is for the user's code to find, if it needs one
            self._make_sockets()

    def _make_sockets(self) -> None:
        """Makes a folder for sockets.

        Of its own multiprocessing makes one in every process that needs it, and leaves those of processes
        that are killed, as a DataLoader's workers are by a Python that ends.
        """
        made = self._short_path()
        made.mkdir(mode=0o700)
        self.sockets = str(made)

    def _short_path(self) -> Path:
        # From the name alone: the run's folder may be gone first. A path of a socket has 108 bytes at most.
        return Path(gettempdir(), f"sparkdist-{self.path.parent.name[-8:]}-{self.path.name}")

    def unpack(self, parcel: bytes) -> None:
        """Unpacks what came with the job.

        Raises:
            NodeError: The disk does not take it.
        """
        with self._usable():
            unpack(parcel, self.path / "parcel")

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NodeError(unusable(self.path.parent, error, "spark.local.dir, TMPDIR")) from error

    def error_file(self, local_rank: int) -> str:
        """Returns the path of the file that a rank leaves its error in by the framework's own means."""
        return str(self.path / f"error-{local_rank}.json")

    def remove(self) -> None:
        """Removes all of it, also if somebody has removed the most of it."""
        if self.kept:
            self.kept.leave()
        with suppress(OSError):
            shutil.rmtree(self._short_path())
        shutil.rmtree(self.path, ignore_errors=True)


def remove_left(runs: Path) -> None:
    """Removes what runs of an earlier server have left, which was killed, and their agents too."""
    for path in runs.glob(_NAME.format(agent="*")):
        agent = int(path.name.partition("-")[2])
        if process.is_exiting(agent):  # or gone
            RunFolder(runs, agent).remove()
