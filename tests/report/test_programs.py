"""Every way to compile with the transform is found, and everything else is told apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import thunder
import torch
from support import programs, run_what_inductor_gets

from thunder_cg import cudagraph_transform, explain, thunderfx
from thunder_cg.errors import NotCompiledError, SkipReason
from thunder_cg.report.programs import outside_of, understood

INSTEAD = "use other operators, or one of your own with torch.library, which allow= names"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(self.linear(x)) + 1)


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x * 2) + 1)


def broken(x: torch.Tensor) -> torch.Tensor:
    y = function(x)
    torch._dynamo.graph_break()
    if y.sum() > 0:
        y = y + y.sum().item()
    return function(y)


def half_supported(x: torch.Tensor) -> torch.Tensor:
    return torch.sinc(function(x))


def _dynamo(fn: Callable[..., torch.Tensor], **options: object) -> Callable[..., torch.Tensor]:
    from thunder.dynamo import ThunderCompiler

    return torch.compile(fn, backend=ThunderCompiler(**options))


def _thunderfx(fn: Callable[..., torch.Tensor], **options: object) -> Callable[..., torch.Tensor]:
    from thunder.dynamo import thunderfx

    return thunderfx(fn, **options)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Thunder, Dynamo and Inductor warn of is not ours
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compiler", [thunder.jit, _thunderfx, _dynamo])
@pytest.mark.parametrize(("fn", "name"), [(Net(), "Net"), (function, "function")])
def test_every_compiler_is_read(compiler: Callable[..., Callable[..., torch.Tensor]], fn: object, name: str) -> None:
    compiled = compiler(fn, transforms=[cudagraph_transform(backend="tape")])
    assert explain(compiled).traces == ()
    compiled(torch.randn(3, 4))
    traces = explain(compiled).traces
    assert traces and all(trace.function.startswith(name) for trace in traces)
    assert {trace.kind for trace in traces} == ({"forward", "backward"} if name == "Net" else {"forward"})


def test_every_cache_entry_is_numbered() -> None:
    jitted = thunder.jit(function, transforms=[cudagraph_transform(backend="tape")])
    for size in (2, 3, 2):
        jitted(torch.randn(size))
    assert [trace.entry for trace in explain(jitted).traces] == [0, 1]


def test_without_thunders_cache_the_last_call_is_read() -> None:
    jitted = thunder.jit(function, transforms=[cudagraph_transform(backend="tape")], cache="no caching")
    jitted(torch.randn(2))
    jitted(torch.randn(3))
    report = explain(jitted)
    assert len(report.traces) == 1
    assert str(report).startswith("CUDA graphs: none, in 2 calls;")
    assert 'with cache="no caching", Thunder compiles each call anew' in str(report)
    assert "will capture" not in str(report)


def test_graphs_of_dynamo_are_named() -> None:
    compiled = _thunderfx(broken, transforms=[cudagraph_transform(backend="tape")])
    compiled(torch.ones(4, requires_grad=True))
    report = explain(compiled)
    assert list(dict.fromkeys(trace.function for trace in report.traces)) == [f"broken, graph {i}" for i in range(4)]
    assert str(report).startswith("CUDA graphs: 0 of 4 calls of 4 graphs replayed;")
    first = broken.__code__.co_firstlineno + 2
    assert [(found.function, found.line, found.source) for found in report.breaks] == [
        ("broken, graph 0", f"test_programs.py:{first}", "torch._dynamo.graph_break()"),
        ("broken, graph 1", f"test_programs.py:{first + 1}", "if y.sum() > 0:"),
        ("broken, graph 2", f"test_programs.py:{first + 2}", "y = y + y.sum().item()"),
    ]
    for said in (unescape(report._repr_html_()), str(report)):
        assert f"test_programs.py:{first + 1}: if y.sum() > 0:" in said
        assert "graph break after broken, graph 1: a branch on what a tensor holds" in said
        assert "Remove the `torch._dynamo.graph_break()` call." in said
        assert "to change it: choose with torch.where" in said and "to change it: leave the read out" in said
    lines = [op.line for trace in report.traces for op in trace.ops if op.verdict != "bookkeeping"]
    assert all("test_programs.py:" in (line or "") for line in lines), lines
    assert "eval_with_key" not in str(report.to_dict())


def test_the_log_profiles_and_errors_have_the_names_of_the_report() -> None:
    compiled = thunderfx(broken, backend="tape")
    compiled(torch.ones(4))
    assert [program.label for program in programs(compiled)] == [f"broken, graph {i}, forward" for i in range(4)]
    assert {trace.function for trace in explain(compiled).traces} == {f"broken, graph {i}" for i in range(4)}


def test_calls_of_dynamos_graphs_without_regions_are_counted() -> None:
    compiled = _thunderfx(torch.relu, transforms=[cudagraph_transform(backend="tape")])
    for _ in range(3):
        compiled(torch.ones(3))
    assert str(explain(compiled)).startswith("CUDA graphs: none, in 3 calls; 0 regions with 0 of ")


def test_what_thunder_leaves_to_inductor_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    run_what_inductor_gets(monkeypatch)
    compiled = _thunderfx(half_supported, transforms=[cudagraph_transform(backend="tape")])
    compiled(torch.randn(4))
    report = explain(compiled)
    assert len(report.traces) == 1
    (outside,) = report.outside
    assert (outside.function, outside.operator, outside.count) == ("half_supported, graph 0", "sinc", 1)
    assert outside.line == f"{Path(__file__).name}:{half_supported.__code__.co_firstlineno + 1}"
    assert outside.source == "return torch.sinc(function(x))"
    for said in (str(report), unescape(report._repr_html_())):
        assert f"{outside.line}: {outside.source}" in said
        assert f"sinc of half_supported, graph 0, is left to Inductor: {outside.reason}" in said
        assert "half_supported, graph 0, is cut into 1 piece of Thunder's and 1 of Inductor's" in said


@pytest.mark.usefixtures("cut")
def test_what_inductor_gets_is_an_error_with_strict_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    run_what_inductor_gets(monkeypatch)

    def object_to_sinc(node: torch.fx.Node) -> SkipReason | None:
        return (reason := _object_to_sinc(node)) and reason._replace(fix="drop it")

    monkeypatch.setattr("thunder_cg.dynamo.compiler.objections", lambda *_: object_to_sinc)
    line = f"{Path(__file__).name}:{half_supported.__code__.co_firstlineno + 1}"
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed,
        match=rf"sinc at {line}: runs eagerly, as Inductor got it and no trace has it: [^;]*; drop it, or drop strict",
    ):
        thunderfx(half_supported, backend="tape", strict="ops")(torch.randn(4))


def test_what_inductor_compiles_in_a_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run_what_inductor_gets(monkeypatch)
    monkeypatch.setattr("thunder_cg.dynamo.compiler.objections", lambda *_: _object_to_sinc)
    compiled = thunderfx(half_supported, backend="tape")
    with torch.no_grad():
        compiled(torch.randn(4))
    report = explain(compiled)
    line = f"{Path(__file__).name}:{half_supported.__code__.co_firstlineno + 1}"
    assert [(part.operator, part.line) for part in report.joined] == [("sinc", line)] and not report.outside
    assert f"by Inductor in the place of Thunder:\n  {line}: sinc: it is left out by a test\n" in str(report)
    assert report.to_dict()["joined"][0]["operator"] == "sinc"


def _object_to_sinc(node: torch.fx.Node) -> SkipReason | None:
    return SkipReason("is left out by a test") if "sinc" in node.name else None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "node with name: x and target: <built-in method addmm of type object at 0x7f> only has a fallback.",
            ("x", "addmm", "it only has a fallback"),
        ),
        (
            "node with name: r_1 and target: new_ones only has a fallback.",
            ("r_1", "new_ones", "it only has a fallback"),
        ),
        (
            "node with name: p and target: <function boolean_dispatch.<locals>.fn at 0x7f> only has a fallback.",
            ("p", "boolean_dispatch", "it only has a fallback"),
        ),
        ("node with name: o and target: my.op didn't have any mapping.", ("o", "my.op", "it didn't have any mapping")),
        (
            "node with name: x and target: <function interpolate at 0x7f>: no corners",
            ("x", "interpolate", "it: no corners"),
        ),
        ("something else", ("", "a part of the graph", "something else")),
    ],
)
def test_thunders_words_are_understood(said: str, expected: tuple[str, str, str]) -> None:
    assert understood(said) == expected


@pytest.mark.parametrize(
    ("said", "raised", "problem"),
    [
        (
            "Failed while running meta for {}, see exception field",
            "no rows\n",
            "has arguments that Thunder refuses: no rows",
        ),
        ("Failed while creating proxy for {}, see exception field", "", "has arguments that Thunder refuses"),
        ("Failed while running meta for {}, see exception field", "VJP for it", "has no gradient in Thunder"),
        ("{} didn't have any mapping in thunder.", None, "is unknown to Thunder"),
    ],
)
def test_thunders_reasons_are_understood(said: str, raised: str | None, problem: str) -> None:
    """Where its splitter tries an operator, and what that raises."""
    module = torch.fx.symbolic_trace(lambda x: torch.sin(x) + 1)
    split = SimpleNamespace(info=said.format("node with name: sin and target: <method sin at 0x7f>"), exception=raised)
    graph = SimpleNamespace(
        original_graph_module=module, submodule_to_compiled_functions={}, thunder_compiled_fns=[], split_reasons=[split]
    )
    found = [(each.operator, each.reason, each.fix) for each in outside_of("Net", graph)]
    assert found == [("sin", f"it {problem}", INSTEAD)]


@pytest.mark.parametrize("given", [function, Net(), None, torch.compile(function), torch.compile(Net())])
def test_what_thunder_did_not_compile_is_refused(given: object) -> None:
    with pytest.raises(NotCompiledError, match=r"did not compile this.*thunder\.jit\(fn, transforms="):
        explain(given)


def test_the_compiled_part_of_a_module_is_named(transform: Callable[..., Any]) -> None:
    """As `DistributedDataParallel` has one, and a module of Lightning's."""
    around = torch.nn.ModuleDict({"net": thunder.jit(Net(), transforms=[transform()]), "other": thunder.jit(Net())})
    with pytest.raises(NotCompiledError, match="Thunder did not compile this, only its part net; pass what"):
        explain(around)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("compiler", [thunder.jit, _thunderfx, _dynamo])
def test_compiled_without_the_transform_is_refused(
    compiler: Callable[..., Callable[..., torch.Tensor]], called: bool
) -> None:
    compiled = compiler(function)
    if called:
        compiled(torch.randn(4))
    with pytest.raises(NotCompiledError, match=r"without cudagraph_transform\(\)"):
        explain(compiled)


def test_an_attribute_of_a_tensor_has_its_name() -> None:
    """Dynamo's node for it calls `getattr`."""
    module = torch.fx.symbolic_trace(lambda x: x.real + 1)
    node = next(node for node in module.graph.nodes if node.target is getattr)
    split = SimpleNamespace(
        info=f"node with name: {node.name} and target: {node.target} has no gradient", exception=None
    )
    graph = SimpleNamespace(
        original_graph_module=module, submodule_to_compiled_functions={}, thunder_compiled_fns=[], split_reasons=[split]
    )
    assert [(each.operator, each.reason) for each in outside_of("Net", graph)] == [
        ("Tensor.real", "it has no gradient")
    ]
