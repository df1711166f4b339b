"""Two ranks for each test session: gloo and the tape everywhere, NCCL and CUDA graphs where there are two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two processes that share a group."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    pool = Ranks(2, request.param)
    yield pool
    pool.close()
