from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from html import escape
from typing import Any

import pytest
import thunder
import torch
from thunder.core.interpreter import InterpreterError, ProvenanceRecord, PseudoInst
from torch import nn
from torch.nn.functional import one_hot
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

from thunder_cg import cudagraph_transform, explain, plan, thunderfx
from thunder_cg.analysis.compile_errors import to_try
from thunder_cg.analysis.sources import described
from thunder_cg.report import Report, opening
from thunder_cg.runtime.cuda.graph import CudaGraph
from thunder_cg.runtime.tape import TapeGraph
from thunder_cg.transform import CudagraphTransform


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            return torch.relu(x) * 2
        return x * 2 if x.sum() > 0 else x


def test_empty_report_says_what_to_do() -> None:
    assert "first call" in str(Report(()))


def test_first_lines_answer_how_much_and_why_not(report: Report) -> None:
    assert str(report).splitlines()[:7] == [
        "CUDA graphs: 2 of 5 calls replayed; 2 regions with 2 of 4 ops; 2 ops eager",
        "Not replayed: 1 warm-up; 1 capture; 1 x strides changed",
        "What is not in a graph, by line of source, the most expensive first:",
        "  model.py:14: if x.item() < 0:",
        "      Tensor.item makes 2 ops eager, adds 1 region: data-dependent",
        "        why: the host waits for <f51>",
        "        to change it: keep it in a tensor",
    ]


def test_headline_says_what_ran(backend, device) -> None:
    """Not what was planned: of a model that never replays, the reason comes first."""
    graphs = cudagraph_transform(backend=backend)
    model = thunder.jit(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device), transforms=[graphs])

    def lines() -> list[str]:
        return str(explain(model)).splitlines()[:2]

    x = torch.randn(2, 4, device=device, requires_grad=True)
    assert lines() == [opening.NOTHING_COMPILED]
    model(x).sum().backward()
    said = "2 regions with 21 of 21 ops; 0 ops eager"
    assert lines() == [
        f"CUDA graphs: 0 of 1 call and 0 of 1 backward replayed; {said}",
        "Not replayed: 2 warm-ups; the next call with inputs of the same shapes and strides will capture",
    ]
    for _ in range(4):
        model(x).sum().backward()
    assert lines() == [
        f"CUDA graphs: 3 of 5 calls and 3 of 5 backwards replayed; {said}",
        "Not replayed: 2 warm-ups; 2 captures",
    ]
    assert str(explain(model)).splitlines()[2].endswith("there is nothing to change.")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        model(x).sum().backward()
    assert lines()[1].startswith("Not replayed: 2 warm-ups; 2 captures; 1 x saved-tensor hooks are active")
    assert lines()[1] in explain(model)._repr_html_() and "nothing to change" not in str(explain(model))


def test_a_name_that_no_operator_has_is_something_to_change(transform, device) -> None:
    compiled = thunder.jit(lambda x: torch.tanh(x) * 2, transforms=[transform(deny=["torch.sin"])])
    for _ in range(3):
        compiled(torch.ones(2, device=device))
    said = str(explain(compiled))
    assert "1 of 3 calls replayed" in said and "deny= names 'torch.sin', and no operator" in said
    assert "nothing to change" not in said


