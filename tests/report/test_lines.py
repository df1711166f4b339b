"""What is not in a graph stands below its line of source, with what would change it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import thunder
import torch
from support import run_what_inductor_gets

from thunder_cg import cudagraph_transform, explain, thunderfx
from thunder_cg.report import GraphBreak, Outside, Report, lines


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run_what_inductor_gets(monkeypatch)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_one_line_with_several_causes_is_one_entry_and_says_a_fix_once(report: Report) -> None:
    (cause,) = report.causes
    breaks = (
        GraphBreak("Net, graph 0", "model.py:14, called from train.py:7", cause.source, "a branch", cause.fix),
        GraphBreak("Net, graph 2", "model.py:14, called from train.py:7", cause.source, "a branch", cause.fix),
        GraphBreak("Net, graph 1", None, None, "a line that nobody knows", ""),
    )
    norm = replace(cause, name="torch.norm", eager_ops=9, added_regions=0, detail="it waits", fix="call vector_norm")
    alone = replace(norm, place="near model.py:20", source=None, added_regions=4, microseconds=None)
    backward = replace(cause, name="norm_vjp", place="near model.py:14", eager_ops=1, added_regions=0)
    outside = tuple(
        Outside("Net, graph 0", name, line, "Thunder has no such operator", 2, "cut into 2 pieces", source, apart)
        for name, line, source, apart in (
            ("sinc", "model.py:14", cause.source, ""),
            ("argwhere", "model.py:30", "x.argwhere()", "its size is unknown"),
        )
    )
    summed = replace(backward, name="torch.add", place="in a sum of gradients near model.py:14")
    found = replace(report, causes=(cause, norm, alone, backward, summed), breaks=breaks, outside=outside)
    assert [*lines.by_line(found)] == [
        lines.HEADING,
        "  near model.py:20",
        "      torch.norm makes 9 ops eager, adds 4 regions: data-dependent",
        "        why: it waits",
        "        to change it: call vector_norm",
        "  model.py:14: if x.item() < 0:",
        "      Tensor.item makes 2 ops eager, adds 1 region: data-dependent",
        "        why: the host waits for <f51>",
        "        to change it: keep it in a tensor",
        "      graph break x2 after Net, graph 0, and 1 more, called from train.py:7: a branch",
        "        to change it: as above",
        "      sinc x2 of Net, graph 0, is left to Inductor: Thunder has no such operator",
        "      torch.norm makes 9 ops eager: data-dependent",
        "        why: it waits",
        "        to change it: call vector_norm",
        "      norm_vjp makes 1 op eager: data-dependent",
        "        why: as above",
        "        to change it: as above",
        "      torch.add in a sum of gradients makes 1 op eager: data-dependent",
        "        why: as above",
        "        to change it: as above",
        "  a line unknown to Dynamo",
        "      graph break after Net, graph 1: a line that nobody knows",
        "  model.py:30: x.argwhere()",
        "      argwhere x2 of Net, graph 0, is left to Inductor: Thunder has no such operator",
        "        why: its piece is in no graph: its size is unknown",
        "Net, graph 0, is cut into 2 pieces",
    ]
    measured = replace(found, causes=(replace(cause, microseconds=3.0), norm, alone))
    assert [*lines.by_line(measured)][1] == "  model.py:14: if x.item() < 0:", "time comes first where it is known"
    assert [*lines.by_line(Report(report.traces))] == []


def test_many_lines_say_a_long_fix_once_and_the_last_ones_are_counted(report: Report) -> None:
    long, short = "keep the value on the device " * 4, "keep it"
    (cause,) = report.causes
    many = tuple(
        replace(
            cause,
            place=f"at model.py:{i}",
            detail=f"{long}, as it waits",
            fix=short if i == 2 else long,
            added_regions=99 - i,
        )
        for i in range(1, 40)
    )
    first, *said = lines.by_line(Report(report.traces, causes=many))
    assert first == lines.HEADING and said[3] == f"        to change it: {long}"
    assert said[7] == f"        to change it: {short}" and said[11] == "        to change it: as for model.py:1"
    assert said[2] == f"        why: {long}, as it waits" and said[10] == "        why: as for model.py:1"
    assert len(said) == 30 * 4 + 1 and said[-1] == "  9 more lines: see explain(fn).causes, .breaks and .outside"


def test_a_norm_an_item_and_a_branch_in_one_line_are_one_entry() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x) * 2
        x = x + 1 if torch.norm(x, "nuc").item() > 1 else x
        return torch.relu(x) * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # so that the item is in the trace
        compiled = thunderfx(checked, backend="tape")
        compiled(torch.ones(2, 4))
    report = explain(compiled)
    line = f"test_lines.py:{checked.__code__.co_firstlineno + 2}"
    said = str(report).split("\n\n")[0].splitlines()
    start = said.index(f'  {line}: x = x + 1 if torch.norm(x, "nuc").item() > 1 else x')
    entry = [*itertools.takewhile(lambda text: text.startswith("      "), said[start + 1 :])]
    starts = [text.split()[0] for text in entry if not text.startswith("        ")]
    assert starts == ["graph", "gt", "torch.norm", "Tensor.item"], entry
    assert sum(text.startswith(f"  {line}") for text in said) == 1 and said[start - 1] == lines.HEADING


def test_what_has_nothing_to_gain_is_one_line() -> None:
    def masked(x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        rows = x[mask]
        return rows.sum()

    def read(x: torch.Tensor) -> torch.Tensor:
        print(x.sum())
        return torch.relu(x) * 2

    for function in (masked, read):
        torch._dynamo.reset()
        compiled = thunderfx(function, backend="tape")
        compiled(torch.ones(4))
        said = [*lines.by_line(explain(compiled))]
        small = f"  test_lines.py:{function.__code__.co_firstlineno + 1}"
        end = ": 1 op eager, in too small a region to gain; nothing has to change"
        small += f", and 1 more: 2 ops{end[6:]}" if function is masked else end
        assert said[0] == lines.HEADING and said[-1] == small, said
        assert not any("nothing to gain" in each for each in said) and sum("graph break" in each for each in said) == 1


def arithmetic(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.relu(x) * x.sum().item()) * 2


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 if (torch.relu(x) * 2).sum().item() > 1 else x


def returned(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    return torch.relu(x) * 2, x.sum().item()


@pytest.mark.parametrize("function", [arithmetic, branches, returned])
@pytest.mark.nightly_after(1)
def test_with_scalar_outputs_captured_a_number_is_outside_of_graphs_all_the_same(
    function: Callable[..., object],
) -> None:
    """As the advice for the graph break says, which Dynamo's own warning contradicts."""
    x = torch.ones(4)
    compiled = thunderfx(function, backend="tape")
    compiled(x)
    assert "capture_scalar_outputs spares the graph break at such a read, and no more" in str(explain(compiled))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        again = thunderfx(function, backend="tape")
        torch.testing.assert_close(again(x), function(x), rtol=0, atol=0)
    report = explain(again)
    assert "capture_scalar_outputs" not in str(report) and "Sym" not in str(report), "what the user has not written"
    assert "Tensor.item" in {cause.name for cause in report.causes} and report.outside
    assert {part.reason for part in report.breaks} == (
        {"a branch on what a tensor holds"} if function is branches else set()
    )


