"""Every notebook runs from top to bottom, and is stored without its outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell) -> str:
    """The text that a cell printed or displayed."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(texts)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_stored_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    # Raises at the first cell that does.
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell in code_cells(notebook):
        # A cell that ends in an expression or prints says so; the others only define things.
        wants_output = cell.source.rstrip().splitlines()[-1].lstrip().startswith(("results", "print"))
        assert not wants_output or shown(cell), cell.source
    assert any(shown(cell) for cell in code_cells(notebook))