def test_a_call_whose_replay_raises_is_counted(backend, device, transform, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fast paths, in Thunder's dispatch, in a backward, and in the first replay of a capture."""
    raises: list[int] = []  # which replays from now on do
    graph = TapeGraph if backend == "tape" else CudaGraph
    replay = graph.replay

    def faulty(*args: Any) -> None:
        raises[:] = [number - 1 for number in raises]
        if -1 in raises:
            raise IndexError("out of range")
        replay(*args)

    def step(fn: Any, *numbers: int) -> None:
        raises[:] = numbers
        with pytest.raises(IndexError) if numbers else nullcontext():
            y = fn(x)
            if y.requires_grad:
                y.sum().backward()

    monkeypatch.setattr(graph, "replay", faulty)
    x, layer = torch.randn(2, 4, device=device), nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    forward = lambda x: torch.sin(torch.cos(x))  # noqa: E731
    inference, training = copy.deepcopy(layer).requires_grad_(False), layer
    for fn, numbers, calls, why in (
        (forward, [(), (0,), (), (), (0,), ()], "2 of 6 calls", "1 warm-up; 1 capture; 2 x"),
        (inference, [(), (), (), (0,), ()], "2 of 5 calls", "1 warm-up; 1 capture; 1 x"),
        (training, [(), (), (), (0,), (1,), ()], "3 of 6 calls and 2 of 5 backwards", "2 warm-ups; 2 captures; 2 x"),
    ):
        compiled = thunder.jit(fn, transforms=[transform()])
        for number in numbers:
            step(compiled, *number)
        first, second, *rest = str(explain(compiled)).splitlines()
        assert first.startswith(f"CUDA graphs: {calls} replayed; ")
        assert second == f"Not replayed: {why} the replay raised an error"
        assert "nothing to change" not in rest[0]


def test_a_function_that_thunder_cannot_compile(backend, device) -> None:
    """A module's report has what Thunder raised and where, and only the advice that is for it."""

    model = thunder.jit(Branches(), transforms=[cudagraph_transform(backend=backend)])
    for _ in range(2):
        with pytest.raises(NotImplementedError):
            model(torch.ones(3, device=device))
    said = str(explain(model))
    line = Branches.forward.__code__.co_firstlineno + 3
    assert said.startswith(
        "Nothing is compiled. Thunder raised while it compiled, in 2 of 2 calls: NotImplementedError at "
        f"test_opening.py:{line}: casting a TensorProxy to a Python boolean is not supported"
    )
    assert "To try: for a branch on what a tensor holds" in said and "thunderfx" in said and "torch.library" not in said
    assert escape(said) in explain(model)._repr_html_()
    model(torch.ones(3, 3, device=device))  # what compiles does not hide what does not
    for said in (str(explain(model)), explain(model)._repr_html_()):
        assert "Thunder raised while it compiled, in 2 of 3 calls: NotImplementedError at test_opening.py:" in said
        assert "0 of 1 call replayed" in said


def test_what_thunder_raises_of_a_function_has_a_note_and_is_in_the_report(transform, device) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    jitted, other = (thunder.jit(branches, transforms=[transform()]) for _ in range(2))
    with pytest.raises(NotImplementedError) as raised:
        jitted(torch.ones(2, device=device))
    problem = f"NotImplementedError at test_opening.py:{branches.__code__.co_firstlineno + 1}: casting a TensorProxy"
    fix = "To try: for a branch on what a tensor holds, or for int(), float()"
    for note in getattr(raised.value, "__notes__", ()):  # Python 3.11
        assert note.startswith(f"Thunder raised this while it compiled {branches.__qualname__}: {problem}")
        assert fix in note
    said = str(explain(jitted))
    assert f"Thunder raised while it compiled, in 1 of 1 call: {problem}" in said and fix in said
    assert str(explain(other)) == opening.NOTHING_COMPILED


def test_what_thunder_raises_of_a_module_has_a_note(transform, device) -> None:
    with pytest.raises(NotImplementedError) as raised:
        thunder.jit(Branches(), transforms=[transform()])(torch.ones(2, device=device))
    line = f"test_opening.py:{Branches.forward.__code__.co_firstlineno + 3}"
    for note in getattr(raised.value, "__notes__", ()):  # Python 3.11
        assert note.startswith(
            f"Thunder raised this while it compiled Branches: NotImplementedError at {line}: casting"
        )
        assert "To try: for a branch on what a tensor holds, or for int(), float()" in note
        assert "of it, choose with torch.where(condition, a, b) if it is a branch; or use thunder_cg.thunderfx" in note


def test_what_others_compile_has_no_note(transform) -> None:
    transform()
    with pytest.raises(NotImplementedError) as raised:
        thunder.jit(lambda x: x if x.sum() > 0 else -x)(torch.ones(2))
    assert not hasattr(raised.value, "__notes__")


def test_an_operator_for_which_thunder_has_no_gradient(backend, device) -> None:
    """Thunder raises in one of its transforms, which has no frame of the user's, but the operator."""

    def transformed(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        return torch.fft.fft(y).real

    x = torch.ones(3, device=device, requires_grad=True)
    said = str(plan(transformed, x, backend=backend))
    line = transformed.__code__.co_firstlineno + 2
    assert f"RuntimeError at test_opening.py:{line}: Failed to find a gradient transform for" in said
    advice = "To try: for an operator without a gradient in Thunder, use thunder_cg.thunderfx, which has PyTorch's"
    assert advice in said
    if device == "cpu":  # on a GPU, Thunder has a gradient of the norm
        assert advice in str(plan(lambda x: torch.sin(x / x.norm()), x.repeat(2, 1), backend=backend))


@pytest.mark.parametrize(
    ("fn", "advice"),
    [
        (lambda x: x * float(x.max()), "for what Python reads from a tensor, leave the read out: operators take a"),
        (lambda x: x * sum(x.tolist()), "for what Python reads from a tensor, Tensor.unbind in the place of tolist()"),
        (lambda x: one_hot(x.long()), "pass num_classes, for which Thunder has no default, to one_hot"),
        (lambda x: x if torch.equal(x, x) else x + 1, "for a branch on what a tensor holds"),
        (
            lambda x: x / x.int().sum().item(),
            "for a number that is read from a tensor, of which Thunder knows no value",
        ),
        (
            lambda x: torch.cat([x, torch.zeros(x.int().sum().item() + 1)]),
            "for a number that is read from a tensor, of which Thunder knows no value",
        ),
        (lambda x: x + x.nonzero().sum(), "for a result whose size depends on what a tensor holds"),
        (lambda x: x + torch.linspace(0, 1, 3), "for a function that Thunder does not know, use thunder_cg.thunderfx"),
        (
            lambda x: pack_padded_sequence(x.view(1, 3, 1), torch.tensor([3]), batch_first=True).data,
            "for a packed sequence, give the layer the padded tensor",
        ),
        (lambda x: x + x.numpy().sum(), "for NumPy in what is compiled, call PyTorch's function for it, with care for"),
        (lambda x: x + x.nothing(), "call the function without Thunder: if that raises too, fix the function"),
    ],
    ids=["float", "tolist", "one_hot", "equal", "item", "size", "nonzero", "linspace", "packed", "numpy", "unknown"],
)
def test_what_to_try_goes_by_what_thunder_raised(fn, advice) -> None:
    said = str(plan(fn, torch.ones(3)))
    assert f"To try: {advice}" in said and " at test_opening.py:" in said and said.count("use thunder_cg.thunderfx") < 2


def test_what_to_try_where_python_looks_into_a_list() -> None:
    """Thunder raises when it has traced the function, so no line is known."""
    said = str(plan(lambda xs: sum(xs), [torch.ones(3), torch.ones(3)]))
    assert "To try: for sum() of a list, torch.func.functional_call, or modules in a list" in said


def test_what_to_try_under_a_mode_whose_hooks_thunder_would_trace(transform, device) -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device).requires_grad_(False),
        torch.ones(2, 4, device=device),
    )
    jitted = thunder.jit(model, transforms=[transform()])
    with pytest.raises(InterpreterError), FlopCounterMode(display=False):
        jitted(x)
    advice = (
        "take the mode off these calls, which never replay under it; count FLOPs of the module that is not compiled"
    )
    assert f"To try: for a FlopCounterMode, {advice}" in str(explain(jitted))
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() == 2 * 2 * 4 * 4
    for _ in range(4):
        jitted(x)
    with FlopCounterMode(display=False):
        jitted(x)
    report = explain(jitted)
    assert sum(trace.replays for trace in report.traces) == 2 and "give a FlopCounterMode the module" in str(report)


