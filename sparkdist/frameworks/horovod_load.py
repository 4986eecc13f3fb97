"""Imports Horovod, with its extension for PyTorch if it has that; a forkserver does so once.

TensorFlow's is for ranks to import: TensorFlow starts threads, which a fork does not copy.
"""

from __future__ import annotations

from pathlib import Path

try:
    import horovod
except ImportError as error:
    raise ImportError(f"{error}; `sparkdist horovod build` installs Horovod") from error

if any(Path(horovod.__file__).parent.glob("torch/mpi_lib_v2*.so")):
    import horovod.torch
