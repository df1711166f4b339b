"""rules: every symbol of Thunder's torch executor has a record, and the records agree with torch."""

from __future__ import annotations

import ast
import dataclasses
from enum import Enum
from pathlib import Path

import pytest
import thunder
import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy  # noqa: F401  (Thunder must be whole before its executors are listed)
from thunder.executors import pythonex, sdpaex, torchex

from thunder_cg.analysis import rules
from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import _is_bookkeeping
from thunder_cg.analysis.rules import RULES, Reason, conditions, executors, prims, torch as torch_rules
from thunder_cg.analysis.rules.record import CAPTURED, Arguments, Condition
from thunder_cg.compat.settings import Settings


def test_every_symbol_of_the_torch_executor_has_exactly_one_row():
    missing = [name for name in torchex.ex.opmap if ("torch", name) not in RULES]
    assert not missing, f"no row for {missing}: see how each behaves in a capture, and add it to rules/torch.py"
    assert len(RULES) == len(torch_rules.RULES) + len(prims.RULES) + len(executors.RULES)


@pytest.mark.parametrize("executor", [pythonex.ex, sdpaex.sdpa_ex])
def test_every_symbol_of_the_other_default_executors_has_a_row(executor):
    for name in executor.opmap:
        key = (executor.name, name)
        assert key in RULES or _is_bookkeeping(executor.name, name), key


@pytest.mark.parametrize("name", ["torchcompile", "torchcompile_cat", "torchcompile_xentropy"])
def test_everything_that_torch_compile_may_fuse_has_a_row(name):
    fuses = {id_.name if isinstance(id_, Enum) else id_ for id_ in thunder.extend.get_executor(name)._implmap}
    assert rules.executor_rule(name).fuses and len(fuses) > 5
    assert [id_ for id_ in fuses if not (has_row(None, id_) or has_row("torch", id_) or is_composite(id_))] == []


