"""ops.read: every bound symbol becomes one record, and nothing of the trace is lost or invented."""

from __future__ import annotations

import dataclasses

import pytest
import thunder
import torch

from thunder_cg.analysis import rules
from thunder_cg.analysis.ops import Op, Value
from thunder_cg.analysis.rules.record import Arguments, TensorArgument


def only(ops, id_):
    return [op for op in ops.ops if op.id == id_]


def test_a_claimed_op_has_its_executor_and_string_id(traces_of):
    (ops,) = traces_of(lambda x: torch.sin(x) + 1, torch.randn(3, 4))
    (sin,) = only(ops, "sin")
    assert (sin.executor, sin.name, len(sin.inputs), len(sin.outputs)) == ("torch", "torch.sin", 1, 1)
    assert [sub.id for sub in sin.subs] == ["torch.sin"] and sin.subs[0].executor is None
    assert [sub.id for sub in sin.subs[0].subs] == ["SIN"]
    assert sin.line is not None and sin.line.startswith("test_ops.py:")
    assert not sin.bookkeeping and not sin.is_fusion


def test_a_prim_goes_by_its_enum_name_and_unpacks_and_returns_are_bookkeeping(traces_of):
    (ops,) = traces_of(lambda x: torch.sin(x), torch.randn(3))
    assert [op.id for op in ops.ops if op.bookkeeping] == ["UNPACK_TRIVIAL", "RETURN"]
    assert [op.index for op in ops.ops] == list(range(len(ops.ops)))


def test_dels_are_dropped(traces_of):
    (ops,) = traces_of(lambda x: torch.sin(torch.cos(x)) + 1, torch.randn(3))
    assert not only(ops, "DEL") and not only(ops, "COMMENT")


def test_values_have_devices_sizes_and_types(traces_of):
    (ops,) = traces_of(lambda x: (x.to(torch.bfloat16), x > 0), torch.randn(3, 4))
    (x,) = ops.args
    assert (ops.values[x].kind, ops.values[x].device, ops.values[x].nbytes, ops.values[x].dtype) == (
        "tensor",
        "cpu",
        48,
        "float32",
    )
    half = ops.values[only(ops, "to")[0].outputs[0]]
    mask = ops.values[only(ops, "gt")[0].outputs[0]]
    assert (half.nbytes, half.dtype) == (24, "bfloat16") and (mask.nbytes, mask.dtype) == (12, "bool8")


def test_names_appear_once_in_order(traces_of):
    (ops,) = traces_of(lambda x, y: x * x + y, torch.randn(3), torch.randn(3))
    (mul,) = only(ops, "mul")
    assert mul.inputs == ("x",)
    assert only(ops, "RETURN")[0].inputs.count("x") == 1


def test_parameters_are_static_by_tag_or_by_name(traces_of):
    (ops, _) = traces_of(torch.nn.Linear(3, 3), torch.randn(2, 3))
    static = {name for name in ops.args if ops.values[name].static}
    assert len(static) == 2 and "input" not in static

    from thunder.core.transform_common import Transform

    from thunder_cg.analysis.ops import read

    class Named(Transform):
        def transform_trace_post_optimization(self, trace, **kwargs):
            self.ops = read(trace, frozenset({"x"}))
            return trace

    named = Named()
    thunder.jit(lambda x: x + 1, transforms=[named])(torch.randn(3))
    assert named.ops.values["x"].static


def test_a_backward_reads_its_collections(traces_of):
    _, ops = traces_of(lambda x: torch.sin(x) * x.sum().item(), torch.randn(3, requires_grad=True))
    frame = [op.id for op in ops.ops if op.bookkeeping]
    assert frame.count("clear_mutable_collection") == 4 and frame[-1] == "RETURN"
    kinds = {name: ops.values[name].kind for name in ops.args}
    assert kinds["C0"] == "other" and kinds["C1"] == "other"
    assert "number" in kinds.values() and "tensor" in kinds.values()
    produced = {name for op in ops.ops for name in op.outputs}
    assert all(name in produced or name in ops.args for op in ops.ops for name in op.inputs)


def test_lists_of_tensors_are_flattened(traces_of):
    (ops,) = traces_of(lambda x, y: torch.cat([x, y, x]), torch.randn(3), torch.randn(3))
    assert only(ops, "cat")[0].inputs == ("x", "y")


def test_symbolic_sizes_show(traces_of):
    (ops,) = traces_of(lambda x: x + 1, torch.randn(3, 4), cache="symbolic values")
    tensors = [value for value in ops.values.values() if value.kind == "tensor"]
    assert tensors and all(value.symbolic and value.nbytes == 0 for value in tensors)


