"""The notebooks of docs/ run from their first cell to their last, and keep small outputs of such a run."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import covmerge

ROOT = Path(covmerge.__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PICTURE = 100_000  # most characters of one output


def named(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_notebook_is_kept_as_one_run_left_it(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and all(len(json.dumps(output)) < PICTURE for output in outputs)
    kinds = {output.output_type for output in outputs}
    assert "error" not in kinds
    said = json.dumps(outputs)
    assert not [place for place in ("/home/", "/root/", "/work/", "/tmp/") if place in said]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what it writes
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    )
    notebook = nbformat.read(path, as_version=4)
    # A cell that fails ends it, with the cell and its traceback in the message.
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": tmp_path}}).execute()