def test_what_thunder_says_of_its_own_records_is_left_out() -> None:
    record = ProvenanceRecord(PseudoInst.INPUT_FN, inputs=[])
    said = described(AssertionError(f"trying to set .seen of {record}to object of type list"))
    assert said == "AssertionError: trying to set .seen of a value that it looked up to object of type list"
    assert to_try(said, is_of_dynamo=False).startswith("for an attribute, an item or a global variable that is set")
    said = str(plan(Branches(), torch.ones(3), 2))
    assert "TypeError: Branches.forward() takes 2 positional arguments, but 3 were given" in said


def test_a_function_with_nothing_to_capture(backend) -> None:
    compiled = thunder.jit(lambda x: x.item() + 1, transforms=[cudagraph_transform(backend=backend)])
    for _ in range(3):
        compiled(torch.ones(()))
    said = str(explain(compiled))
    assert said.startswith("CUDA graphs: none, in 3 calls; 0 regions with 0 of 2 ops; 2 ops eager")
    assert "nothing in it is captured; the first lines count its calls" in said


def test_calls_of_a_version_without_regions_count(backend, device) -> None:
    def maybe(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return torch.tanh(x) * 2 if flag else x + 1

    compiled = thunder.jit(maybe, transforms=[cudagraph_transform(backend=backend)])
    for call in range(10):
        compiled(torch.ones(3, device=device), call == 0)
    first, second = str(explain(compiled)).splitlines()[:2]
    assert first.startswith("CUDA graphs: 0 of 10 calls replayed; 1 region with 2 of 3 ops")
    assert "; 9 calls of a compiled version without regions; the next call" in second

    linear = thunder.jit(nn.Linear(4, 4).to(device), transforms=[cudagraph_transform(backend=backend)])
    x = torch.ones(2, 4, device=device)
    for _ in range(3):
        loss = linear(x).sum()
    assert str(explain(linear)).startswith("CUDA graphs: none, in 3 calls; 1 region")  # that of the backward
    loss.backward()
    assert str(explain(linear)).startswith("CUDA graphs: 0 of 3 calls and 0 of 1 backward replayed; 1 region")


def test_no_capture_is_announced_while_all_pools_are_held(backend, device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    jitted = thunder.jit(model, transforms=[cudagraph_transform(backend=backend, max_arenas=1)])
    held = [jitted(torch.ones(2, 4, device=device)) for _ in range(3)]
    _, line, hint, *_ = str(explain(jitted)).splitlines()
    fix = "drop or detach() what needs no backward, call it under torch.no_grad() if none follows, or raise max_arenas"
    reason = "the only memory pool is in use until its backward"
    assert (line, hint) == (f"Not replayed: 1 warm-up; 2 x {reason}", f"To change that {reason}: {fix}")
    held.clear()
    assert "with inputs of the same shapes and strides will capture" in str(explain(jitted))


def test_a_graph_of_dynamos_that_thunder_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * 2
        torch._dynamo.graph_break()
        return torch.cos(y) * 2

    compiles = CudagraphTransform.transform_traces_pre_prologue

    def fails(self, prologue, computation, epilogue, **options):
        if any(symbol.sym.name == "cos" for symbol in computation.bound_symbols):
            raise RuntimeError("cos: there is no VJP for it!")
        return compiles(self, prologue, computation, epilogue, **options)

    monkeypatch.setattr(CudagraphTransform, "transform_traces_pre_prologue", fails)
    compiled = thunderfx(halves, backend="tape")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cos"):
            compiled(torch.ones(3))
    said = str(explain(compiled))
    assert "in 2 of 4 calls: " in said and "halves, graph 1: RuntimeError at test_opening.py:" in said
    assert "\nTo try: call the function without Thunder: if that raises too, fix the function; if not, keep" in said
    assert "use thunder_cg.thunderfx" not in said and "torch.compiler.disable around a function of yours" in said


def test_what_a_function_changes_that_it_reads(transform) -> None:
    """Thunder changes it while it traces, and its own check raises, after it has compiled the function."""
    counts = {"calls": 0}

    def counting(x: torch.Tensor) -> torch.Tensor:
        counts["calls"] += 1
        return torch.sin(x) * 2

    jitted = thunder.jit(counting, transforms=[transform()])
    with pytest.raises(RuntimeError, match="to be equal to"):
        jitted(torch.ones(3))
    first, *lines = str(explain(jitted)).splitlines()
    assert first.startswith("CUDA graphs: none, in 1 call; ")
    assert "Thunder raised while it compiled, in 1 of 1 call: RuntimeError: Expected 1 to be equal to" in "\n".join(
        lines
    )
    assert any(line.startswith("To try: for a number in a global variable, a list or a dictionary") for line in lines)


@pytest.mark.parametrize("where", ["", "f, graph 2: "])
def test_errors_of_this_package_say_themselves_what_to_try(where: str) -> None:
    assert to_try(f"{where}SharedMemoryError at model.py:3: two arguments overlap", is_of_dynamo=bool(where)) == ""
    assert to_try(f"{where}SharedMemoryError: two arguments overlap", is_of_dynamo=bool(where)) == ""
    assert to_try(f"{where}ValueError: a SharedMemoryError: overlaps", is_of_dynamo=bool(where)) != ""


@pytest.mark.nightly
def test_shapes_and_what_follows_from_them_are_said_once() -> None:
    """A number of Dynamo's that is a size is no other cause, and advice is not given twice."""

    def masked(x: torch.Tensor) -> torch.Tensor:
        return (x[x > 0] * 2).sin() + 1

    torch._dynamo.reset()
    compiled = thunderfx(masked, backend="tape")
    for size in (4, 5, 6, 7):
        compiled(torch.ones(size))
    said = [line for line in opening.opening(explain(compiled)).splitlines() if " so far (" in line]
    assert said and not any("of a number from before the graph break" in line for line in said)
    torch._dynamo.reset()
    whole = thunderfx(lambda x: x.sin() * 2 + 1, backend="tape")
    for size in (4, 5, 6, 7):
        whole(torch.ones(size))
    text = opening.opening(explain(whole))
    assert "To have fewer: pad to a few sizes" in text and text.count("and mask the padding in the loss") == 1, text
    assert text.splitlines()[-1].endswith("; as above, pad to a few sizes")
    torch._dynamo.reset()
    static = thunderfx(lambda x: x.sin() * 2 + 1, backend="tape", dynamic=False)
    for size in (4, 5, 6):
        static(torch.ones(size))
    text = opening.opening(explain(static))
    assert text.count("size mismatch") == 1 and " size mismatch at index 0. expected 4, actual 5` x2" in text, text


def test_functions_without_a_backward_are_said_once(transform, device) -> None:
    net = thunder.jit(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(device), transforms=[transform()])
    for _ in range(2):
        net(torch.ones(2, 2, device=device))
    report = explain(net)
    others = tuple(replace(trace, function="Other") for trace in report.traces)
    said = [line for line in str(replace(report, traces=report.traces + others)).splitlines() if "No backward" in line]
    assert len(said) == 1 and said[0].startswith("No backward ran of Sequential, compiled version 0, and 1 more: for ")
    trained = [replace(each, function="Trained", calls=1) for each in report.traces if each.kind == "backward"]
    (said_in_training,) = opening.without_backward(replace(report, traces=(*report.traces, *trained)))
    assert "compiled version 0: compute what no gradient needs, such as a metric or an evaluation" in said_in_training


def test_a_backward_without_regions_counts_no_calls(transform, device) -> None:
    net, x = thunder.jit(lambda x: (x * 2, x.argmax()), transforms=[transform()]), torch.ones(2, 2, device=device)
    for _ in range(3):
        net(x.requires_grad_())[0].sum().backward()
    report = explain(net)
    assert [(trace.kind, len(trace.regions), trace.calls) for trace in report.traces] == [
        ("forward", 1, 3),
        ("backward", 0, 0),
    ]
    assert x.grad is not None and "No backward" not in str(report)