def test_fusions_show_what_is_inside(traces_of):
    from thunder.executors.torch_compile import torch_compile_ex

    (ops,) = traces_of(lambda x: torch.sin(x) + torch.cos(x), torch.randn(3), executors=[torch_compile_ex])
    (fusion,) = (op for op in ops.ops if op.is_fusion)
    assert (fusion.executor, fusion.id, fusion.name) == ("torchcompile", None, "TorchCompile0")
    assert {"torch.sin", "torch.cos"} <= {sub.id for sub in fusion.subs}
    assert all(name in ops.values for sub in fusion.subs for name in (*sub.inputs, *sub.outputs))


@pytest.mark.parametrize(
    ("index", "conditions"),
    [
        (lambda x, i: x[i], set()),
        (lambda x, i: x[1, :2], set()),
        (lambda x, i: x[:, i], set()),
        (lambda x, i: x[[0, 1]], {"uses_list_index"}),
        (lambda x, i: x[:, [0, 1]], {"uses_list_index"}),
    ],
)
def test_condition_of_indices(traces_of, index, conditions):
    (ops,) = traces_of(index, torch.randn(3, 4), torch.tensor([0, 2]))
    assert set().union(*(op.conditions for op in ops.ops)) == conditions or any(op.id == "tensor" for op in ops.ops)


def stored(key, value):
    def model(x, i):
        y = x + 1
        y[key(i)] = value
        return y

    return model


@pytest.mark.parametrize(
    ("key", "conditions"),
    [
        (lambda i: 0, set()),
        (lambda i: slice(0, 2), set()),
        (lambda i: i, {"stores_number_at_tensor_index"}),
        (lambda i: i > 0, set()),
        (lambda i: (i > 0).any(), {"uses_boolean_index"}),
        (lambda i: (slice(None), i[[0, 1, 1, 0]] > 0), {"uses_boolean_index"}),
    ],
)
def test_condition_of_stores(traces_of, key, conditions):
    (ops,) = traces_of(stored(key, 2.0), torch.randn(3, 4), torch.tensor([0, 2, 1]))
    (store,) = only(ops, "copy_with_setitem_impl")
    assert set(store.conditions) == conditions


def test_condition_of_masks_fills_and_dropout(traces_of):
    def model(x, m, v):
        y = x + 1
        y[m] = v
        attention = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return y, x.masked_fill(m, v), x.masked_fill(m, 0.0), attention

    (ops,) = traces_of(model, torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool), torch.tensor(1.0))
    conditions = [sorted(op.conditions) for op in ops.ops if op.conditions]
    assert ["uses_boolean_index"] in conditions and ["has_tensor_fill_value"] in conditions
    assert conditions.count(["has_tensor_fill_value"]) == 1


@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_condition_of_a_dropout_inside_of_attention(traces_of, probability):
    from thunder.executors.torchex import ex

    attention = ex.opmap["scaled_dot_product_attention"]

    def model(q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, None, probability)

    (ops,) = traces_of(model, torch.randn(2, 2, 4, 8), executors=[ex])
    found = only(ops, attention.id)
    assert found and all(("has_dropout" in op.conditions) == bool(probability) for op in found)


def test_condition_of_a_seed(traces_of):
    from thunder import prims

    def model(p):
        return prims.multinomial(p, 1, True, 7), prims.multinomial(p, 1, True, None)

    (ops,) = traces_of(model, torch.rand(2, 3))
    assert [sorted(op.conditions) for op in only(ops, "multinomial_helper")] == [["draws_with_its_own_generator"], []]


def test_condition_of_a_sorter(traces_of):
    def model(s, x, order):
        return torch.searchsorted(s, x), torch.searchsorted(s, x, sorter=order)

    (ops,) = traces_of(model, torch.rand(4), torch.rand(3), torch.arange(4))
    assert [sorted(op.conditions) for op in only(ops, "searchsorted")] == [[], ["uses_sorter"]]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("call", "takes_singular_values"),
    [
        (lambda x: torch.norm(x), False),
        (lambda x: x.norm(dim=-1), False),
        (lambda x: x.norm(2, -1), False),
        (lambda x: torch.norm(x, 1), False),
        (lambda x: torch.norm(x, "fro", (0, 1)), False),
        (lambda x: torch.norm(x.unsqueeze(0), 2, 1), False),
        (lambda x: torch.linalg.norm(x), False),
        (lambda x: torch.linalg.norm(x, ord=float("inf")), False),
        (lambda x: torch.linalg.norm(x, ord=2), True),
        (lambda x: torch.linalg.norm(x, -2, (0, 1)), True),
        (lambda x: torch.linalg.norm(x, "nuc"), True),
        (lambda x: torch.norm(x, 2), True),  # the same symbol with the same arguments as torch.linalg.norm
    ],
)
def test_condition_of_singular_values(traces_of, call, takes_singular_values, trains):
    traces = traces_of(lambda x: call(x).sum() * 2, torch.rand(3, 4, requires_grad=trains))
    found = [op for ops in traces for name in ("norm", "norm_vjp") for op in only(ops, name)]
    assert [op.id for op in found] == ["norm", "norm_vjp"][: 1 + trains]
    for op in found:
        assert op.conditions == ({"takes_singular_values"} if takes_singular_values else set())
        assert op.rule.captures and (op.rule.objection(op.conditions) is not None) == takes_singular_values


