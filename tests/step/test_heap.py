"""heap: tensors and functions are found, also those that `gc.freeze` has hidden, and little more is hidden by that."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from thunder_cg.step.heap import holder_of, known_functions, known_tensors


@pytest.fixture(autouse=True)
def frozen_as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.freeze()  # as common.py has it


def is_known(tensor: torch.Tensor) -> bool:
    return any(each is tensor for each in known_tensors())


def make() -> Callable[[], None]:
    def function() -> None:
        pass

    return function


@pytest.mark.nightly
def test_tensors_and_functions_are_found_whenever_they_were_frozen() -> None:
    tensors, functions = [], []
    for _ in range(3):
        tensors.append(torch.nn.Parameter(torch.ones(2)))
        functions.append(make())
        assert all(map(is_known, tensors))
        gc.freeze()
        assert not any(each is tensors[-1] for each in gc.get_objects())
        assert {*functions} <= {*known_functions({functions[0].__code__})}
        assert all(map(is_known, tensors))
    gc.unfreeze()
    assert all(map(is_known, tensors)) and len({id(each) for each in known_tensors()}) == len(known_tensors())


def test_frozen_functions_of_packages_that_are_constant_are_left_out() -> None:
    """There are many, and no step's own code is theirs."""
    gc.unfreeze()
    codes = {torch.nn.functional.relu.__code__, make().__code__}
    function = make()
    assert torch.nn.functional.relu in known_functions(codes)
    gc.freeze()
    assert known_functions(codes) == [function]


class _Holder:
    last: dict[str, Any]


@pytest.mark.nightly
def test_who_holds_an_object_is_named() -> None:
    def of(value: torch.Tensor) -> Callable[[], torch.Tensor]:
        def function() -> torch.Tensor:
            return value

        return function

    holder = _Holder()
    holder.last = {"loss": [None, deque([torch.ones(2)])]}
    for _ in range(2):
        assert holder_of(holder.last["loss"][1][0]) == "the attribute last of a _Holder['loss'][1][0]"
        gc.freeze()
    function = of(torch.ones(2))
    assert holder_of(function()) == f"the variable value of {function.__qualname__}"
    globals()["held"] = torch.ones(2)
    assert holder_of(globals().get("held")) == f"the global held of {__name__}"
    del globals()["held"]
    assert holder_of(torch.ones(2)) is None


def test_what_comes_after_is_not_frozen() -> None:
    gc.freeze()
    known_tensors()
    tensor = torch.ones(2)
    for _ in range(2):
        assert is_known(tensor) and any(each is tensor for each in gc.get_objects())
        assert make in known_functions({make.__code__}) and any(each is tensor for each in gc.get_objects())


def test_a_frozen_tensor_is_not_kept() -> None:
    tensor = torch.ones(2)
    gc.freeze()
    at = tensor.data_ptr()
    assert is_known(tensor)
    del tensor
    assert not [each for each in known_tensors() if each.data_ptr() == at and each.shape == (2,)]


@pytest.mark.parametrize("look", [known_tensors, lambda: holder_of(object())])
@pytest.mark.nightly_after(1)
def test_to_look_at_what_is_frozen_keeps_no_garbage(look: Callable[[], Any]) -> None:
    gc.freeze()
    cycle: list[Any] = [torch.ones(1)]
    cycle.append(cycle)
    tensor = weakref.ref(cycle[0])
    del cycle
    look()
    gc.collect()
    assert tensor() is None
