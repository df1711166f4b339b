"""aliasing: what may share memory does, and nothing is written behind anybody's back."""

from __future__ import annotations

import inspect

import pytest
import torch

from thunder_cg.analysis.aliasing import Aliasing, has_effect, is_opaque


def together(ops, *names):
    return len({Aliasing.of(ops).sets[name] for name in names}) == 1


@pytest.mark.parametrize("id_", ["reshape", "view", "permute", "__getitem__", "expand", "transpose", "squeeze"])
def test_views_share_with_their_first_input_only(trace, id_):
    ops = trace().op(id_, "a i", "b").done()
    assert together(ops, "a", "b") and not together(ops, "a", "i")


@pytest.mark.parametrize("id_", ["contiguous", "to", "dropout", "einsum", "shallow_copy", "torch_prims_reshape_impl"])
def test_what_may_return_its_input_shares(trace, id_):
    assert together(trace().op(id_, "a", "b").done(), "a", "b")


@pytest.mark.parametrize("id_", ["add", "clone", "cat", "linear", "index_select"])
def test_fresh_results_do_not(trace, id_):
    assert not together(trace().op(id_, "a b", "g").done(), "a", "g")


def test_all_parts_of_a_split_share(trace):
    assert together(trace().op("split", "a", "b g h").done(), "a", "b", "g", "h")


def test_update_aliases_goes_pair_by_pair(trace):
    ops = trace().op("update_aliases", "a b", "g h").done()
    assert together(ops, "a", "g") and together(ops, "b", "h") and not together(ops, "a", "b")


def test_copy_writes_its_destination_and_returns_it(trace):
    ops = trace().op("copy_", "a b", "g").done()
    aliasing = Aliasing.of(ops)
    assert aliasing.writes == ({"b"},) and together(ops, "b", "g") and not together(ops, "a", "b")
    assert aliasing.reads == ({"a", "b"},)


def test_a_copy_onto_itself_writes_it(trace):
    ops = trace().op("copy_", "a", "g").done()
    assert Aliasing.of(ops).writes == ({"a"},)


def test_the_representative_is_the_oldest(trace):
    ops = trace().op("view", "a", "b").op("permute", "b", "g").done()
    assert Aliasing.of(ops).sets["g"] == "a"


def test_an_unknown_operator_may_write_and_return_anything(trace):
    ops = trace().mine("a b", "g").done()
    aliasing = Aliasing.of(ops)
    assert together(ops, "a", "b", "g") and aliasing.writes == ({"a"},)
    assert aliasing.opaque == aliasing.effects == {0}


def test_a_torch_custom_op_is_unknown_but_writes_nothing(trace):
    ops = trace().op("torch.ops.my.op", "a b", "g", executor="custom_op").done()
    assert not together(ops, "a", "g") and Aliasing.of(ops).writes == (set(),) and has_effect(ops.ops[0])


def test_a_fusion_is_what_is_inside_of_it(trace):
    t = trace()
    subs = (
        t.make("torch.Tensor.add_", "a b", "g", executor=None, subs=(t.make("COPY_", "x a", "g", executor=None),)),
        t.make("TRANSPOSE", "b", "h", executor=None),
        t.make("ADD", "b", "i", executor=None),
    )
    ops = t.op(None, "a b", "g h i", executor="torchcompile", is_fusion=True, subs=subs).done()
    assert Aliasing.of(ops).writes == ({"a"},)
    assert together(ops, "a", "g") and together(ops, "b", "h") and not together(ops, "b", "i")
    assert not is_opaque(ops.ops[0]) and not has_effect(ops.ops[0])


def test_a_fusion_that_draws_or_hides_something_unknown_has_an_effect(trace):
    t = trace()
    draws = t.make(
        None, "a", "b", executor="torchcompile", is_fusion=True, subs=(t.make("UNIFORM", "", "b", executor=None),)
    )
    hides = t.make(
        None, "a", "b", executor="torchcompile", is_fusion=True, subs=(t.make("mine", "a", "b", executor="x"),)
    )
    other = t.make(None, "a", "b", executor="someone", is_fusion=True)
    assert has_effect(draws) and not is_opaque(draws)
    assert is_opaque(hides) and is_opaque(other)


def test_attention_draws_only_with_dropout(trace):
    make = trace().make
    assert not has_effect(make("scaled_dot_product_attention", "a", "b"))
    assert has_effect(make("scaled_dot_product_attention", "a", "b", conditions=frozenset({"has_dropout"})))


