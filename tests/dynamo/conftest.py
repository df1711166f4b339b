"""What the tests of thunderfx share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import run_what_inductor_gets


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo counts how often it compiles a function, over all tests. On a CPU, Inductor would need a C++ compiler."""
    torch._dynamo.reset()
    if not torch.cuda.is_available():
        run_what_inductor_gets(monkeypatch)
    yield
    torch._dynamo.reset()
