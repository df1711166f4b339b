"""The notebooks run as a reader would run them, in a kernel of this interpreter, and keep their outputs.

``python tests/test_notebook.py [NAME ...]`` runs them and saves their outputs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import thunder_cg

_FOLDER = Path(__file__).parents[1] / "notebooks"
_NAMES = sorted(path.stem for path in _FOLDER.glob("*.ipynb"))
_NEEDS = {"hugging_face": "transformers"}
_NIGHTLY = ("train_with_fusions", "your_own_operator")  # Inductor compiles for half a minute; each starts a kernel


def _read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(_FOLDER / f"{name}.ipynb", as_version=4)


def _execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    # No directories of kernel specs: what is left is the kernel of this interpreter, whatever else the machine has.
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    source = Path(thunder_cg.__file__).parents[1]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH")))),
        # Thunder says the one where it is imported, and Transformers' progress bars the other.
        "PYTHONWARNINGS": "ignore:transformer_engine module not found,ignore:IProgress not found",
        "TORCH_LOGS": "-torch.utils.cpp_extension",  # Inductor would say that there is a CUDA toolkit and no GPU
    }
    client = NotebookClient(notebook, km=kernel, timeout=180, record_timing=False)
    client.execute(cleanup_kc=True, env=os.environ | environment)
    return notebook


@cache
def _executed(name: str) -> nbformat.NotebookNode:
    return _execute(_read(name))


def _executed_here(name: str, request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    if (package := _NEEDS.get(name)) is not None:
        pytest.importorskip(package)
    if name in _NIGHTLY and not request.config.getoption("nightly"):
        pytest.skip("--nightly runs it")
    return _executed(name)


@pytest.fixture(params=["committed", "executed"])
def notebook(request: pytest.FixtureRequest, name: str) -> nbformat.NotebookNode:
    """The notebook as it is read where it is not run, and as it is run."""
    if request.param == "committed":
        return _read(name)
    return _executed_here(name, request)


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


@pytest.mark.parametrize("name", _NAMES)
def test_every_cell_ran_in_order(name: str, notebook: nbformat.NotebookNode) -> None:
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)], "python tests/test_notebook.py saves new outputs"
    assert "stderr" not in set().union(*_kinds(notebook).values())
    assert any("text/html" in output.get("data", ()) for cell in notebook.cells for output in cell.get("outputs", ()))


@pytest.mark.parametrize("name", _NAMES)
def test_outputs_are_committed(name: str, request: pytest.FixtureRequest) -> None:
    executed = _executed_here(name, request)
    assert _kinds(_read(name)) == _kinds(executed), "python tests/test_notebook.py saves new outputs"


# ------------------------------------------------------------------------------------------- inspect_partition


@pytest.mark.parametrize("cell", ["explain", "explain-fixed"])
def test_committed_reports_are_those_of_this_code(cell: str) -> None:
    """But for times, and line numbers, which are those of PyTorch's sources, too."""
    notebooks = _read("inspect_partition"), _executed("inspect_partition")
    before, now = (re.sub(r"[\w/]+\.py:\d+|\d+\.\d+ s\b", "", _html(notebook, cell)) for notebook in notebooks)
    assert before == now, "python tests/test_notebook.py saves new outputs"


@pytest.mark.parametrize("name", ["inspect_partition"])
def test_table_shows_every_verdict_and_both_splits(notebook: nbformat.NotebookNode) -> None:
    page = _html(notebook, "explain")
    assert "<table" in page and "<svg" in page
    assert all(verdict in page for verdict in ("allowed: it only", "<b>eager</b>", "bookkeeping: "))
    assert all(op in page for op in ("item", "soft_clip", "CUDAGraph3"))


@pytest.mark.parametrize("name", ["inspect_partition"])
def test_trace_shows_the_regions(notebook: nbformat.NotebookNode) -> None:
    printed = _printed(notebook, "trace")
    assert "CUDAGraph1(" in printed and "soft_clip(" in printed


@pytest.mark.parametrize("name", ["inspect_partition"])
def test_fixing_leaves_one_region_and_nothing_eager(notebook: nbformat.NotebookNode) -> None:
    page = _html(notebook, "explain-fixed")
    assert "<b>eager</b>" not in page and "CUDAGraph2" not in page
    assert _printed(notebook, "check") == "regions: 3 before, 1 after\nall outputs agree bit for bit\n"


# ------------------------------------------------------------------------------------------------------ others


@pytest.mark.parametrize("name", ["train_with_fusions"])
def test_training_replays_and_is_verified(notebook: nbformat.NotebookNode) -> None:
    assert _printed(notebook, "time").count("loss") == 8
    assert "forward: 7 replays, 2 of them verified\nbackward: 7 replays, 2 of them verified" in _printed(
        notebook, "verify"
    )
    assert "agree with Thunder without graphs, bit for bit" in _printed(notebook, "compare")


def test_the_committed_training_is_fused() -> None:
    page = _html(_read("train_with_fusions"), "explain")
    assert "2 regions with 2 of 2 ops; 0 ops eager" in page and "a fusion of allowed operators" in page


@pytest.mark.parametrize("name", ["your_own_operator"])
def test_an_allowed_operator_is_captured_and_a_wrong_promise_found(notebook: nbformat.NotebookNode) -> None:
    said = _printed(notebook, "allow")
    source = "return self.down(swiglu(self.up(x), self.gate(x)))"
    assert f"swiglu in `{source}`: eager: no rule knows it -> captured" in said
    calls = re.findall(r"call \d: (\w+)", _printed(notebook, "promise"))
    assert calls == ["right", "right", "WRONG", "right", "right", "right"]
    assert "made by scaled" in _printed(notebook, "promise")
    assert "0 ops eager" in _printed(notebook, "replace")


@pytest.mark.parametrize("name", ["hugging_face"])
def test_a_language_model_replays_and_writes_the_same_tokens(notebook: nbformat.NotebookNode) -> None:
    assert "the same tokens: True" in _printed(notebook, "speed")
    assert "replayed" in _html(notebook, "explain")


if __name__ == "__main__":
    for each in sys.argv[1:] or _NAMES:
        if find_spec(_NEEDS.get(each, "thunder")) is not None:
            nbformat.write(_execute(_read(each)), _FOLDER / f"{each}.ipynb")
