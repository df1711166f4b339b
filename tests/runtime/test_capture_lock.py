"""Which graphs are destroyed when: PyTorch does not protect a capture from a destructor on another thread."""

from __future__ import annotations

import threading
import weakref

import pytest

from thunder_cg.runtime.cuda.graph import CudaGraph
from thunder_cg.runtime.cuda.streams import capture_lock


class Graph:
    """Stands in for PyTorch's."""


def graph():
    made = CudaGraph.__new__(CudaGraph)
    made.torch_graph = Graph()
    return made, weakref.ref(made.torch_graph)


def test_a_graph_dies_at_once():
    made, alive = graph()
    del made
    assert alive() is None


@pytest.mark.parametrize("thread", [False, True], ids=["that captures", "beside it"])
def test_a_graph_dies_after_the_capture(thread):
    made = [graph() for _ in range(3)]
    alive = [reference for _, reference in made]
    with capture_lock:
        if thread:
            worker = threading.Thread(target=made.clear)
            worker.start()
            worker.join()
        else:
            made.clear()
        assert all(reference() is not None for reference in alive)
    assert all(reference() is None for reference in alive)


def test_a_graph_dies_after_a_capture_of_the_users(monkeypatch):
    monkeypatch.setattr(capture_lock, "_user_captures", lambda: True)
    made, alive = graph()
    del made
    with capture_lock:
        pass
    assert alive() is not None
    monkeypatch.undo()
    with capture_lock:
        pass
    assert alive() is None


def test_the_lock_is_reentrant():
    """An operator that runs in a warm-up may capture a function of its own. Other threads wait for both."""
    seen = []

    def other():
        with capture_lock:
            seen.append("other")

    with capture_lock:
        worker = threading.Thread(target=other)
        worker.start()
        with capture_lock:
            worker.join(0.05)
        worker.join(0.05)
        seen.append("first")
    worker.join()
    assert seen == ["first", "other"]