def test_condition_of_a_renormalized_embedding(traces_of):
    """Thunder refuses max_norm in ``embedding`` itself, but not in what it registers for torch by itself."""

    def model(i, w, o):
        bag = torch.nn.functional.embedding_bag
        return bag(i, w, o, 1.0), bag(i, w, o, max_norm=1.0), bag(i, w, o)

    (ops,) = traces_of(model, torch.tensor([0, 1]), torch.rand(2, 3), torch.tensor([0]))
    assert [sorted(op.conditions) for op in only(ops, "embedding_bag")] == [
        ["renormalizes_weight"],
        ["renormalizes_weight"],
        [],
    ]


@pytest.mark.parametrize(
    ("index", "conditions"),
    [
        (lambda x, k: x[:, k], {"uses_scalar_index"}),
        (lambda x, k: x[:, k.to(torch.int32)], {"uses_scalar_index"}),
        (lambda x, k: x[:, k.reshape(1)], set()),
        (lambda x, k: x[:, 1], set()),
    ],
)
def test_condition_of_an_index_without_a_dimension(traces_of, index, conditions):
    (ops,) = traces_of(index, torch.randn(3, 4), torch.tensor(1))
    assert set().union(*(op.conditions for op in ops.ops)) == conditions


def test_condition_of_what_is_written_in_place(traces_of):
    def model(x):
        drop, silu = torch.nn.functional.dropout2d, torch.nn.functional.silu
        return drop(x, 0.5, True, True), drop(x, 0.5, True), silu(x + 1, True), silu(x, inplace=True), silu(x)

    (ops,) = traces_of(model, torch.randn(1, 2, 3, 3))
    assert [set(op.conditions) for op in only(ops, "dropout2d")] == [{"writes_in_place"}, set()]
    assert [set(op.conditions) for op in only(ops, "silu")] == [{"writes_in_place"}, {"writes_in_place"}, set()]


def test_condition_of_a_sparse_gradient(traces_of):
    """A derivative that Thunder leaves to torch.autograd has the arguments of its operator."""

    def model(i, w, o):
        embedding, bag = torch.nn.functional.embedding, torch.nn.functional.embedding_bag
        made = embedding(i, w, sparse=True), embedding(i, w), bag(i, w, o, sparse=True), bag(i, w, o)
        return made, bag(i, w, o, None, 2.0, False, "mean", True)

    _, ops = traces_of(model, torch.tensor([0, 1]), torch.rand(2, 3, requires_grad=True), torch.tensor([0]))
    assert {op.name for op in only(ops, "torch.ops.aten.embedding_backward")} == {"torch.ops.aten.embedding_backward"}
    for id_, some in (("torch.ops.aten.embedding_backward", 1), ("embedding_bag_vjp", 2)):
        assert sorted(map(sorted, (op.conditions for op in only(ops, id_)))) == [[], *[["has_sparse_gradient"]] * some]


@pytest.mark.parametrize(
    ("view", "reads_past"),
    [
        (lambda x, y: x.as_strided((2, 2), (2, 1)), False),
        (lambda x, y: x.as_strided((3, 2), (2, 1)), True),
        (lambda x, y: x.as_strided(size=(4,), stride=(1,)), False),
        (lambda x, y: x.as_strided((2,), (1,), 0), True),
        (lambda x, y: x.as_strided((2,), (1,), storage_offset=1), True),
        (lambda x, y: x.as_strided_scatter(y, (2,), (1,)), False),
        (lambda x, y: x.as_strided_scatter(y, (2,), (4,)), True),
        (lambda x, y: x.as_strided_scatter(y, (2,), (1,), 0), True),
    ],
)
def test_condition_of_a_view_that_reads_more(traces_of, view, reads_past):
    x = torch.randn(16)[4:8].requires_grad_()
    for ops in traces_of(view, x, torch.randn(2)):
        conditions = [set(op.conditions) for op in ops.ops if str(op.id).startswith("as_strided")]
        assert conditions == [{"reads_past_its_view"} if reads_past else set()]


