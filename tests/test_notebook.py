"""The notebook runs as a reader would run it, in a kernel of the interpreter that runs the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import thunder_cg

_NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "inspect_partition.ipynb"


@pytest.fixture(scope="module")
def executed() -> nbformat.NotebookNode:
    notebook = nbformat.read(_NOTEBOOK, as_version=4)
    # No directories of kernel specs: what is left is the kernel of this interpreter, whatever else the machine has.
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    source = Path(thunder_cg.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    NotebookClient(notebook, km=kernel, timeout=120).execute(cleanup_kc=True, env=os.environ | {"PYTHONPATH": path})
    return notebook


def _outputs(notebook: nbformat.NotebookNode, cell: str) -> Iterator[nbformat.NotebookNode]:
    return iter(next(c for c in notebook.cells if c.id == cell).outputs)


def _html(notebook: nbformat.NotebookNode, cell: str) -> str:
    return next(output.data["text/html"] for output in _outputs(notebook, cell) if "data" in output)


def _printed(notebook: nbformat.NotebookNode, cell: str) -> str:
    return "".join(output.text for output in _outputs(notebook, cell) if output.output_type == "stream")


def test_table_shows_every_verdict_and_both_splits(executed: nbformat.NotebookNode) -> None:
    page = _html(executed, "explain")
    assert "<table>" in page
    assert all(f">{verdict}</td>" in page for verdict in ("capture", "eager", "bookkeeping"))
    assert all(op in page for op in ("item", "soft_clip", "CUDAGraph3"))


def test_trace_shows_the_regions(executed: nbformat.NotebookNode) -> None:
    printed = _printed(executed, "trace")
    assert "CUDAGraph1(" in printed and "soft_clip(" in printed


def test_mending_leaves_one_region_and_nothing_eager(executed: nbformat.NotebookNode) -> None:
    page = _html(executed, "explain-mended")
    assert ">eager</td>" not in page and "CUDAGraph2" not in page
    assert _printed(executed, "check") == "regions: 3 before, 1 after\nall outputs agree bit for bit\n"
