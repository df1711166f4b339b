"""What the tests of thunderfx share."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo counts how often it compiles a function, over all tests. On a CPU, Inductor would need a C++ compiler."""
    torch._dynamo.reset()
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: graph)
        # Later passes of Inductor's would change the graph, so it is copied, as Inductor's code is what it was.
        one_way = lambda graph, inputs, **options: partial(_run_boxed, copy.deepcopy(graph))  # noqa: E731
        monkeypatch.setattr("thunder_cg.compat.inductor.compile_fx_inner", one_way)
    yield
    torch._dynamo.reset()


def _run_boxed(graph: Any, tensors: list[torch.Tensor]) -> Any:
    return graph(*tensors)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's pieces stay apart, as where sizes change."""
    monkeypatch.setattr("thunder_cg.dynamo.compiler.join_pieces", lambda parts, of_thunder: parts)
