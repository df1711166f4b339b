"""classify: every op ends with a verdict and a reason of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from thunder.extend import OperatorExecutor, deregister_executor, register_executor

from thunder_cg.analysis import rules
from thunder_cg.analysis.ops import Ops
from thunder_cg.analysis.rules import Reason


def verdict(t, **kwargs):
    return t.verdicts(**kwargs)[-1]


def test_an_allowed_operator_on_the_device(trace):
    v = verdict(trace().add("a b", "g"))
    assert (v.capture, v.reason, v.device, v.fix) == (True, Reason.ALLOWED, "cuda:0", "")


def test_bookkeeping(trace):
    v = verdict(trace().add("a", "b").returns("b"))
    assert (v.capture, v.reason, v.fix) == (False, Reason.BOOKKEEPING, "")


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ("c1", "c2", Reason.NOT_ON_DEVICE),
        ("a c1", "b", Reason.MIXED_DEVICES),
        ("a", "c1", Reason.MIXED_DEVICES),
        ("a", "d1", Reason.MIXED_DEVICES),
        ("n1", "n2", Reason.RUNTIME_NUMBER),
        ("a n1", "b", Reason.RUNTIME_NUMBER),
        ("a", "n1", Reason.RUNTIME_NUMBER),
        ("", "", Reason.NOT_ON_DEVICE),
        ("f1", "a", Reason.COLLECTIVE),
    ],
)
def test_facts_about_the_call(trace, inputs, outputs, reason):
    v = verdict(trace().add(inputs, outputs))
    assert (v.capture, v.reason) == (False, reason) and v.detail and v.fix


@pytest.mark.parametrize("inputs", ["c1 c2", "a c1", "a n1", "f1"])
def test_allow_does_not_lift_facts_about_the_call(trace, inputs):
    assert not verdict(trace().mine(inputs, "b"), allow=("my_op",)).capture


def test_the_cpu_is_the_device_for_the_tape(trace):
    t = trace().add("c1", "c2")
    assert verdict(t, device_type="cpu").device == "cpu" and verdict(t, device_type="cpu").capture
    assert not verdict(trace().add("a", "b"), device_type="cpu").capture


def test_symbolic_sizes(trace):
    t = trace().add("a", "b")
    t.values["b"] = dataclasses.replace(t.values["b"], symbolic=True)
    assert verdict(t).reason is Reason.SYMBOLIC_SHAPE and "a size of its result" in verdict(t).detail


@pytest.mark.parametrize(
    ("id_", "reason"),
    [
        ("nonzero", Reason.DATA_DEPENDENT),
        ("svd", Reason.HOST_SYNC),
        ("tensor", Reason.HOST_SYNC),
        ("dtensor_redistribute", Reason.COLLECTIVE),
        ("dtensor_add_prim", Reason.DTENSOR),
        ("torch_stash_grad_for_fsdp_prim_impl", Reason.SIDE_EFFECT),
        ("get_and_update_rng_state_impl", Reason.RANDOM_STATE),
        ("_grouped_mm", Reason.UNVERIFIED),
    ],
)
def test_denied_operators(trace, id_, reason):
    v = verdict(trace().op(id_, "a", "b"))
    assert (v.capture, v.reason) == (False, reason) and v.fix


def test_item_is_data_dependent_rather_than_a_number(trace):
    assert verdict(trace().item("a", "n1")).reason is Reason.DATA_DEPENDENT


def test_every_conditional_row_has_a_case_that_captures_and_one_that_does_not(trace):
    conditional = [rule for rule in rules.RULES.values() if rule.captures and rule.conditions]
    assert len(conditional) > 80
    for rule in conditional:
        executor, id_ = rule.key
        plain = trace().op(id_, "a b", "g", executor=executor)
        assert verdict(plain).capture, id_
        for condition in rule.conditions:
            v = verdict(trace().op(id_, "a b", "g", executor=executor, conditions=frozenset({condition.name})))
            if condition.cause is None:
                assert v.capture, (id_, condition.name)
            else:
                assert (v.capture, v.reason) == (False, condition.cause.reason), (id_, condition.name)


def test_every_row_decides(trace):
    for (executor, id_), rule in rules.RULES.items():
        v = verdict(trace().op(id_, "a", "b", executor=executor))
        assert (v.capture, v.reason) == (rule.captures, rule.cause.reason), rule.key
        assert v.capture or v.fix, rule.key


def test_a_storage_that_is_read_past_a_view_stays_outside_of_graphs(trace):
    """All ops whose results may be a part of the storage stay eager, and no others."""
    t = trace().add("a", "b").op("torch_slice_prim_impl", "b", "s").add("s", "o")
    t.op("as_strided", "s", "v", conditions=frozenset({"reads_past_its_view"})).add("v", "g")
    assert [v.capture for v in t.verdicts()] == [False, False, True, False, True]
    assert "storage of its result" in t.verdicts()[0].detail and t.verdicts()[0].fix
    assert all(v.capture for v in t.verdicts(allow=("as_strided",)))
    t.ops[3] = dataclasses.replace(t.ops[3], conditions=frozenset())
    assert all(v.capture for v in t.verdicts())


# -------------------------------------------------------------------------------------------------------------- unknown


def test_an_unknown_operator_says_what_to_allow(trace):
    v = verdict(trace().mine("a", "b"))
    assert (v.capture, v.reason) == (False, Reason.UNKNOWN)
    assert "pass allow=['my_ex.my_op'] to cudagraph_transform" in v.fix
    assert verdict(trace().mine("a", "b"), allow=("my_ex.my_op",)).reason is Reason.USER_ALLOW


def test_an_ad_hoc_operator_has_a_name_that_the_next_process_has_too(trace):
    t = trace().op("fn_139_0", "a", "b", executor="__ad_hoc_executor_139")
    assert "allow=['fn']" in verdict(t).fix
    assert verdict(t, allow=("fn",)).capture


@pytest.mark.parametrize("pattern", ["my_op", "my_ex.my_op", "mine.my_op"])
def test_patterns_are_id_executor_and_id_or_printed_name(trace, pattern):
    assert verdict(trace().op("my_op", "a", "b", executor="my_ex", name="mine.my_op"), allow=(pattern,)).capture


def test_deny(trace):
    v = verdict(trace().add("a", "b"), deny=("torch.add",))
    assert (v.capture, v.reason) == (False, Reason.USER_DENY) and "'torch.add'" in v.fix


def test_allow_lifts_a_row(trace):
    assert verdict(trace().op("_grouped_mm", "a b", "g"), allow=("_grouped_mm",)).reason is Reason.USER_ALLOW


# -------------------------------------------------------------------------------------------------------------- fusions


def fusion(t, *ids, executor="torchcompile", sub_executor=None):
    subs = tuple(t.make(id_, "a", "b", executor=sub_executor) for id_ in ids)
    return t.op(None, "a", "b", executor=executor, is_fusion=True, subs=subs, name="Fusion0")


@pytest.mark.parametrize("executor", sorted(name for name, executor in rules.EXECUTORS.items() if executor.fuses))
def test_a_fusion_of_allowed_operators(trace, executor):
    v = verdict(fusion(trace(), "ADD", "torch.mul", "torch.nn.functional.linear", executor=executor))
    assert (v.capture, v.reason) == (True, Reason.FUSION)


def test_a_fusion_is_as_safe_as_the_worst_in_it(trace):
    v = verdict(fusion(trace(), "ADD", "ITEM"))
    assert (v.capture, v.reason) == (False, Reason.DATA_DEPENDENT) and "ITEM" in v.detail
    v = verdict(fusion(trace(), "ADD", "their_op", sub_executor="theirs"))
    assert v.reason is Reason.UNKNOWN and "theirs.ADD" in v.fix


def test_allow_and_deny_reach_inside_of_fusions(trace):
    t = fusion(trace(), "torch.mul", "their.op")
    assert verdict(t).reason is Reason.UNKNOWN
    assert verdict(t, allow=("their.op",)).capture
    assert verdict(fusion(trace(), "torch.mul"), deny=("torch.mul",)).reason is Reason.USER_DENY


def test_a_fusion_of_an_unknown_executor(trace):
    assert verdict(fusion(trace(), "ADD", executor="theirs")).reason is Reason.UNKNOWN


def test_a_tensor_on_the_cpu_inside_of_a_fusion(trace):
    t = trace()
    subs = (t.make("FULL", "", "c1", executor=None), t.make("ADD", "a c1", "b", executor=None))
    assert verdict(t.op(None, "a", "b", executor="nvfuser", is_fusion=True, subs=subs)).reason is Reason.MIXED_DEVICES


# ----------------------------------------------------------------------------------------------------------- subsymbols


def test_an_allowed_symbol_with_a_denied_one_inside(trace):
    t = trace()
    v = verdict(t.op("sum", "a", "b", subs=(t.make("torch.Tensor.item", "a", "n1", executor=None),)))
    assert v.reason is Reason.DATA_DEPENDENT and "inside is" in v.detail


def test_an_unknown_name_inside_of_an_allowed_symbol_proves_nothing(trace):
    t = trace()
    assert verdict(t.op("sum", "a", "b", subs=(t.make("torch.brand_new", "a", "b", executor=None),))).capture


def test_a_symbol_of_thunder_without_a_row_is_what_it_is_made_of(trace):
    t = trace()
    good = (t.make("ADD", "a", "b", executor=None),)
    assert verdict(t.op("torch.brand_new", "a", "b", executor=None, subs=good)).capture
    bad = (*good, t.make("their_op", "a", "b", executor="theirs"))
    assert verdict(t.op("torch.brand_new", "a", "b", executor=None, subs=bad)).reason is Reason.UNKNOWN


# ---------------------------------------------------------------------------------------------------------- real traces


@pytest.fixture
def my_executor():
    executor = OperatorExecutor("my_ex", version="0.1")
    register_executor(executor)
    yield executor
    deregister_executor(executor)


def test_an_operator_that_a_user_registered(traces_of, on_cpu, my_executor):
    def triple(x):
        return x * 3

    symbol = my_executor.register_operator("triple", like=triple, fn=triple)

    def model(x):
        return torch.cos(torch.sin(symbol(torch.cos(torch.sin(x)))))

    (ops,) = traces_of(model, torch.randn(3), executors=[my_executor])
    plan = on_cpu(ops)
    (mine,) = (op for op in ops.ops if op.id == "triple")
    v = plan.verdicts[mine.index]
    assert v.reason is Reason.UNKNOWN and "'my_ex.triple'" in v.fix
    assert on_cpu(ops, allow=("my_ex.triple",)).verdicts[mine.index].capture


def test_a_torch_compile_fusion_with_an_item_in_it(traces_of, on_cpu):
    from thunder.executors.torch_compile import torch_compile_ex

    def model(x):
        return torch.sin(x) * x.sum().item()

    (ops,) = traces_of(model, torch.randn(3), executors=[torch_compile_ex])
    (index,) = (op.index for op in ops.ops if op.is_fusion)
    v = on_cpu(ops).verdicts[index]
    assert v.reason is Reason.DATA_DEPENDENT and "item" in v.detail
    assert isinstance(ops, Ops)


def test_a_torch_compile_fusion_of_a_model(traces_of, on_cpu):
    from thunder.executors.torch_compile import torch_compile_ex

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.LayerNorm(8))
    for ops in traces_of(model, torch.randn(3, 4), executors=[torch_compile_ex]):
        plan = on_cpu(ops)
        assert all(plan.verdicts[op.index].capture for op in ops.ops if not op.bookkeeping)


def test_symbolic_values(traces_of, on_cpu):
    (ops,) = traces_of(lambda x: torch.sin(x.reshape(x.shape[0] * 2, -1)), torch.randn(4, 4), cache="symbolic values")
    reasons = {v.reason for v in on_cpu(ops).verdicts}
    assert reasons <= {Reason.BOOKKEEPING, Reason.SYMBOLIC_SHAPE, Reason.RUNTIME_NUMBER}