def test_everything_that_nvfuser_may_fuse_has_a_row():
    """Read off its source, as it cannot be imported without nvFuser."""
    tree = ast.parse((Path(thunder.__file__).parent / "executors" / "nvfuserex_impl.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args]
    own = {n.args[0].value for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == "register_operator"}
    named = [n for n in calls if getattr(n.func, "attr", getattr(n.func, "id", "")).startswith("register_supported")]
    fused = {ast.unparse(n.args[0]) for n in named} - {f"{name}.id" for name in own} - {"sym_or_id", "prim_id"}
    assert {("nvfuser", name) for name in own} <= RULES.keys() and len(own) == 4
    assert len(fused) > 80 and "PrimIDs.UNIFORM_PHILOX" in fused and "ltorch.embedding" in fused
    assert [name for name in sorted(fused) if not has_row_as_written(name)] == []
    assert rules.executor_rule("nvfuser").fuses


def has_row_as_written(name):
    space, _, last = name.rpartition(".")
    if space == "ltorch":
        return has_row(None, getattr(thunder.torch, last).id) or is_composite(f"torch.{last}")
    return has_row(None, last if space.endswith("PrimIDs") else getattr(thunder.core.prims, last).id.name)


def is_composite(id_):
    """Whether Thunder writes it out in a trace, so that the rules look at what it is made of."""
    symbol = getattr(thunder.torch, id_.rpartition(".")[2], None)
    return id_.startswith("torch.") and symbol is not None and not symbol.is_prim


def has_row(executor, id_):
    return rules.find(executor, id_) is not None or _is_bookkeeping(executor, id_)


def test_every_prim_has_a_row_or_is_bookkeeping():
    dropped = {"DEL", "COMMENT"}
    missing = [
        prim.name
        for prim in PrimIDs
        if (None, prim.name) not in RULES and not _is_bookkeeping(None, prim.name) and prim.name not in dropped
    ]
    assert not missing


def test_no_row_is_about_a_symbol_that_does_not_exist():
    forward = [name for executor, name in RULES if executor == "torch" and not name.endswith(rules.VJP)]
    assert [name for name in forward if name not in torchex.ex.opmap] == []
    assert len(set(forward)) == len(forward)


def test_every_row_says_why_and_who_says_so():
    for (executor, name), rule in RULES.items():
        evidence = {rule.evidence, RULES[executor, name.removesuffix(rules.VJP)].evidence}  # its operator's, too
        is_measured = any(found.value.startswith("measured") for found in evidence)
        assert rule.cause.detail and (is_measured or rule.cause.source or rule.cause is CAPTURED), rule.key
        for condition in rule.conditions:
            cause = condition.cause
            is_measured = condition.evidence.value.startswith("measured")
            assert cause is None or (cause.detail and cause.fix and (is_measured or cause.source)), condition.name
            assert cause is None or not cause.captures


def test_every_condition_says_when_it_holds_and_what_follows():
    found = {condition.name: condition for rule in RULES.values() for condition in rule.conditions}
    defined = [value for value in vars(conditions).values() if isinstance(value, Condition)]
    assert {condition.name for condition in defined} == set(found) and len(found) >= 16
    for condition in found.values():
        assert condition.when.endswith(".") and condition.name.isidentifier()
        assert condition.cause or condition.aliases or condition.writes or condition.draws


def test_no_rule_names_a_condition_twice():
    for rule in RULES.values():
        assert len({condition.name for condition in rule.conditions}) == len(rule.conditions), rule.key


def test_every_operator_that_can_be_told_to_write_in_place_has_the_condition():
    found = {key[1] for key, rule in RULES.items() if rules.IN_PLACE in rule.conditions}
    for name in torchex.ex.opmap:
        positions = rules.positions(torchex.ex.opmap[name].meta, name.rsplit(".", 1)[-1])
        assert ("inplace" in positions) <= (name in found), name


def test_a_derivative_is_allowed_only_if_its_operator_is():
    for (executor, name), rule in RULES.items():
        if executor == "torch" and rule.captures and name.endswith(rules.VJP):
            assert RULES["torch", name.removesuffix(rules.VJP)].captures


def test_an_op_evaluates_only_the_conditions_of_its_rule(traces_of, monkeypatch):
    asked = []

    def recorded(condition):
        def predicate(arguments: Arguments) -> bool:
            asked.append(condition.name)
            return condition.predicate(arguments)

        return dataclasses.replace(condition, predicate=predicate)

    changed = {
        key: dataclasses.replace(rule, conditions=tuple(map(recorded, rule.conditions))) for key, rule in RULES.items()
    }
    monkeypatch.setattr(rules, "RULES", changed)
    traces_of(lambda x: torch.relu(torch.sin(x)), torch.randn(3))
    assert set(asked) == {"writes_in_place"}


UNSAFE_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def test_what_torch_tags_as_unsafe_is_not_allowed_outright():
    """Overloads share a symbol, so a row may be conditional; ``index.Tensor`` is one, and goes by ``__getitem__``."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not hasattr(packet, "overloads"):
            continue
        if any(tag in getattr(packet, overload).tags for overload in packet.overloads() for tag in UNSAFE_TAGS):
            rule = RULES.get(("torch", name))
            assert rule is None or not rule.captures or any(c.cause for c in rule.conditions), name


def test_what_torch_calls_a_view_is_one():
    """Read off the schemas: an alias that is not written."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        rule = RULES.get(("torch", name))
        if rule is None or not rule.captures or not hasattr(packet, "overloads"):
            continue
        for overload in packet.overloads():
            arguments = getattr(packet, overload)._schema.arguments
            aliased = [a for a in arguments if a.alias_info is not None and a.type.str().startswith("Tensor")]
            if aliased and not any(a.alias_info.is_write for a in aliased):
                assert rule.aliases, f"aten::{name}.{overload}"


def test_what_torch_seeds_is_random():
    seeded = {"alpha_dropout", "dropout", "native_dropout", "poisson", "rand", "randint", "randint_like", "randn"}
    for name in seeded:
        assert RULES["torch", name].draws, name


def test_the_same_reason_holds_for_a_prim_and_for_what_claims_it():
    for prim, name in [("ITEM", "item"), ("GET_AND_UPDATE_RNG_STATE", "get_and_update_rng_state_impl")]:
        assert RULES[None, prim].cause.reason is RULES["torch", name].cause.reason
        assert not RULES[None, prim].captures


def test_thunders_own_torch_symbols_are_looked_up_by_their_last_name():
    assert rules.key_of(None, "torch.nn.functional.linear") == ("torch", "linear")
    assert rules.key_of(None, "torch.ops.aten.embedding_backward") == ("torch", "torch.ops.aten.embedding_backward")
    assert rules.key_of(None, "Tensor.numpy") == ("torch", "numpy")
    assert rules.key_of(None, "ADD") == (None, "ADD")
    assert rules.key_of("my_ex", "torch.add") == ("my_ex", "torch.add")


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x: x.view(-1), (torch.randn(2, 3),)),
        (lambda x: x.t(), (torch.randn(2, 3),)),
        (lambda x: x[0], (torch.randn(2, 3),)),
        (lambda x: x.expand(4, 3), (torch.randn(1, 3),)),
        (lambda x: x.reshape(3, 2), (torch.randn(2, 3),)),
        (lambda x: x.contiguous(), (torch.randn(2, 3),)),
        (lambda x: x.unsqueeze(0), (torch.randn(2, 3),)),
        (lambda x: x.chunk(2)[0], (torch.randn(2, 3),)),
        (lambda x: x.flatten(), (torch.randn(2, 3),)),
        (lambda x: x.detach(), (torch.randn(2, 3),)),
        (lambda x: torch.einsum("ij->ji", x), (torch.randn(2, 3),)),
        (lambda x: x.real, (torch.randn(2, 3),)),
        (lambda x: torch.atleast_2d(x), (torch.randn(2, 3),)),
        (lambda x: x + 1, (torch.randn(2, 3),)),
    ],
)
def test_what_shares_memory_when_run_shares_an_alias_set(traces_of, fn, args):
    (ops,) = traces_of(fn, *args)
    result = thunder.jit(fn)(*args)
    shares = result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
    sets = Aliasing.of(ops).sets
    (returned,) = (op.inputs for op in ops.ops if op.id == "RETURN")
    same = all(sets[name] == sets["x"] for name in returned if name in sets)
    assert same or not shares


