"""Where a warm-up allocates what is freed soon, such as what Inductor needs to time kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from thunder_cg.compat import cuda
from thunder_cg.runtime.cuda import pool
from thunder_cg.runtime.cuda.pool import CudaPool

MIB = 2**20


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a pool without a GPU does. It has a free block of 100 MiB."""
    said: list[str] = []

    def saying(what: str) -> Any:
        @contextmanager
        def change(index: int, id: Any) -> Iterator[None]:
            said.append(what)
            yield
            said.append(f"no longer {what}")

        return change

    blocks = [{"state": "active_allocated", "size": 900 * MIB}, {"state": "inactive", "size": 100 * MIB}]
    monkeypatch.setattr(cuda, "use_pool", saying("inside"))
    monkeypatch.setattr(cuda, "leave_pool", saying("outside"))
    monkeypatch.setattr(cuda, "pool_segments", lambda pools: [{"blocks": blocks}])
    monkeypatch.setattr(pool, "_free_cache", lambda: said.append("cache freed"))
    return said


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((60, 5), []),
        ((60, 60), []),
        ((60, 200), ["outside", "cache freed", "no longer outside"]),
        ((200, 5), ["outside", "cache freed", "no longer outside"]),
        ((200, 200), ["outside", "cache freed", "no longer outside"]),
        ((200, 60), ["outside", "inside", "no longer inside", "cache freed", "no longer outside"]),
        ((90, 5), ["outside", "cache freed", "no longer outside"]),  # beside it there is no room for small copies
    ],
)
def test_the_pool_is_used_where_it_has_room(said: list[str], sizes: tuple[int, int], expected: list[str]) -> None:
    found = _pool(graphs=1)
    first, second = sizes  # in MiB, the second one inside of the first
    with found._with_room_for(first * MIB), found._with_room_for(second * MIB):
        pass
    assert said == expected and found._allocates_inside


def test_a_pool_without_graphs_grows(said: list[str]) -> None:
    """It begins anew with its first graph."""
    with _pool(graphs=0)._with_room_for(2000 * MIB):
        assert said == []


def _pool(graphs: int) -> Any:
    found: Any = CudaPool.__new__(CudaPool)  # needs no GPU
    found._index, found._allocates_inside, found._private_pool = 0, True, SimpleNamespace(id=(0, 1))
    found._graphs = range(graphs)
    return found
