"""What crosses the edge of a region, and what of it leaves."""

from __future__ import annotations

from thunder_cg.analysis.region_io import RegionOutput, region_ios


def edges(trace, returned="", saved=""):
    return region_ios(trace.done(), trace.plan(), set(returned.split()), set(saved.split()))


def test_what_is_only_returned_leaves(trace):
    (edge,) = edges(trace().add("a b", "g").add("g", "h").returns("h"), "h")
    assert edge.inputs == ("a", "b") and edge.outputs_ == (RegionOutput("h", inside=False, leaves=True),)
    assert not edge.written and not edge.alive


def test_what_is_saved_stays_inside(trace):
    (edge,) = edges(trace().add("a", "g").add("g", "h").returns("h g"), "h", "g")
    assert edge.outputs_ == (RegionOutput("g", inside=True, leaves=False), RegionOutput("h", inside=False, leaves=True))


def test_what_is_returned_and_saved_goes_both_ways(trace):
    (edge,) = edges(trace().add("a", "g").add("g", "h").returns("h"), "h", "h")
    assert edge.outputs_ == (RegionOutput("h", inside=True, leaves=True),)


def test_values_between_regions_live_until_their_last_use(trace):
    t = trace().add("a", "g").add("g", "h").item("h", "n1").op("mul", "h n1", "i").add("i g", "j").add("j", "k")
    first, second = edges(t.returns("k"), "k")
    assert set(first.outputs_) == {RegionOutput("g", True, False), RegionOutput("h", True, False)}
    assert set(second.inputs) == {"i", "g"} and not second.alive & {"g", "h"}


def test_what_a_region_writes(trace):
    t = trace().add("a", "g").op("copy_", "g b", "h").add("h", "i").returns("i")
    (edge,) = edges(t, "i")
    assert edge.written == {"b"}


def test_what_an_opaque_operator_sees_leaves(trace):
    """It may keep the tensor, so it must not be in the arena; whoever needs the value later uses the same one."""
    t = trace().add("a", "g").add("g", "h").mine("h", "x").add("x h", "i").add("i", "j").returns("j")
    first, second = edges(t, "j")
    assert first.outputs_ == (RegionOutput("h", inside=False, leaves=True),)
    assert set(second.inputs) == {"x", "h"}


def test_memory_that_leaves_and_is_written_later_is_handed_out_once(trace):
    t = trace().add("a", "g").add("g", "h").item("h", "n1").op("mul", "b n1", "k")
    t = t.op("copy_", "k h", "l").add("l", "m").returns("h m")
    first, second = edges(t, "h m")
    assert RegionOutput("h", inside=False, leaves=True) in first.outputs_
    assert "h" in second.written


def test_an_exit_may_be_a_view_of_what_it_shares_memory_with(trace):
    (edge,) = edges(trace().add("a", "g").add("g", "h").op("reshape", "b", "i").returns("h i"), "h i")
    assert "b" in edge.shared and "a" not in edge.shared


def test_what_leaves_early(trace):
    t = trace().add("a", "g").add("g", "h").op("reshape", "h", "i").add("i", "j").add("a", "k").add("k", "l")
    (edge,) = edges(t.returns("g h k l"), "g h k l")
    last = {exit.name: exit.last for exit in edge.outputs_}
    assert last == {"g": 1, "h": 3, "k": None, "l": None}


def test_what_does_not_leave_early(trace):
    """What shares memory with another result, or with an input, what is saved as well, and what is made last."""
    t = trace().add("a", "g").op("reshape", "g", "h").op("reshape", "b", "i").add("a", "j").add("j", "k")
    (edge,) = edges(t.returns("g h i j k"), "g h i j k", "j")
    assert all(exit.last is None for exit in edge.outputs_) and len(edge.outputs_) == 5
