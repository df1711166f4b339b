"""Nothing depends on there being two ranks: four agree, capture, and compute the same bits as without graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks
from test_parallel import same_bits
from test_whole_steps import same_bits as same_bits_of_steps


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    pool = Ranks(4, "cpu")
    yield pool
    pool.close()


@pytest.mark.nightly
def test_four_ranks(four: Ranks) -> None:
    for differing, traces in four.run(same_bits, "fsdp zero2", 4, 1, timeout=180.0):
        assert not differing
        for trace in traces:
            assert trace["replays"] == [3] and not trace["eager"] and not trace["fallbacks"]
        # The sum of four numbers depends on the order, which NCCL chooses by size; gathers only move bits.
        assert [trace["launches"] < trace["collectives"] for trace in traces] == [True, False]


@pytest.mark.nightly
def test_whole_steps(four: Ranks) -> None:
    for differing, replays, _ in four.run(same_bits_of_steps, "ddp", 6, 1, timeout=180.0):
        assert not differing and replays == 3
