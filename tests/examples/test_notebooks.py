"""The notebooks run from their first cell to their last, and are kept without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert 3 <= len(cells) <= 12
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_last_cell_and_shows_a_result(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests run beside
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources=where).execute()
    shown = [kind for cell in notebook.cells for one in cell.get("outputs", ()) for kind in one.get("data", ())]
    assert "text/html" in shown
    assert "image/png" in shown or path.stem != "first-federation"
