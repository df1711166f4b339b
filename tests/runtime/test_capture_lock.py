"""Which graphs are destroyed when: PyTorch does not protect a capture from a destructor on another thread."""

from __future__ import annotations

import threading
import weakref

import pytest

from thunder_cg.runtime.cuda.pool import CudaGraph, _capture_lock


class Graph:
    """In the place of PyTorch's."""


def graph():
    made = CudaGraph.__new__(CudaGraph)
    made._graph = Graph()
    return made, weakref.ref(made._graph)


def test_a_graph_dies_at_once():
    made, alive = graph()
    del made
    assert alive() is None


@pytest.mark.parametrize("thread", [False, True], ids=["that captures", "beside it"])
def test_a_graph_dies_after_the_capture(thread):
    made = [graph() for _ in range(3)]
    alive = [reference for _, reference in made]
    with _capture_lock:
        if thread:
            worker = threading.Thread(target=made.clear)
            worker.start()
            worker.join()
        else:
            made.clear()
        assert all(reference() is not None for reference in alive)
    assert all(reference() is None for reference in alive)


def test_a_turn_within_a_turn():
    """An operator that runs in a warm-up may warm up and capture a function of its own; other threads wait for both."""
    seen = []

    def other():
        with _capture_lock:
            seen.append("other")

    with _capture_lock:
        worker = threading.Thread(target=other)
        worker.start()
        with _capture_lock:
            worker.join(0.05)
        worker.join(0.05)
        seen.append("first")
    worker.join()
    assert seen == ["first", "other"]
