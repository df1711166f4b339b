"""strict=: what raises, and what does not because it is a layout's warm-up or capture."""

from __future__ import annotations

import pytest
import thunder
import torch
from support import fast_path_calls, replays
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from thunder_cg import CaptureError, explain


def work(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x) * 2) + 1


def test_each_call_that_does_not_replay_raises(transform, device):
    jitted = thunder.jit(work, transforms=[transform(strict=True)])
    x = torch.ones(3, 4, device=device, requires_grad=True)

    def step(leaf: torch.Tensor, **options: bool) -> None:
        jitted(leaf).sum().backward(**options)

    for layout in (x, x.detach().clone(memory_format=torch.contiguous_format).t().requires_grad_()):
        for _ in range(3):  # its warm-up, its capture, a replay
            step(layout)
    assert replays(jitted) == 2 * 2 * 2
    for _ in range(2):  # not only once
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            pytest.raises(CaptureError, match=r"saved-tensor hooks are active.*call torch.utils.checkpoint inside of"),
        ):
            step(x)
        with (
            FlopCounterMode(display=False),
            pytest.raises(CaptureError, match=r"forward, call .*dispatch.*take the mode off the calls"),
        ):
            step(x)
        with pytest.raises(CaptureError, match=r"backward, call .*retained.*without retain_graph=True.*drop strict="):
            step(x, retain_graph=True)
    step(x)
    assert replays(jitted) == 2 * 2 * 2 + 2 * 2 - 2 + 2  # the forwards that were retained, and this step


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_module_raises_from_its_fast_path_too(transform, device):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device).requires_grad_(False)
    jitted = thunder.jit(model, transforms=[transform(strict=True)])
    x = torch.ones(2, 4, device=device)
    for _ in range(4):
        jitted(x)
    assert fast_path_calls(jitted) == 2
    with (
        Watching(),
        pytest.raises(CaptureError, match=r"^Sequential, forward, call 5: a torch dispatch or function mode is active"),
    ):
        jitted(x)
    jitted(x)
    assert fast_path_calls(jitted) == 3


def test_strict_ops_raises_for_an_eager_op_when_thunder_compiles(transform, device):
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * x.sum().item()) + 1

    x = torch.ones(3, device=device)
    jitted = thunder.jit(scaled, transforms=[transform(strict="ops")])
    for _ in range(2):
        with pytest.raises(
            CaptureError, match=r"Tensor.item at test_strict.py:\d+: runs eagerly, the cause of 3 of 3"
        ) as error:
            jitted(x)
        assert "leave the read out: operators take a 0-dim tensor" in str(error.value) and 'strict="ops"' in str(
            error.value
        )
    whole = thunder.jit(work, transforms=[transform(strict="ops")])
    for _ in range(3):
        whole(x)
    assert replays(whole) == 2
    with FlopCounterMode(display=False), pytest.raises(CaptureError, match="dispatch"):
        whole(x)


def test_strict_ops_lets_what_is_too_small_to_gain_run_eagerly(transform, device):
    jitted = thunder.jit(torch.tanh, transforms=[transform(strict="ops")])
    jitted(torch.ones(3, device=device))
    assert explain(jitted).traces[0].counts["eager"] == 1


def test_a_function_without_regions_raises_after_its_first_call(transform, device):
    jitted = thunder.jit(lambda x: x + 1, transforms=[transform(strict=True)])
    x = torch.ones(3, device=device)
    jitted(x)
    for call in (2, 3):
        with pytest.raises(
            CaptureError,
            match=rf"call {call}: nothing in it is captured: torch.add at test_strict.py:\d+ is eager .*one kernel.*; "
            "compile more of the program together, or drop strict=",
        ):
            jitted(x)
    nothing = thunder.jit(lambda x: (x, x.shape[0]), transforms=[transform(strict=True)])
    for _ in range(3):
        assert nothing(x)[1] == 3
