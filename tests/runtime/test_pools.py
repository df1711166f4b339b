"""What needs no GPU of the pools that graphs are captured into."""

from __future__ import annotations

import sys

import pytest
import torch

from thunder_cg.runtime.cuda import pool as cuda


@pytest.mark.skipif(torch.version.cuda is None, reason="a build without CUDA")
def test_a_snapshot_leaves_ids_alone():
    """PyTorch's own, of one pool, frees the numbers of its id: a crash, later, anywhere."""
    pool = (int("1000"), int("2000"))  # not constants of this module, which others refer to as well
    before = [sys.getrefcount(number) for number in pool]
    for _ in range(3):
        assert cuda.segments([pool]) == []
    assert [sys.getrefcount(number) for number in pool] == before
