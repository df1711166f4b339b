"""The notebook runs as a reader would run it, in a kernel of this interpreter, and keeps its outputs.

``python tests/test_notebook.py`` runs it and saves its outputs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import thunder_cg

_NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "inspect_partition.ipynb"


def _execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    # No directories of kernel specs: what is left is the kernel of this interpreter, whatever else the machine has.
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    source = Path(thunder_cg.__file__).parents[1]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH")))),
        "PYTHONWARNINGS": "ignore:transformer_engine module not found",  # Thunder says so where it is imported
    }
    client = NotebookClient(notebook, km=kernel, timeout=120, record_timing=False)
    client.execute(cleanup_kc=True, env=os.environ | environment)
    return notebook


@pytest.fixture(scope="module")
def committed() -> nbformat.NotebookNode:
    return nbformat.read(_NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed() -> nbformat.NotebookNode:
    return _execute(nbformat.read(_NOTEBOOK, as_version=4))


@pytest.fixture(params=["committed", "executed"])
def notebook(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    """The notebook as it is read where it is not run, and as it is run."""
    return request.getfixturevalue(request.param)


def _outputs(notebook: nbformat.NotebookNode, cell: str) -> Iterator[nbformat.NotebookNode]:
    return iter(next(c for c in notebook.cells if c.id == cell).outputs)


def _html(notebook: nbformat.NotebookNode, cell: str) -> str:
    return next(output.data["text/html"] for output in _outputs(notebook, cell) if "data" in output)


def _printed(notebook: nbformat.NotebookNode, cell: str) -> str:
    return "".join(output.text for output in _outputs(notebook, cell) if output.output_type == "stream")


def _kinds(notebook: nbformat.NotebookNode) -> dict[str, set[str]]:
    """For each cell of code, the kinds of its outputs: ``"stdout"``, ``"execute_result"``."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.id: {output.get("name", output.output_type) for output in cell.outputs} for cell in cells}


def test_outputs_are_committed(committed: nbformat.NotebookNode, executed: nbformat.NotebookNode) -> None:
    kinds = _kinds(committed)
    assert {cell: kinds[cell] for cell in ("explain", "trace", "explain-fixed", "check")} == {
        "explain": {"execute_result"},
        "trace": {"stdout"},
        "explain-fixed": {"execute_result"},
        "check": {"stdout"},
    }
    assert kinds == _kinds(executed), "python tests/test_notebook.py saves new outputs"
    counts = [cell.execution_count for cell in committed.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)], "the cells were not run in order"


@pytest.mark.parametrize("cell", ["explain", "explain-fixed"])
def test_committed_reports_are_those_of_this_code(
    cell: str, committed: nbformat.NotebookNode, executed: nbformat.NotebookNode
) -> None:
    """But for times, and line numbers, which are those of PyTorch's sources, too."""
    before, now = (
        re.sub(r"[\w/]+\.py:\d+|\d+\.\d+ s\b", "", _html(notebook, cell)) for notebook in (committed, executed)
    )
    assert before == now, "python tests/test_notebook.py saves new outputs"


def test_table_shows_every_verdict_and_both_splits(notebook: nbformat.NotebookNode) -> None:
    page = _html(notebook, "explain")
    assert "<table>" in page
    assert all(f">{verdict}</td>" in page for verdict in ("capture", "eager", "bookkeeping"))
    assert all(op in page for op in ("item", "soft_clip", "CUDAGraph3"))


def test_trace_shows_the_regions(notebook: nbformat.NotebookNode) -> None:
    printed = _printed(notebook, "trace")
    assert "CUDAGraph1(" in printed and "soft_clip(" in printed


def test_fixing_leaves_one_region_and_nothing_eager(notebook: nbformat.NotebookNode) -> None:
    page = _html(notebook, "explain-fixed")
    assert ">eager</td>" not in page and "CUDAGraph2" not in page
    assert _printed(notebook, "check") == "regions: 3 before, 1 after\nall outputs agree bit for bit\n"


if __name__ == "__main__":
    nbformat.write(_execute(nbformat.read(_NOTEBOOK, as_version=4)), _NOTEBOOK)