def test_a_comparison_after_a_graph_break_has_a_line() -> None:
    """Thunder has none, and no op of the graph has one."""

    def compares(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x) * 2
        torch._dynamo.graph_break()
        return x > 0

    compiled = thunderfx(compares, backend="tape")
    compiled(torch.ones(2))
    (cause,) = explain(compiled).causes
    line = f"near test_lines.py:{compares.__code__.co_firstlineno + 3}"
    assert (cause.name, cause.place, cause.source) == ("torch.gt", line, "return x > 0")


def test_a_number_that_changes_is_named_and_the_advice_helps() -> None:
    """Dynamo passes it as a tensor and reads that with an item, which is not in the user's code."""

    def scales(x: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.relu(x) * factor) * 2

    compiled, x = thunderfx(scales, backend="tape"), torch.ones(2)
    for i in range(3):
        compiled(x, i + 0.5)
    (cause,) = explain(compiled).causes
    assert (cause.detail.partition(",")[0], cause.fix.partition(";")[0]) == (
        "'factor' is a Python number that changes from call to call",
        "pass factor as a 0-dim tensor on the device",
    )
    torch._dynamo.reset()
    compiled = thunderfx(scales, backend="tape")
    for i in range(3):
        compiled(x, torch.tensor(i + 0.5))
    (trace,) = explain(compiled).traces
    assert trace.replays == 1 and trace.counts["eager"] == 0


