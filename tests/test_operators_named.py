"""allow= and deny= take an operator of torch.library, or the operator itself, in each form that a user may write."""

from __future__ import annotations

import re
import warnings

import pytest
import thunder
import torch
from thunder.core.proxies import TensorProxy
from thunder.executors.custom_op_ex import custom_op_ex
from thunder.extend import OperatorExecutor

from thunder_cg import OptionError, cudagraph_transform, explain, thunderfx


@torch.library.custom_op("thunder_cg_names::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def clip(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x.abs())


mine = OperatorExecutor("names_ex")
soft_clip = mine.register_operator("soft_clip", meta=lambda x: TensorProxy(like=x), fn=clip)

PACKET = torch.ops.thunder_cg_names.double
LIBRARY = [
    *("thunder_cg_names::double", "torch.ops.thunder_cg_names.double", "thunder_cg_names::double.default"),
    *("thunder_cg_names.double", "thunder_cg_names.double.default", "torch.ops.thunder_cg_names.double.default"),
    *(double, PACKET, PACKET.default),
]


def of_library(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(double(x)) + 1


def of_executor(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(soft_clip(torch.nn.functional.linear(x, x))) + 1


def jitted(**options):
    executors = [mine, *thunder.get_default_executors()]
    return thunder.jit(of_executor, executors=executors, transforms=[cudagraph_transform(backend="tape", **options)])


def verdicts(compiled) -> dict[str, tuple[str, str]]:
    compiled(torch.ones(2, 2))
    (trace,) = explain(compiled).traces
    return {op.name.rpartition(".")[2]: (op.verdict, op.reason) for op in trace.ops}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", LIBRARY, ids=lambda name: getattr(name, "__name__", None) or str(name))
@pytest.mark.nightly_after(3)
def test_an_operator_of_torch_library(name):
    allowed = thunderfx(of_library, backend="tape", allow=[name])
    assert verdicts(allowed)["double"] == ("capture", "allowed by the user")
    assert not explain(allowed).unmatched


def test_an_operator_without_a_gradient_fails_with_what_to_try():
    compiled = thunderfx(of_library, backend="tape")
    for _ in range(2):
        with pytest.raises(Exception, match="no autograd formula") as raised:
            compiled(torch.ones(2, 2, requires_grad=True))
    said = " ".join(str(explain(compiled)).split())
    error = f"RuntimeError at test_operators_named.py:{of_library.__code__.co_firstlineno + 1}: Trying to backward"
    assert f"Thunder raised while it compiled, in 2 of 2 calls: {error} through" in said
    fix = "To try: for an operator of torch.library, give it a gradient with torch.library.register_autograd."
    assert fix in said
    for note in getattr(raised.value, "__notes__", ()):  # Python 3.11
        assert note.startswith(
            f"Dynamo or Thunder raised this while it compiled of_library: {error}"
        ) and note.endswith(fix)


def test_the_fix_names_it_as_its_author_does():
    compiled = thunderfx(of_library, backend="tape")
    compiled(torch.ones(2, 2))
    (cause,) = explain(compiled).causes
    assert cause.name == "torch.ops.thunder_cg_names.double"
    assert "pass allow=['thunder_cg_names::double'] to cudagraph_transform or thunder_cg.thunderfx" in cause.fix


def test_the_error_of_thunder_names_the_operator():
    compiled = thunder.jit(of_library, transforms=[cudagraph_transform(backend="tape")])
    with pytest.raises(NotImplementedError):
        compiled(torch.ones(2, 2))
    said = " ".join(str(explain(compiled)).split())
    assert "Trying to call function thunder_cg_names::double, but it is not yet supported" in said
    assert "To try: for an operator of torch.library, use thunder_cg.thunderfx, which keeps it" in said


@torch.library.custom_op("thunder_cg_names::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def setup_context(ctx, inputs, output):
    pass


triple.register_autograd(lambda ctx, grad: grad * 3, setup_context=setup_context)
thunder.torch._register_custom_op(triple)


def of_triple(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.ops.thunder_cg_names.triple(torch.tanh(x)))


def by_jit(**options):
    executors = [custom_op_ex, *thunder.get_default_executors()]
    return thunder.jit(of_triple, executors=executors, transforms=[cudagraph_transform(backend="tape", **options)])


def by_thunderfx(**options):
    return thunderfx(of_triple, backend="tape", **options)


@pytest.mark.parametrize("compiler", [by_jit, by_thunderfx])
@pytest.mark.parametrize("option", ["allow", "deny"])
@pytest.mark.parametrize(
    "name", ["thunder_cg_names.triple", "thunder_cg_names::triple", "thunder_cg_names.triple.default", triple], ids=str
)
@pytest.mark.nightly_after(2)
def test_the_name_of_an_operator_covers_its_derivative(option, name, compiler):
    compiled = compiler(**{option: [name]})
    compiled(torch.ones(2, 2, requires_grad=True)).sum().backward()
    report = explain(compiled)
    reasons = [op.reason for trace in report.traces for op in trace.ops if "triple" in op.name]
    assert reasons == [{"allow": "allowed by the user", "deny": "denied by the user"}[option]] * 2
    assert not report.unmatched


@pytest.mark.parametrize("compiler", [by_jit, by_thunderfx])
def test_the_fix_names_an_operator_and_its_derivative_alike(compiler):
    compiled = compiler()
    compiled(torch.ones(2, 2, requires_grad=True)).sum().backward()
    fixes = [op.fix for trace in explain(compiled).traces for op in trace.ops if "triple" in op.name]
    assert len(fixes) == 2 and all("allow=['thunder_cg_names::triple']" in fix for fix in fixes)


@pytest.mark.parametrize("operator", [soft_clip, clip, "names_ex.soft_clip"], ids=["symbol", "function", "name"])
def test_an_operator_of_an_executor(operator):
    assert verdicts(jitted(allow=[operator]))["soft_clip"] == ("capture", "allowed by the user")


@pytest.mark.parametrize("operator", [torch.nn.functional.linear, "torch.linear", "torch.nn.functional.linear"])
def test_a_function_of_pytorchs(operator):
    compiled = jitted(deny=[operator])
    assert verdicts(compiled)["linear"] == ("eager", "denied by the user")
    assert not explain(compiled).unmatched


def test_what_no_operator_has_is_in_the_report():
    def other(x: torch.Tensor) -> torch.Tensor:
        return x

    compiled = jitted(allow=["soft_clp", other], deny=[torch.sin, "Tensor.linear"])
    with pytest.warns(UserWarning, match="did you mean 'soft_clip'"):
        compiled(torch.ones(2, 2))
    report = explain(compiled)
    name = other.__qualname__
    assert sorted(report.unmatched) == [
        ("allow", "'soft_clp'", "did you mean 'soft_clip'?"),
        ("allow", name, None),
        ("deny", "'Tensor.linear'", "did you mean 'torch.linear'?"),
        ("deny", "'torch.sin'", None),
    ]
    said = "allow= names 'soft_clp', and no operator of these traces has that name; did you mean 'soft_clip'?"
    assert said in str(report) and f"allow= names {name}, and no operator of these traces has that name\n" in str(
        report
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("torch.nn.functional.gelo", "torch.nn.functional.gelu"),
        ("torch.nn.functionl.gelu", "torch.nn.functional.gelu"),
        ("torch.nn.GELU", "gelu"),
        ("torch.linalg.dett", "torch.linalg.det"),
        ("no_such_ex.gelu", "gelu"),
        *((name, "thunder_cg_names::double") for name in ("thunder_cg_names::duble", "thunder_cg_name::double")),
        *((name, "thunder_cg_names::double") for name in ("thunder_cg_names.doubl.default", "thunder_cg_names/double")),
        ("names_ex.soft_clp", "names_ex.soft_clip"),
        ("something_else", None),
        *((name, ...) for name in ("torch.nn.functional.gelu", "torch.gelu", "gelu", "gelu_vjp", "prims.sin")),
        *((name, ...) for name in ("thunder_cg_names.double.default", "names_ex.soft_clip", "sdpa.gelu")),
    ],
)
def test_a_misspelt_name_is_a_warning_with_the_nearest_one(name, meant):
    """Not a name that an operator of another trace may have, although this trace has none."""
    compiled = jitted(deny=[name])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compiled(torch.ones(2, 2))
    hint = f"; did you mean {meant!r}?" if meant else ""
    said = f"deny= names {name!r}, and the trace has no such operator{hint}"
    assert [str(each.message) for each in warned if each.category is UserWarning] == ([] if meant is ... else [said])


def test_what_thunder_makes_of_an_operator_is_named():
    """As the advice says, the parts can be denied in its place."""
    gelu, x = torch.nn.functional.gelu, torch.ones(2, requires_grad=True)
    for operator in ("torch.nn.functional.gelu", gelu):
        compiled = thunder.jit(lambda x: gelu(x) * 2, transforms=[cudagraph_transform(backend="tape", deny=[operator])])
        with pytest.warns(UserWarning, match="Thunder has split it into .*'torch.erf'.*; name these"):
            compiled(x)
        ((_, _, instead),) = explain(compiled).unmatched
        parts = re.findall(r"'(torch\.\w+)'", instead)
    denied = thunder.jit(lambda x: gelu(x) * 2, transforms=[cudagraph_transform(backend="tape", deny=parts)])
    denied(x)
    assert not explain(denied).unmatched
    assert {op.verdict for op in explain(denied).traces[0].ops} == {"eager", "bookkeeping"}


@pytest.mark.parametrize("wrong", [[3], [""], ["a b"], "my_op", [[]]])
def test_what_is_no_operator_is_refused(wrong):
    with pytest.raises(OptionError, match=r"allow=.*a collection of operators, or of their names"):
        cudagraph_transform(backend="tape", allow=wrong)


def test_one_operator_in_both_options_is_refused():
    with pytest.raises(OptionError, match=r"thunder_cg_names::double.*name each operator once"):
        cudagraph_transform(backend="tape", allow=[double], deny=[PACKET])
