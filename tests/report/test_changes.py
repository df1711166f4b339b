"""Why nothing was replayed: each cause has a line in the report with a fix that works, a warning, and strict=True."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import thunder
import torch
from torch import nn

from thunder_cg import CaptureError, explain, thunderfx
from thunder_cg.report import ChangeReport
from thunder_cg.report.opening import _fewer_of_one
from thunder_cg.runtime.changes import FEW, IF_CACHE, CallChange, Changes, for_numbers, for_shapes


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor, k: Any) -> torch.Tensor:
        return torch.tanh(x * k["by"] + self.step)


class Buffered(Scaled):
    def __init__(self) -> None:
        super().__init__()
        del self.step
        self.register_buffer("step", torch.tensor(0.0))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)


def run(jitted: Any, calls: Iterable[Callable[[], object]]) -> int:
    """How many of the calls raised a `CaptureError`."""
    raised = 0
    for call in calls:
        try:
            call()
        except CaptureError:
            raised += 1
    return raised


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "thunder_cg")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("thunder_cg")]


def only_change(jitted: Any) -> ChangeReport:
    report = explain(jitted)
    (found,) = report.changes
    text, page = " ".join(str(report).split()), report._repr_html_()
    said = [f"{found.function}: {found.problem}; {found.cost}; {fix}" for fix in (found.fix, "as above, ")]
    assert found.fix in text and any(line in text or line in page for line in said)
    assert "nothing to change" not in str(report)
    return found


@pytest.mark.nightly
def test_a_python_number_that_changes(transform, device, warnings):
    x = torch.ones(2, 3, device=device)
    jitted = thunder.jit(Scaled().to(device), transforms=[transform(strict=True)])
    raised = run(jitted, [lambda i=i: jitted(x, {"by": i + 0.5}) for i in range(FEW + 2)])
    found = only_change(jitted)
    assert raised == 2 and (found.kind, found.names, found.values) == ("number", ("k['by']",), FEW + 2)
    assert found.problem == f"{FEW + 2} values of the Python number k['by'] so far (0.5, 1.5, 2.5, ...)"
    (warning,) = warnings()
    assert warning.startswith("Scaled, forward: 7 values of the Python number k['by'] so far") and found.fix in warning
    assert "0-dim tensor" in found.fix
    second = str(explain(jitted)).splitlines()[1]
    assert second.endswith("with inputs of the same shapes, strides and Python numbers will capture")
    mended = thunder.jit(Scaled().to(device), transforms=[transform(strict=True)])
    for i in range(4):
        mended(x, {"by": torch.tensor(i + 0.5, device=device)})
    assert not explain(mended).changes and "2 of 4 calls replayed" in str(explain(mended))


@pytest.mark.parametrize("values", [[f"u{i}" for i in range(4)], [torch.half, torch.float, torch.double, torch.bool]])
def test_what_is_no_tensor_and_no_number_and_changes(transform, device, values):
    """As the name of what a batch has, beside its tensors. Thunder checks what a call passes on."""

    class Named(nn.Module):
        def forward(self, x: torch.Tensor, batch: Any) -> tuple[torch.Tensor, Any]:
            return torch.tanh(x * 2), batch.get("name")

    x = torch.ones(2, 3, device=device)
    jitted = thunder.jit(Named(), transforms=[transform()])
    for value in values:
        jitted(x, {"name": value})
    found = only_change(jitted)
    assert (found.kind, found.names, found.values) == ("constant", ("batch['name']",), 4)
    assert found.problem.startswith(f"4 values of batch['name'] so far ({values[0]!r}, {values[1]!r}, ")
    assert str(explain(jitted)).splitlines()[1].endswith("same shapes, strides and other arguments will capture")
    assert "leave it out of what is compiled" in found.fix
    mended = thunder.jit(Named(), transforms=[transform()])
    for _ in values:
        mended(x, {})
    assert not explain(mended).changes and "2 of 4 calls replayed" in str(explain(mended))


def test_a_number_that_the_module_has(transform, device, warnings):
    x, model = torch.ones(2, 3, device=device), Scaled()
    jitted = thunder.jit(model, transforms=[transform()])
    for _ in range(3):
        jitted(x, {"by": 2})
        model.step += 1
    found = only_change(jitted)
    assert (found.kind, found.names, found.values) == ("attribute", ("self.step",), 3) and not warnings()
    assert "register_buffer" in found.fix and "in place" in found.fix
    model = Buffered().to(device)
    mended = thunder.jit(model, transforms=[transform()])
    for i in range(4):
        torch.testing.assert_close(mended(x, {"by": 2}), torch.tanh(x * 2 + i))
        model.step.add_(1)
    assert not explain(mended).changes and "2 of 4 calls replayed" in str(explain(mended))


def test_strides_and_graphs_that_are_dropped_for_others(transform, device, warnings):
    inputs = [torch.ones(2, 4 + i, device=device)[:, :4] for i in range(10)]
    jitted = thunder.jit(layers().to(device), transforms=[transform()])
    for _ in range(3):
        for x in inputs:
            jitted(x)
    strides, dropped = explain(jitted).changes
    assert (strides.kind, strides.values, strides.fix) == ("strides", 10, "pass input.contiguous()")
    assert (dropped.kind, dropped.names, dropped.times) == ("dropped", ("max_recordings=8",), 10)
    assert "calls come with 10 layouts in turn" in dropped.cost and "raise max_recordings to 10" in dropped.fix
    said = str(explain(jitted))
    assert "10 warm-ups; 20 captures" in said and "strides (4, 1) or (5, 1) or (6, 1) or (7, 1) or 6 more" in said
    first, second = warnings()
    assert strides.fix in first and "max_recordings=8 had dropped them" in second
    contiguous: list[torch.Tensor] = [x.contiguous() for x in inputs]
    for fixed, options, replays in ((contiguous, {}, 28), (inputs, {"max_recordings": 10}, 10)):
        mended = thunder.jit(layers().to(device), transforms=[transform(**options)])
        for _ in range(3):
            for x in fixed:
                mended(x)
        assert str(explain(mended)).startswith(f"CUDA graphs: {replays} of 30 calls replayed")


def test_strict_and_graphs_that_are_dropped(transform, device):
    jitted = thunder.jit(layers().to(device), transforms=[transform(strict=True, max_recordings=1)])
    a = torch.ones(2, 4, device=device)
    b = torch.ones(4, 2, device=device).t()
    assert run(jitted, [lambda x=x: jitted(x) for x in (a, b, a, b, b)]) == 0
    for _ in range(2):
        with pytest.raises(
            CaptureError, match=r"max_recordings=1 had dropped them for others; .*max_recordings to 2, or drop strict="
        ):
            jitted(a)
    jitted(b)
    assert "2 of 8 calls replayed" in str(explain(jitted)) and "2 x strict=True raised" in str(explain(jitted))


def test_alignment_and_parameters_that_move(transform, device):
    jitted = thunder.jit(layers().to(device), transforms=[transform()])
    memory = torch.ones(64, device=device)
    for i in (0, 0, 0, 1, 1, 4):
        jitted(memory[i : i + 8].view(2, 4))
    found = only_change(jitted)
    assert (found.kind, found.values) == ("alignment", 2) and "input so far (0, 4 bytes past a" in found.problem
    model = layers().to(device)
    jitted = thunder.jit(model, transforms=[transform()])
    for _ in range(4):
        for p in model.parameters():
            p.data = p.data.clone()
        jitted(torch.ones(2, 4, device=device))
    found = only_change(jitted)
    assert (found.kind, found.names, found.times) == ("moved", ("0.weight", "0.bias"), 2) and "copy_" in found.fix


def test_parameters_that_move_under_dynamo_have_the_users_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
    compiled = thunderfx(model, backend="tape")
    for _ in range(4):
        model[0].weight = nn.Parameter(model[0].weight.clone(), requires_grad=False)
        compiled(torch.ones(2, 4))
    found = only_change(compiled)
    assert (found.kind, found.names) == ("moved", ("self.0.weight",))
    assert found.fix.startswith("if several modules run this code in turn, as layers do, ") and "copy_" in found.fix


def test_many_shapes_warn_once(transform, device, warnings):
    jitted = thunder.jit(lambda x: torch.tanh(x) * 2, transforms=[transform()])
    for rows in range(1, FEW + 4):
        jitted(torch.ones(rows, 2, device=device))
    (warning,) = warnings()
    assert (
        "7 shapes of x so far ((1, 2), (2, 2), (3, 2), ...)" in warning
        and "; if only the last batch differs, drop_last=True; if it is a cache that grows" in warning
        and "cache_implementation=" in warning
    )


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([[(2, 3, side, side) for side in (8, 9, 10)]], set()),
        ([[(rows, 4) for rows in (32, 17)], [(rows,) for rows in (32, 17)]], {"drop_last=True"}),
        ([[(1, 2, length, 4) for length in (5, 6, 7)], [(1, length) for length in (5, 6, 7)]], {"a cache that grows"}),
        ([[(4, length) for length in (12, 7, 30)]], set()),
        ([[(2, 4), (3, 4)]], {"drop_last=True", "a cache that grows"}),
    ],
)
def test_advice_for_shapes_goes_by_which_sizes_differ(tensors, expected):
    advice = for_shapes(*tensors)
    assert {each for each in ("drop_last=True", "a cache that grows") if each in advice} == expected
    assert "layers that mix positions" in advice and "nothing has to change: each pays once" in advice


def test_sizes_that_follow_from_a_graph_break_have_its_advice_once():
    def picks(x: torch.Tensor) -> torch.Tensor:
        rows = torch.sin(x)[x[:, 0] > 0].tanh() * 2
        torch._dynamo.graph_break()
        return rows.sin() * 2

    compiled = thunderfx(picks, backend="tape")
    with torch.no_grad():
        for rows in (3, 5, 7, 4):
            compiled(torch.where(torch.arange(8) < rows, 1.0, -1.0).view(8, 1))
    report = explain(compiled)
    said, after = str(report), "change what ends the graph before it, as said above"
    assert {change.fix for change in report.changes} == {after} and len(report.changes) > 1
    assert said.count(after) == 1 and said.count("; as above") == len(report.changes) - 1
    assert "dynamo.py:" not in said and "pad to a few sizes" not in said and "explain(fn) names" not in said
    assert "To have fewer: change what ends the graph there, as said below.\n" in said


def test_shapes_under_dynamo(warnings):
    """Dynamo hands over a size that varies as a number of its own, which the user does not know."""
    compiled = thunderfx(lambda x: torch.tanh(x) * 2, backend="tape")
    for rows in range(2, 5):
        compiled(torch.ones(rows, 2))
    found = only_change(compiled)
    assert (found.kind, found.names, found.values) == ("shape", ("x",), 2) and not warnings()


def test_keywords_under_dynamo_have_the_callers_names():
    """Decorators, such as those of Transformers, take them as ``kwargs``."""
    fn = lambda *args, **kwargs: torch.tanh(kwargs["pixels"]).sin()  # noqa: E731
    compiled = thunderfx(fn, backend="tape")
    compiled(pixels=torch.ones(2, 3))
    assert "  for pixels float32 (2, 3)" in str(explain(compiled))


def test_numbers_have_the_names_of_the_users_code(transform, device):
    k = 0

    def scaled(x: list[torch.Tensor], *others: int, **options: Any) -> torch.Tensor:
        return torch.tanh(x[0] * k + others[0]) * options["by"]

    jitted = thunder.jit(scaled, transforms=[transform()])
    for k in range(2):
        jitted([torch.ones(2 + k, device=device)], k, by=k)
    number, shape = explain(jitted).changes
    assert (number.names, shape.names) == (("others[0]", "by", "k"), ("x[0]",))
    assert number.problem.startswith("2 values of the Python numbers others[0] and 2 more so far (0, 1)")
    assert number.fix.startswith("pass others[0] and 2 more as 0-dim tensors on the device")


def test_numbers_of_a_list_are_one_cause_and_of_an_argument_is_no_buffer(transform, device):
    def scaled(x: torch.Tensor, sizes: list[int], batch: Any) -> torch.Tensor:
        return torch.tanh(x * sizes[0] + sizes[1]) * batch.scale

    jitted = thunder.jit(scaled, transforms=[transform()])
    for sizes, scale in (([1, 2], 1.0), ([3, 2], 1.0), ([3, 4], 1.0), ([3, 4], 2.0)):
        jitted(torch.ones(2, device=device), sizes, SimpleNamespace(scale=scale))
    numbers, argument = explain(jitted).changes
    assert (numbers.names, numbers.values) == (("sizes[0]", "sizes[1]"), 3)
    assert argument.names == ("batch.scale",) and argument.fix.startswith("pass batch.scale as a 0-dim tensor")


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([1, 2], "; if it bounds a slice, "),
        ([0.1, 0.5], "; if it is the p of a dropout"),
        ([0.5, 1.5], ""),
        ([1, 0.5], ""),
    ],
)
def test_what_to_do_about_a_number_goes_by_its_values(numbers, said) -> None:
    assert for_numbers(numbers).startswith(said) and bool(for_numbers(numbers)) == bool(said)
    assert ("if the length changes, compute with all elements" in for_numbers(numbers)) == ("slice" in said)


def test_the_length_of_a_static_cache_is_no_tensor() -> None:
    """A cache of Transformers is as long as its prompt and what is to come."""
    change = CallChange(
        "number",
        ("cache.layers[0].max_cache_len", "cache.layers[1].max_cache_len"),
        dict.fromkeys([(18, 18), (22, 22)]),
    )
    assert change.problem == "2 lengths of a static cache, cache.layers[0].max_cache_len, so far (18, 22)"
    assert change.fix.startswith("have generate make all caches as long: give it max_length=")


def test_of_shapes_that_grow_a_cache_comes_first() -> None:
    grows = for_shapes([(1, 4, 1, 8), (1, 4, 2, 8), (1, 4, 3, 8)])
    assert grows.startswith(f"{IF_CACHE}; else pad to a few sizes")
    assert IF_CACHE not in for_shapes([(1, 4), (1, 7), (1, 3)])


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("n == 0", "pass n as a 0-dim tensor; if it bounds a slice, "),
        ("self.p == 0.25", "if calls change self.p, make it a tensor, and write it in place; if it is the p of a"),
        ("self.keys is None", "make self.keys before the first call; if it is a cache"),
        ("tensor 'x' requires_grad mismatch. expected requires_grad=0", "inputs with a gradient and those without"),
        ("name == 'l1'", "keep it to a few values"),
        ("cache.layers[0].max_cache_len == 18", "have generate make all caches as long"),
    ],
)
def test_what_to_do_about_a_condition_of_dynamos(condition, said) -> None:
    assert _fewer_of_one("f (train.py:3)", condition).startswith(said)


def test_a_version_that_reads_other_items_of_a_list():
    change = Changes().add_between("number", {"sizes[0]": 1}, {"sizes[0]": 2, "sizes[1]": 3})
    assert change is not None and [*change.values] == [(1,), (2,)]
