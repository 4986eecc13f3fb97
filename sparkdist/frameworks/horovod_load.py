"""Imports Horovod, with its extension for PyTorch if it has that; a forkserver does so once.

TensorFlow's is for ranks to import: TensorFlow starts threads, which a fork does not copy.
"""

from __future__ import annotations

from pathlib import Path

try:
    import horovod
except ImportError as error:
    raise ImportError(f"{error}; `sparkdist horovod build` installs Horovod") from error

# Horovod's own modules only print that they have no extension, and lack most of their names.
extensions = {path.parent.name for path in Path(horovod.__file__).parent.glob("*/mpi_lib*.so")}
if not extensions:
    raise ImportError("Horovod is there without any extension; `sparkdist horovod build` makes them")
if "torch" in extensions:
    import horovod.torch
