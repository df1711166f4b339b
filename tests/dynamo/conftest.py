"""What the tests of thunderfx share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import without_inductor


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo counts how often it compiles a function, over all tests."""
    torch._dynamo.reset()
    if not torch.cuda.is_available():
        without_inductor(monkeypatch)
    yield
    torch._dynamo.reset()


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's pieces stay apart, as where sizes change."""
    monkeypatch.setattr("thunder_cg.dynamo.compiler.join_pieces", lambda parts, of_thunder: parts)