@pytest.mark.parametrize("channels", [0, 4])
def test_condition_of_an_empty_range(traces_of, channels):
    def model(x, on, low, high, scale, zero):
        return torch.fused_moving_avg_obs_fake_quant(x, on, on, low, high, scale, zero, 0.1, 0, 255, 0, True)

    on, zero = torch.ones(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    (ops,) = traces_of(model, torch.randn(4, 8), on, *torch.zeros(2, channels), torch.ones(4), zero)
    (found,) = only(ops, "fused_moving_avg_obs_fake_quant")
    assert set(found.conditions) == (set() if channels else {"has_empty_range"})


def test_condition_of_a_derivative_that_looks_for_nans_on_a_cpu(traces_of):
    def model(x):
        return x.min(), x.amin(), torch.min(x, x.exp()), x.min(dim=0), x.median(0, True), x.nanmedian()

    forward, backward = traces_of(model, torch.randn(3, requires_grad=True))
    assert not any(op.conditions for op in forward.ops)
    found = {(op.id, *op.conditions) for op in backward.ops if op.conditions}
    assert found == {("min_vjp", "reduces_all_on_cpu"), ("nanmedian_vjp", "reduces_all_on_cpu")}


@pytest.mark.parametrize(("device", "classes", "checks"), [("cpu", 5, True), ("cuda", 5, False), ("cuda", -1, True)])
def test_condition_of_classes_that_are_checked(device, classes, checks):
    (condition,) = rules.find("torch", "one_hot").conditions
    of = TensorArgument((3,), "int64", device)
    assert condition.predicate(Arguments((of, classes), positions={"num_classes": 1})) is checks


def test_records_are_frozen_and_compare_without_the_symbol(traces_of):
    (ops,) = traces_of(lambda x: torch.sin(x), torch.randn(3))
    (sin,) = only(ops, "sin")
    with pytest.raises(dataclasses.FrozenInstanceError):
        sin.name = "other"
    assert dataclasses.replace(sin, symbol=None) == sin
    assert "symbol" not in repr(Op(0, "torch.sin", "torch", "sin"))


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def test_a_line_of_pytorchs_modules_stands_for_the_users_near_it(traces_of):
    (ops,) = traces_of(Inner().requires_grad_(False), torch.ones(2, 3))
    (linear,), (tanh,) = only(ops, "linear"), only(ops, "tanh")
    assert tanh.line == f"test_ops.py:{Inner.forward.__code__.co_firstlineno + 1}" and tanh.library_line is None
    assert linear.line is None and linear.library_line.startswith("linear.py:")
    assert ops.place(linear) == f"near {tanh.line}" and ops.origin(linear) is tanh
    (ops,) = traces_of(torch.nn.Sequential(torch.nn.Linear(3, 3)).requires_grad_(False), torch.ones(2, 3))
    (linear,) = only(ops, "linear")
    assert ops.place(linear) == f"at {linear.library_line}" and ops.origin(linear) is linear
    assert ops.source(linear) == "return F.linear(input, self.weight, self.bias)"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *[("l_kwargs_input_ids_", "input_ids"), ("l_kwargs_cache_0_length", "cache_0_length")],
        ("l_self_modules_model_modules_norm_buffers_inv_freq_", "self.model.norm.inv_freq"),
        ("l_fn_modules_0_parameters_weight_", "self.0.weight"),  # of a module of PyTorch's own, such as a Sequential
        *[("x", "x"), ("l_x_", "x"), ("l_ys_0_", "ys_0"), ("g_table_", "table"), ("t_weight", "t_weight")],
        *[("t_1_0", "args[1][0]"), ("t_2_a", "args[2]['a']"), ("t_2_0_a_b", "args[2][0]['a_b']"), ("t_1", "t_1")],
    ],
)
def test_arguments_have_the_users_names(name, found):
    is_dynamos = name[:2] in ("l_", "g_")
    assert Value(name, "tensor", is_dynamos=is_dynamos).users_name == found
    static = Value(name, "tensor", static=True, is_dynamos=is_dynamos).users_name
    assert static == (name if name.startswith("t_") else found)
    assert not is_dynamos or Value(name, "tensor").users_name == name, "an argument that the user calls so"


def test_values_are_described_by_what_made_them_or_by_their_name(traces_of):
    (ops,) = traces_of(lambda x, ys: torch.tanh(x * ys[0]), torch.ones(2), [torch.ones(2)])
    (mul,) = only(ops, "mul")
    assert [ops.described(name) for name in mul.inputs] == ["input 'x'", "input 'args[1][0]'"]
    assert ops.described(mul.outputs[0]) == f"the result of torch.mul at {mul.line}"


def test_what_is_written_in_place_is_described_as_itself(traces_of):
    """Thunder gives it new names."""

    def fn(x, w):
        x.add_(1)
        return torch.tanh(x * w) * x

    forward, _ = traces_of(fn, torch.ones(2), torch.ones(2, requires_grad=True))
    aliases = [*only(forward, "update_aliases")]
    assert aliases and not any("update_aliases" in forward.described(o) for op in aliases for o in op.outputs)
