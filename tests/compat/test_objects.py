"""objects: all objects of some types are found, and other threads do not notice it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from thunder_cg.compat import objects
from thunder_cg.compat.objects import (
    alive,
    modules_of_threads,
    objects_of,
    referrers_of,
    with_subclasses,
    without_garbage_collection,
)
from thunder_cg.compat.tensors import are_held_unseen
from thunder_cg.step.heap import known_functions, known_tensors


class Kind:
    pass


class Derived(Kind):
    pass


def test_objects_and_referrers() -> None:
    found = [Kind(), Kind(), Derived()]
    assert {*map(id, objects_of({Kind}))} == {*map(id, found[:2])}
    assert {*map(id, objects_of(with_subclasses(Kind)))} == {*map(id, found)}
    function = types.FunctionType(test_objects_and_referrers.__code__, {})  # others may be frozen
    assert referrers_of({types.FunctionType}, [function.__code__]) == [function]
    gc.collect()
    before, threshold = len(gc.get_objects()), gc.get_threshold()
    for _ in range(9):
        objects_of({Kind})
    assert len(gc.get_objects()) <= before + 3 and gc.get_threshold() == threshold  # no list of all is left


@pytest.mark.parametrize(
    "look",
    [
        lambda: objects_of({Kind}),
        known_tensors,
        lambda: known_functions({test_objects_and_referrers.__code__}),
        lambda: are_held_unseen([torch.ones(1)]),
    ],
    ids=["objects", "tensors", "functions", "holders"],
)
def test_a_tuple_that_another_thread_makes(look: Callable[[], Any]) -> None:
    """CPython raises SystemError if a list of all objects has it when it is done."""
    is_listed, is_made = threading.Event(), threading.Event()

    def on_event(frame: types.FrameType, event: str, called: Any) -> None:
        if event == "c_return" and called in (gc.get_objects, gc.get_referrers):
            is_listed.set()
            is_made.wait(1)

    def look_at_all() -> None:
        sys.setprofile(on_event)
        look()
        sys.setprofile(None)
        is_listed.set()

    def items() -> Iterator[int]:
        yield from range(5)
        thread.start()
        is_listed.wait()
        yield from range(50)

    thread = threading.Thread(target=look_at_all)
    try:
        assert len(tuple(items())) == 55
    finally:
        is_made.set()
        thread.join()


_LOOK = """
import importlib.util, sys, threading
spec = importlib.util.spec_from_file_location("objects", sys.argv[1])
objects = importlib.util.module_from_spec(spec)
spec.loader.exec_module(objects)
is_listed, is_made, events = threading.Event(), threading.Event(), []
class Kind:
    pass
def look_at_all():
    for _ in range(2):
        objects.objects_of({Kind})
        objects.referrers_of({Kind}, [Kind])
    id(events)
    is_listed.set()
def hook(event, args):
    if threading.current_thread() is thread:
        events.append(event)
        if event == "builtins.id" and "gc.get_objects" in events:
            is_listed.set()
            is_made.wait(1)
def items():
    yield from range(5)
    thread.start()
    is_listed.wait()
    yield from range(50)
thread = threading.Thread(target=look_at_all)
sys.addaudithook(hook)
try:
    assert len(tuple(items())) == 55
finally:
    is_made.set()
    thread.join()
assert {"gc.get_objects", "gc.get_referrers", "builtins.id"} <= {*events}, events
"""


def test_a_tuple_that_another_thread_makes_beside_an_audit_hook() -> None:
    """A hook in Python, as filelock has one, lets other threads run. It stays, so this is a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, str(objects.__file__)], capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr


def test_no_garbage_collection_beside_another_thread() -> None:
    """A thread that looks at all objects ends while another one captures."""
    before, one, other = gc.get_threshold(), without_garbage_collection(), without_garbage_collection()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 0
    other.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_what_is_put_in_meanwhile() -> None:
    objects = weakref.WeakValueDictionary[int, Kind]()
    kept = [Kind() for _ in range(3)]
    objects.update(enumerate(kept))
    for each in alive(objects.valuerefs()):
        kept.append(Kind())
        objects[id(each)] = kept[-1]
    assert len(alive(objects.valuerefs())) == 6
    kept.clear()
    del each
    assert alive(objects.valuerefs()) == []


@pytest.mark.parametrize("here", [True, False])
def test_who_looks_at_threads_keeps_nothing_of_them(here):
    class Value:
        pass

    def run(act):
        value = Value()
        act()
        return weakref.ref(value)

    with without_garbage_collection():
        if here:
            assert run(modules_of_threads)() is None
            return
        begun, end, found = threading.Event(), threading.Event(), []
        thread = threading.Thread(target=lambda: found.append(run(lambda: (begun.set(), end.wait()))))
        thread.start()
        begun.wait()
        modules = modules_of_threads()
        end.set()
        thread.join()
        assert __name__ in modules
        assert found[0]() is None
