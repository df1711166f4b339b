"""region_io: what a region gets and gives, and which outputs leave the pool."""

from __future__ import annotations

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.classify import UserRules, classify
from thunder_cg.analysis.partition import PlannedTrace, partition
from thunder_cg.analysis.region_io import RegionInput, RegionOutput, region_io


def records(trace, returned="", saved=""):
    ops = trace.done()
    names = set(returned.split()), set(saved.split())
    return region_io(PlannedTrace("forward", ops, Aliasing.of(ops), trace.plan(), *names))


def stays(name):
    return RegionOutput(name, copied_out=False)


def leaves(name, last_use=None):
    return RegionOutput(name, copied_out=True, last_use=last_use)


def names(inputs):
    return {given.name for given in inputs}


def test_a_returned_value_is_copied_out(trace):
    (io,) = records(trace().add("a b", "g").add("g", "h").returns("h"), "h")
    assert io.inputs == (RegionInput("a", False, False), RegionInput("b", False, False))
    assert io.outputs == (leaves("h"),) and not io.alive and not io.scalars


def test_a_saved_value_stays_in_the_pool(trace):
    (io,) = records(trace().add("a", "g").add("g", "h").returns("h g"), "h", "g")
    assert io.outputs == (stays("g"), leaves("h"))


def test_a_value_that_is_returned_and_saved_has_two_outputs(trace):
    (io,) = records(trace().add("a", "g").add("g", "h").returns("h"), "h", "h")
    assert io.outputs == (stays("h"), leaves("h"))


def test_values_between_regions_live_until_their_last_use(trace):
    t = trace().add("a", "g").add("g", "h").item("h", "n1").op("mul", "h n1", "i").add("i g", "j").add("j", "k")
    first, second = records(t.returns("k"), "k")
    assert set(first.outputs) == {stays("g"), stays("h")}
    assert names(second.inputs) == {"i", "g"} and not second.alive & {"g", "h"}


def test_inputs_that_a_region_writes(trace):
    t = trace().add("a", "g").op("copy_", "g b", "h").add("h", "i").returns("i")
    (io,) = records(t, "i")
    assert [given.name for given in io.inputs if given.written] == ["b"]


def test_a_value_that_an_opaque_operator_gets_leaves(trace):
    """The operator may keep the tensor, so it must not be in the arena; all users get the same copy."""
    t = trace().add("a", "g").add("g", "h").mine("h", "x").add("x h", "i").add("i", "j").returns("j")
    first, second = records(t, "j")
    assert first.outputs == (leaves("h"),)
    assert names(second.inputs) == {"x", "h"}


def test_a_returned_value_that_is_written_later_has_one_output(trace):
    t = trace().add("a", "g").add("g", "h").item("h", "n1").op("mul", "b n1", "k")
    t = t.op("copy_", "k h", "l").add("l", "m").returns("h m")
    first, second = records(t, "h m")
    assert leaves("h") in first.outputs and stays("h") not in first.outputs
    assert RegionInput("h", written=True, aliased=False) in second.inputs


def test_an_input_is_aliased_if_an_output_may_be_a_view_of_it(trace):
    (io,) = records(trace().add("a", "g").add("g", "h").op("reshape", "b", "i").returns("h i"), "h i")
    assert {given.name: given.aliased for given in io.inputs} == {"a": False, "b": True}


def test_outputs_copied_out_early(trace):
    t = trace().item("a", "n1").add("a", "g").add("g", "h").op("reshape", "h", "i").add("i", "j")
    (io,) = records(t.add("a", "k").add("k", "l").returns("g h k l"), "g h k l")
    assert io.outputs == (leaves("g", 1), leaves("h", 3), leaves("k"), leaves("l"))


def test_outputs_not_copied_out_early(trace):
    """Outputs that share memory with another output or with an input, saved ones, and those made last."""
    t = trace().add("a", "g").op("reshape", "g", "h").op("reshape", "b", "i").add("a", "j").add("j", "k")
    (io,) = records(t.returns("g h i j k"), "g h i j k", "j")
    assert all(output.last_use is None for output in io.outputs) and len(io.outputs) == 6


def test_numbers_that_only_kernels_get_are_scalars(trace):
    t = trace()
    draw = t.make("UNIFORM_PHILOX", "n1 n2", "b", executor=None, keywords=(("seed", "n1"), ("offset", "n2")))
    t.op(
        None, "a n1 n2", "b", executor="nvfuser", is_fusion=True, subs=(draw, t.make("ADD", "a b", "b", executor=None))
    )
    ops = t.add("b", "g").returns("g").done()
    aliasing = Aliasing.of(ops)
    verdicts = classify(ops, aliasing, UserRules(), "cuda", supports_scalar_updates=True)
    plan = partition(ops, verdicts, aliasing)
    (io,) = region_io(PlannedTrace("forward", ops, aliasing, plan, {"g"}, set()))
    assert io.scalars == ("n1", "n2") and names(io.inputs) == {"a"}