def test_reasons_are_sentences_of_their_own():
    assert len({reason.value for reason in Reason}) == len(Reason)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("torch.add", Settings.NONE),
        ("torch.nn.functional.linear", Settings.MATMUL),
        ("torch.nn.functional.conv2d", Settings.ALL),
        ("torch.nn.functional.scaled_dot_product_attention", Settings.ALL),
    ],
)
def test_settings_by_which_kernels_may_be_chosen(trace, name, settings):
    assert trace().make(name, executor=None).settings == settings
    assert trace().make(f"{name.rsplit('.', 1)[-1]}_vjp").settings == settings


def test_unknown_operators_may_depend_on_all_settings(trace):
    assert trace().make("my_op", executor="my_ex").settings == Settings.ALL
    eager = trace().make("cholesky")
    assert not eager.rule.captures and eager.settings == Settings.ALL  # allow= may have it captured


def test_a_compiler_may_put_other_operators_in_a_fusion(trace):
    make = trace().make
    pointwise, product = make("ADD", executor=None), make("MATMUL", executor=None)
    assert make(None, executor="nvfuser", is_fusion=True, subs=(pointwise,)).settings == Settings.NONE
    assert make(None, executor="nvfuser", is_fusion=True, subs=(pointwise, product)).settings == Settings.ALL