@pytest.mark.parametrize("id_", ["uniform", "rand", "dropout", "get_and_update_rng_state_impl", "torch_wait_prim_impl"])
def test_draws_and_collectives_have_effects(trace, id_):
    assert has_effect(trace().make(id_, "a", "b"))


@pytest.mark.parametrize("id_", ["add", "item", "copy_", "linear"])
def test_other_operators_have_none(trace, id_):
    assert not has_effect(trace().make(id_, "a", "b"))


# ---------------------------------------------------------------------------------------------------------- real traces


def written_names(ops):
    aliasing = Aliasing.of(ops)
    written = {name for names in aliasing.writes for name in names}
    return {name for name in ops.args if aliasing.sets.get(name) in written}


def test_batch_norm_writes_its_running_statistics(traces_of):
    model = torch.nn.BatchNorm1d(3)
    forward, backward = traces_of(model, torch.randn(2, 3))
    assert {n.removeprefix("t_") for n in written_names(forward)} == {
        "num_batches_tracked",
        "running_mean",
        "running_var",
    }
    assert not written_names(backward)


def test_batch_norm_without_autograd_hides_its_writes_and_they_are_found(traces_of):
    model = torch.nn.BatchNorm1d(3)
    with torch.no_grad():
        (ops,) = traces_of(model, torch.randn(2, 3))
    assert {"t_running_mean", "t_running_var"} <= written_names(ops)


def test_in_place_on_an_argument(traces_of):
    def model(x, y):
        x.mul_(2)
        return x + y, x.t()

    (ops,) = traces_of(model, torch.randn(2, 2), torch.randn(2, 2))
    assert written_names(ops) == {"x"}


def test_in_place_inside_a_fusion(traces_of):
    from thunder.executors.torch_compile import torch_compile_ex

    def model(x, y):
        x.add_(y)
        return torch.sin(x)

    (ops,) = traces_of(model, torch.randn(2), torch.randn(2), executors=[torch_compile_ex])
    assert any(op.is_fusion for op in ops.ops) and written_names(ops) == {"x"}


def test_setitem_on_a_view_writes_the_base(traces_of):
    def model(x):
        y = x + 1
        v = y[0]
        v.add_(1)
        return y

    (ops,) = traces_of(model, torch.randn(2, 2))
    aliasing = Aliasing.of(ops)
    (result,) = (op.inputs for op in ops.ops if op.id == "RETURN")
    assert not aliasing.sets_of(result).isdisjoint(name for names in aliasing.writes for name in names)


functional = torch.nn.functional
CHOICES = {name: inspect.signature(f).parameters for name, f in vars(functional).items() if inspect.isfunction(f)}
INPLACE = sorted(name for name, choices in CHOICES.items() if "inplace" in choices and name[0] != "_")
GIVEN = {"p": 0.4, "threshold": 0.1, "value": 0.2, "training": True, "inplace": True}


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("name", INPLACE)
@pytest.mark.nightly_after(30)
def test_what_is_told_to_write_in_place_does(traces_of, name, by_keyword, graded):
    """All functions of PyTorch's that can be told so, as far as Thunder compiles them."""
    choices = list(CHOICES[name].values())[1:]
    given = {c.name: GIVEN.get(c.name, c.default) for c in choices if c.name in GIVEN or not by_keyword}

    def model(x):
        y = torch.sin(x)
        z = getattr(functional, name)(y, **given) if by_keyword else getattr(functional, name)(y, *given.values())
        return y, z

    try:
        ops, *_ = traces_of(model, torch.randn(2, 3, 4, 4, requires_grad=graded))
    except NotImplementedError:
        assert "dropout" in name
        return
    aliasing = Aliasing.of(ops)
    (sin,) = (op for op in ops.ops if op.id == "sin")
    assert aliasing.sets[sin.outputs[0]] in {name for names in aliasing.writes for name in names}
    *_, last = (op for op in ops.ops if op.outputs and not op.bookkeeping)
    assert together(ops, last.outputs[0], sin.outputs[0])


@pytest.mark.parametrize("sparse", [False, True])
def test_a_sparse_gradient_is_made_of_what_it_is_computed_from(trace, sparse):
    conditions = frozenset({"has_sparse_gradient"} if sparse else ())
    ops = trace().op("torch.ops.aten.embedding_backward", "g i", "w", conditions=conditions).done()
    assert len(Aliasing.of(ops).sets_of("giw")) == (1 if sparse else 3)
