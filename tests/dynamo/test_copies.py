"""Writes with a gradient are made to copies: one region each way, and PyTorch's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import regions, same
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from thunder_cg import explain, thunderfx


def one_region_each_way(graphed: Any) -> bool:
    report = explain(graphed)
    assert not report.outside, report.outside
    eager = [op.name for trace in report.traces for op in trace.ops if op.verdict == "eager"]
    assert not eager, eager
    return [len(trace.regions) for trace in report.traces] == [1, 1] and all(
        region["replays"] == 3 for region in regions(graphed)
    )


def arguments(seed: int, device: str, size: int = 4, wanted: str = "xzs") -> dict[str, torch.Tensor]:
    """Of whole numbers: PyTorch sums the gradient of ``z`` in ``y[mask] = z`` over as many elements as are selected,
    and a graph over all, so that its last bit may differ.
    """
    torch.manual_seed(seed)
    shapes = {"x": (size, 4), "z": (4,), "s": ()}
    tensors = {
        name: torch.randint(-4, 5, shape).float().to(device).requires_grad_(name in wanted)
        for name, shape in shapes.items()
    }
    rows, mask = torch.randperm(size)[:2].to(device), (torch.rand(size, 4) > 0.5).to(device)
    return {**tensors, "rows": rows, "mask": mask}


def outcome(fn: Callable[..., Any], *of: Any, **named: Any) -> list[torch.Tensor | None]:
    given = arguments(*of, **named)
    loss = sum(result.square().sum() for result in fn(**given))
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), *(given[name].grad for name in "xzs")]


def trains_alike(fn: Callable[..., Any], backend: str, device: str, **named: Any) -> Any:
    graphed = thunderfx(fn, backend=backend)
    for seed in range(4):
        same(outcome(graphed, seed, device, **named), outcome(fn, seed, device, **named))
    return graphed


WRITES = [
    "y[mask] = s",
    "F.dropout(y, 0.0)[0].add_(z)",
    "y.real[1:].mul_(z)",
    "y[[0, 2]] = z",
    "y[rows] = z",
    "y[0] = z.double()",
    "y.diagonal().mul_(z)",
    "y.index_put_((rows,), z, accumulate=True)",
    "y[1] *= z",
    "y[mask] = 3",
    "y[mask[:, 0]] = z",
    "y[mask] = z[:1]",
    "y[:, :2][mask[:, :2]] = z[:1]",
    "y.masked_fill_(mask, s)",
    "y[:, [0, -1]] = z[:2]",
    "y[[0, 2], [1, 3]] = 2.0",
    "y[:, rows] = z[:, None]",
    "y[rows, rows] = 2.0",
    "y[rows] = y[:2] + z",
    "y[1:, rows] += z[:2]",
    "y[[0, 2]] *= z",
    "y[1:] = z[2:3].bfloat16()",
    "y[..., 0] = z[None, None]",
    "y[:, :2].copy_(s)",
    "torch.diagonal(y, dim1=1, dim2=0).fill_(1.0)",
    "y.narrow(0, 1, 1).mul_(z)",
    "y.select(0, 1).exp_()",
    "y.select(-1, -1).zero_()",
    "y.t().add_(z, alpha=2)",
    "y.view(2, 8)[:, 1:5] = z",
    "y.transpose(0, 1)[1:][0].div_(2)",
    "y.unsqueeze(0).squeeze(0).permute(1, 0)[2] = z",
    "y.index_put_((rows,), z)",
    "y.index_put_(indices=(rows,), values=z)",
    "F.relu(y[0], inplace=True)",
    "y.zero_(); y[rows] = z",
    "y.copy_(x[[1, 0, 3, 2]]); y[0] *= 2",
    "y[4:] = z",
    "y[0] *= z; y[1][2:] -= z[:2]; y[rows] = z",
    "y[:, 0] = z * 2; y[:, 1] = y[:, 0] + x[:, 1]; y[:, 2] = z",
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.nightly_after(9)
def test_writes_with_a_gradient(backend, device, write):
    names = {"F": F, "torch": torch}
    exec(f"def write(y, x, z, s, rows, mask): {write}", names)
    write_to = names["write"]

    def fn(x, z, s, rows, mask):
        y = x * 2
        write_to(y, x, z, s, rows, mask)
        return [y * x]

    assert one_region_each_way(trains_alike(fn, backend, device))


@pytest.mark.parametrize("wanted", ["x", "z", "s"])
@pytest.mark.nightly_after(1)
def test_where_some_have_no_gradient(backend, device, wanted):
    def fn(x, z, s, rows, mask):
        y = x * 2
        y[mask] = s
        y[rows] = z
        y[0] *= z
        return [y * x]

    assert one_region_each_way(trains_alike(fn, backend, device, wanted=wanted))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.nightly_after(1)
def test_where_nothing_has_a_gradient(backend, device, mode):
    def fn(x, z, s, rows, mask):
        y = x * 2
        y[(mask,)] = 0.5
        y[[0, 2]] = z
        y[rows] = z
        y[0] *= z
        y[1:].diagonal().mul_(2)
        return [y * x]

    with mode():
        graphed = trains_alike(fn, backend, device)
    assert not explain(graphed).outside


def test_a_cast_into_what_the_graph_makes(backend, device):
    def fn(x, z, s, rows, mask):
        y = torch.zeros(4, 4, dtype=torch.bfloat16, device=x.device)
        y[0] = z
        y[2:] = x[2:]
        return [y.float() * x]

    assert one_region_each_way(trains_alike(fn, backend, device))


@pytest.mark.parametrize(
    ("write", "wanted"),
    [
        ("y[mask] *= 2", "z"),
        ("y[mask] *= 2", "x"),
        ("y[(mask,)] = s", "z"),
        ("y[mask] = x[mask]", "z"),
        ("y[mask] = s", "z"),
        ("y[(mask,)] += s", "xz"),
    ],
)
@pytest.mark.nightly_after(3)
def test_masks_beside_what_trains(backend, device, write, wanted):
    """How many elements a mask selects is known on the host alone: no graph has that, and no gradient is lost."""
    names: dict[str, Any] = {}
    exec(f"def write(y, x, s, mask): {write}", names)
    write_to = names["write"]

    def fn(x, z, s, rows, mask):
        y = x * 2
        write_to(y, x, s, mask)
        return [y * z]

    trains_alike(fn, backend, device, wanted=wanted)


def test_a_mask_for_each_dimension(backend, device):
    """The second one was ignored."""

    def fn(x, z, s, rows, mask):
        y = x * 2
        y[mask[0], mask[0]] = s
        return [y * x]

    trains_alike(fn, backend, device)


@pytest.mark.parametrize("write", ["y[mask] = s", "y[mask] = z[:1]", "y[mask] = 2.0", "y[mask[:, 0]] = z"])
@pytest.mark.nightly_after(2)
def test_what_is_not_laid_out_as_the_mask(backend, device, write):
    names: dict[str, Any] = {}
    exec(f"def write(y, z, s, mask): {write}", names)
    write_to = names["write"]

    def fn(x, z, s, rows, mask):
        y = x.t() * 2
        write_to(y, z, s, mask)
        return [y]

    graphed = trains_alike(fn, backend, device)
    given = arguments(0, device)
    same(graphed(**given), fn(**given))


def test_a_0_dim_tensor_that_is_also_combined_with_a_larger_one(backend, device):
    """On the CPU, Thunder added the gradients of both before it summed one."""

    def fn(x, z, s, rows, mask):
        y = x * 2
        y[0] = s
        y[rows] = s
        return [y * s]

    def between(x, z, s, rows, mask):
        return [torch.lerp(x, x * 2, s) * 3, x * s]

    trains_alike(fn, backend, device)
    trains_alike(between, backend, device)


def test_an_empty_list_of_indices(backend, device):
    def fn(x, z, s, rows, mask):
        y = x * 2
        y[[]] = z
        return [y * x]

    trains_alike(fn, backend, device)


def test_under_autocast(backend, device):
    """`addmm_` casts nothing there, unlike `addmm`, whose values it had."""

    def fn(x, z, s, rows, mask):
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            y = x @ torch.ones(4, 4, device=x.device)
            y[rows] = z.bfloat16()
            y[0].add_(z.bfloat16())
            y[1] = z
        return [y.float() * x]

    def product(x, z, s, rows, mask):
        y = x * 2
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            y[:2].addmm_(x[:2] / 3, x)
        return [y * 2]

    assert one_region_each_way(trains_alike(fn, backend, device))
    assert explain(trains_alike(product, backend, device)).outside


def _view_before(y, z, rows):
    part, flat = y[0], y.view(-1)
    y[rows] = z
    return part, flat.neg()


def _read_between(y, z, rows):
    before = y * 3
    y[0] = z
    between = y[0] + y[1]
    y[1] = z * 2
    return before, between, y


def _part_and_whole(y, z, rows):
    part = y[1:]
    part[0].mul_(z)
    y.t()[0] = z
    return part * 2, y


def _result_of_write(y, z, rows):
    return y[0].add_(z) * 2, y.index_put_((rows,), z)


def _whole_and_part(y, z, rows):
    part = y.t()[:2]
    y.mul_(z)
    y += 1
    return part * 2, y


def _other_name(y, z, rows):
    """`contiguous` returns the tensor itself. Its gradient was wrong."""
    same = y.contiguous()
    same[0] = z
    return same * 2, y * 3


@pytest.mark.parametrize(
    "write", [_view_before, _read_between, _part_and_whole, _result_of_write, _whole_and_part, _other_name]
)
@pytest.mark.nightly_after(3)
def test_names_of_what_is_written(backend, device, write):
    """Views are made once more, of the copy."""

    def fn(x, z, s, rows, mask):
        return write(x * 2, z, rows)

    assert one_region_each_way(trains_alike(fn, backend, device))


def test_a_name_that_is_not_made_once_more(backend, device):
    """The write stays in place then, and Inductor gets it."""

    def fn(x, z, s, rows, mask):
        y = x * 2
        other = y.detach()
        y[0] = z
        return y * 2, other * x

    assert "setitem" in {part.operator for part in explain(trains_alike(fn, backend, device)).outside}


def test_memory_that_is_also_written_without_a_gradient(backend, device):
    """All of it is written in place: a view that Thunder returned would raise."""

    def fn(x, z, s, rows, mask):
        y = torch.zeros(4, 4, device=x.device)
        y[1] = x[1]
        part = y[None, 0]
        y.detach()[0] = 2.0
        return y * x, part * 3

    trains_alike(fn, backend, device)


def test_an_element_for_each_that_a_mask_selects(backend, device):
    """How many there are is read on the host: never in a graph."""

    def fn(x, z, s, rows, mask):
        y = x * 2
        y[mask[:, 0]] = z
        return [y * x]

    def call(call, count):
        given = arguments(count, device)
        z = torch.randn(count, 4, device=device, requires_grad=True)
        mask = torch.arange(4, device=device)[:, None].expand(4, 4) < count
        loss = sum(each.square().sum() for each in call(given["x"], z, given["s"], given["rows"], mask))
        loss.backward()
        return loss.detach(), given["x"].grad, z.grad

    graphed = thunderfx(fn, backend=backend)
    for count in (2, 2, 2, 2, 3, 3, 3, 4):
        torch.manual_seed(count)
        found = call(graphed, count)
        torch.manual_seed(count)
        same(found, call(fn, count))
    assert {part.operator for part in explain(graphed).outside} == {"setitem"}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.nightly_after(1)
def test_sizes_that_vary(backend, device, dynamic):
    def fn(x, z, s, rows, mask):
        y = x * 2
        y[mask] = s
        y[rows] = z
        y[: x.shape[0] // 2] += z
        y[[0, -1]] = z
        y.diagonal().mul_(z)
        return [y * x]

    graphed = thunderfx(fn, backend=backend, dynamic=dynamic)
    for size in (4, 4, 4, 6, 6, 6, 9, 9, 5, 5, 6):
        same(outcome(graphed, size, device, size), outcome(fn, size, device, size))
    assert not explain(graphed).outside


def test_two_calls_before_their_backwards(backend, device):
    def fn(x, z, s, rows, mask):
        y = x * 2
        y[rows] = z
        y[0] *= z
        return [y * x]

    def twice(call):
        one, other = arguments(1, device), arguments(2, device)
        other["z"] = one["z"]
        losses = [sum(each.square().sum() for each in call(**given)) for given in (one, other)]
        for loss in losses:
            loss.backward()
        return *map(torch.detach, losses), one["x"].grad, other["x"].grad, one["z"].grad

    graphed = thunderfx(fn, backend=backend)
    for _ in range(4):
        same(twice(graphed), twice(fn))


def test_in_a_checkpointed_function(backend, device):
    def inner(x, z):
        y = x * 2
        y[0] = z
        y[torch.arange(2, device=x.device)] += z
        y.diagonal().mul_(z)
        return y * x

    def fn(x, z, s, rows, mask):
        return [checkpoint(inner, x, z, use_reentrant=False)]

    assert one_region_each_way(trains_alike(fn, backend, device))


def test_a_leaf_is_not_written(backend, device):
    def fn(x, z, s, rows, mask):
        x[0] = z
        return [x * 2]

    graphed = thunderfx(fn, backend=backend)
    for each in (fn, graphed):
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            outcome(each, 0, device)