def test_an_argument_that_is_called_as_dynamo_would_is_none_of_dynamos() -> None:
    read = torch.Tensor.item

    def scaled(x: torch.Tensor, l_scale: torch.Tensor, g_shift_: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.relu(x) * read(l_scale)) + g_shift_

    jitted = thunder.jit(scaled, transforms=[cudagraph_transform(backend="tape")])
    jitted(torch.ones(2), torch.tensor(2.0, dtype=torch.float64), torch.ones(2))
    (cause,), (trace,) = explain(jitted).causes, explain(jitted).traces
    assert cause.reason == "depends on what tensors hold" and "_dynamo" not in cause.fix, cause
    assert [each.name for each in trace.inputs] == ["x", "l_scale", "g_shift_"]


def test_a_number_of_the_module_that_changes_is_named() -> None:
    class Scales(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.relu(x) * self.factor) * 2

    module = Scales()
    compiled = thunderfx(module, backend="tape")
    for i in range(3):
        module.factor = i + 0.5
        compiled(torch.ones(2))
    (cause,) = explain(compiled).causes
    assert cause.detail.startswith("'self.factor' is a Python number that changes from call to call")
    assert cause.fix.startswith("make self.factor a 0-dim tensor with register_buffer")


def test_an_op_in_a_module_of_pytorchs_has_the_name_of_the_module() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.act = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.GELU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(x)
            x = self.act(x.sin())
            return self.down(x)

    denied = ["torch.nn.functional.linear", "torch.nn.functional.gelu"]
    transform = cudagraph_transform(backend="tape", deny=denied)
    compiled = thunder.jit(Net().requires_grad_(False), transforms=[transform])
    compiled(torch.ones(2, 2))
    first = Net.forward.__code__.co_firstlineno
    assert {each.place: each.source for each in explain(compiled).causes} == {
        f"at self.up (test_lines.py:{first + 1})": "x = self.up(x)",
        f"at test_lines.py:{first + 2}": "x = self.act(x.sin())",
        f"at self.down (test_lines.py:{first + 3})": "return self.down(x)",
    }


def test_an_op_of_a_backward_has_the_line_and_the_module_of_the_op_that_it_differentiates() -> None:
    """Thunder has no line for it, and a derivative of its own for a number that is read from a tensor."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.softplus(self.up(x))
            return x / x.detach().amax().item()

    compiled = thunder.jit(Net(), transforms=[cudagraph_transform(backend="tape")])
    compiled(torch.ones(2, 2)).sum().backward()
    forward, backward = explain(compiled).traces
    line = Net.forward.__code__.co_firstlineno
    of_linear, others = f"self.up.1 (test_lines.py:{line + 1})", f"test_lines.py:{line + 1}"
    lines = {name: {op.line for op in backward.ops if op.name == name} for name in ("torch.exp", "torch.matmul")}
    assert lines["torch.exp"] == {others} and of_linear in lines["torch.matmul"]
    assert not any(str(op.line).startswith("near ") for op in backward.ops if op.verdict != "bookkeeping")
    assert [op.name for op in forward.ops if op.line == f"test_lines.py:{line + 2}"][-1] == "torch.div"


def test_a_module_of_pytorchs_is_known_to_a_backward_that_does_not_get_its_parameters() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (torch.nn.Linear(2, 2, device="meta") for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x))

    compiled = thunder.jit(Net(), transforms=[cudagraph_transform(backend="tape")])
    compiled(torch.ones(2, 2, device="meta")).sum().backward()
    backward = explain(compiled).traces[1]
    assert any(op.detail.startswith("the result of torch.nn.functional.linear at self.up (") for op in backward.ops)


def test_a_sum_of_gradients_is_called_so(backend: str, device: str) -> None:
    def used_twice(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return (y * torch.cos(y)).exp()

    jitted = thunder.jit(used_twice, transforms=[cudagraph_transform(backend=backend, deny=["torch.add"])])
    jitted(torch.ones(3, device=device, requires_grad=True)).sum().backward()
    (cause,) = explain(jitted).causes
    line = f"test_lines.py:{used_twice.__code__.co_firstlineno + 2}"
    assert (cause.name, cause.place) == ("torch.add", f"in a sum of gradients near {line}")
