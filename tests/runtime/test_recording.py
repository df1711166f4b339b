"""A guard holds for what was captured, and for nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.recording import Guard, Outputs, Sharing, Source, overlaps_itself, static_buffer
from thunder_cg.runtime.region import _check_inputs
from thunder_cg.runtime.tape import TapeBackend


@pytest.fixture
def tensors():
    return [nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4), None, torch.randn(3)]


@pytest.fixture
def guard(tensors):
    return Guard(tensors, static=[0], written=frozenset())


def test_it_holds_for_the_same_and_for_like_inputs(guard, tensors):
    assert guard.holds(tensors)
    assert guard.holds([tensors[0], torch.zeros(4, 4), None, torch.zeros(3)])
    with torch.no_grad():
        tensors[0].mul_(2)
    assert guard.holds(tensors)


@pytest.mark.parametrize(
    ("position", "other"),
    [
        (0, lambda t: nn.Parameter(t.detach().clone())),
        (1, lambda t: t.t()),
        (1, lambda t: t.double()),
        (1, lambda t: torch.randn(4, 5)),
        (1, lambda t: torch.randn(17)[1:].view(4, 4)),
        (1, lambda t: None),
        (1, lambda t: 3.0),
        (2, lambda t: torch.zeros(1)),
        (3, lambda t: torch.complex(t, t).conj()),
    ],
    ids=["moved", "stride", "dtype", "shape", "alignment", "none", "number", "present", "conjugate"],
)
def test_it_refuses_a_change(guard, tensors, position, other):
    changed = list(tensors)
    changed[position] = other(tensors[position])
    assert not guard.holds(changed)
    assert guard.holds(tensors)


def test_it_refuses_a_static_tensor_with_other_strides(guard, tensors):
    tensors[0].data = tensors[0].data.t()
    assert not guard.holds(tensors)


def test_it_refuses_other_switches(tensors):
    torch.set_float32_matmul_precision("highest")
    guard = Guard(tensors, static=[0], written=frozenset())
    torch.set_float32_matmul_precision("medium")
    try:
        assert not guard.holds(tensors)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert guard.holds(tensors)


def test_the_same_tensor_twice():
    x = torch.zeros(2)
    guard = Guard([x, x], [], frozenset())
    assert guard.holds([x, x]) and guard.holds([y := torch.ones(2), y])
    assert not guard.holds([x, torch.ones(2)])


@pytest.mark.parametrize("static", [set(), {0}])
def test_written_memory_must_not_be_shared(static):
    base = torch.zeros(8)
    sharing = Sharing.of([base[:4], torch.zeros(4)], static, frozenset({0}))
    assert sharing.admits([base[:4], torch.zeros(4)])
    assert not sharing.admits([base[:4], base[4:]])


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(4, 4),
        torch.randn(4, 4).t(),
        torch.randn(17)[1:].view(4, 4),
        torch.randn(8, 4)[::2],
        torch.randn(4).expand(3, 4),
        torch.randn(6).as_strided((3, 3), (1, 1)),
        torch.zeros(0, 3),
        torch.zeros(3, dtype=torch.complex64).conj(),
    ],
)
def test_a_static_buffer_is_laid_out_like_its_input(like):
    buffer = static_buffer(TapeBackend().pool(torch.device("cpu")), like)
    assert buffer.stride() == like.stride() and buffer.shape == like.shape and buffer.is_conj() == like.is_conj()
    assert buffer.data_ptr() % 16 == like.data_ptr() % 16 or like.numel() == 0
    assert overlaps_itself(buffer) == overlaps_itself(like)


def test_outputs_are_copies_views_or_stay():
    x, y = torch.arange(4.0), torch.arange(6.0)
    produced = [x[1:], y, y.view(2, 3), torch.ones(2), None]
    outputs = Outputs(
        produced, [Source.of(0, x)], [True, True, True, False, True], torch.device("cpu"), torch.Tensor.detach
    )
    assert outputs.fixed == [3] and outputs.view_sources() == {0: 0} and outputs.nbytes == 24
    other, results = torch.zeros(4), [None] * 5
    outputs.deliver_owned(results, [other])
    assert results[0].untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert results[1].untyped_storage().data_ptr() == results[2].untyped_storage().data_ptr() != y.data_ptr()
    y.fill_(7)
    assert results[1].tolist() == list(range(6)) and results[3] is None
    (target,) = outputs.allocate(again := [None] * 5)
    target.copy_(outputs.sources()[0])
    outputs.derive(again, [other])
    assert again[0].untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert again[1].tolist() == [7] * 6


def test_an_input_on_another_device_than_the_trace_says_is_refused():
    none: frozenset[int] = frozenset()
    with pytest.raises(CaptureRefused, match="input 'seed' is on cpu, and the graph on meta"):
        _check_inputs(["x", "seed"], [torch.empty(2, device="meta"), torch.tensor(0)], none, none, torch.device("meta"))
