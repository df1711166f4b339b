"""collectives: issued early, waited for late, in one order that the trace alone decides."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace

import collective_traces
import pytest
from thunder.distributed.prims import DistributedReduceOps
from torch.distributed import ProcessGroup

from thunder_cg.analysis import classify, coalescing, collectives, pieces
from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.collectives import Movable, Scheduler, needless_copies, waits_before_writes
from thunder_cg.analysis.dependencies import dependencies
from thunder_cg.analysis.pieces import compute_in_pieces

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def call(t, kind, inputs, outputs):
    return t.op(f"torch_{kind}_prim_impl", inputs, outputs)


def order(t):
    """The outputs of the ops in the order of the schedule; ``end`` for the return."""
    ops = t.done()
    return " ".join(
        ops.ops[i].outputs[0] if ops.ops[i].outputs else "end" for i in Scheduler(Movable(ops, Aliasing.of(ops))).run()
    )


def ddp(t, gradients=3):
    """A backward as Thunder writes it: gradients, then divisions and reductions, then waits."""
    for i in range(gradients):
        t.op("mul", f"x{i} y", f"x{i + 1}").op("matmul", f"x{i + 1} y", f"g{i}")
    for i in range(gradients):
        t.op("true_divide", f"g{i}", f"h{i}")
        call(t, "all_reduce", f"h{i}", f"f{i}")
    for i in range(gradients):
        call(t, "wait", f"f{i}", f"r{i}")
    return t.returns(" ".join(f"r{i}" for i in range(gradients)))


def fsdp(t, first_uses="dbca"):
    """A forward as Thunder writes it: gathers by name, waits, views of what was gathered, then the layers."""
    for name in "abcd":
        call(t, "all_gather", f"p{name}", f"f{name}")
    for name in "abcd":
        call(t, "wait", f"f{name}", f"w{name}").op("permute", f"w{name}", f"v{name}")
    for name, x, y in zip(first_uses, "xyzk", "yzkl"):
        t.op("linear", f"{x} v{name}", y)
    return t.returns("l")


@dataclass(frozen=True)
class Bound:
    """What the schedule looks at of a bound symbol."""

    args: tuple
    kwargs: dict = field(default_factory=dict)

    @property
    def flat_args(self):
        return list(self.args)


def in_pieces(t, order=compute_in_pieces):
    ops = t.done()
    outputs = [ops.ops[i].outputs for i in order(ops, Aliasing.of(ops))]
    return " ".join(names[0] if names else "end" for names in outputs)


def test_a_wait_comes_before_what_the_collective_uses_is_written(trace):
    """Thunder moves waits down to the first use of what they give."""
    t = call(call(trace(), "all_gather", "x", "f"), "all_gather", "y", "g")
    t.op("mul", "x x", "a").op("copy_", "a x", "w").op("mul", "a a", "b")
    t = call(call(t, "wait", "g", "s"), "wait", "f", "r")
    assert in_pieces(t.returns("r s b w"), waits_before_writes) == "f g a r w b s end"


def test_a_fuser_finds_compute_together(trace):
    """Divisions of gradients come before their reductions, but nothing before a wait or a collective that it needs."""
    assert in_pieces(ddp(trace())) == "x1 g0 h0 x2 g1 h1 x3 g2 h2 f0 f1 f2 r0 r1 r2 end"
    assert in_pieces(fsdp(trace())) == "fd wd fb wb fc wc fa wa vd y vb z vc k va l end"
    t = call(trace().op("mul", "x0 y", "a"), "all_reduce", "a", "f")
    t.op("mul", "x0 x0", "b")
    call(t, "wait", "f", "r").op("mul", "r b", "c").op("mul", "b b", "d")
    assert in_pieces(t.returns("c d")) == "a b f r c d end"
    t = call(trace().op("mul", "x0 y", "a"), "all_reduce", "a", "f")
    t.op("mul", "x0 x0", "b").op("copy_", "b a", "w").op("mul", "a a", "e")  # it writes what is reduced
    assert in_pieces(call(t, "wait", "f", "r").returns("r e")) == "a b f w e r end"


def test_a_fuser_leaves_room_for_what_overlaps(trace, monkeypatch):
    """Of four collectives of 4 bytes, two are a piece: what is made is reduced beside the other half of the compute."""
    monkeypatch.setattr(pieces, "_PIECE", 8)
    assert in_pieces(ddp(trace(), 4)) == "x1 g0 h0 x2 g1 h1 f0 f1 x3 g2 h2 x4 g3 h3 f2 f3 r0 r1 r2 r3 end"
    assert in_pieces(fsdp(trace())) == "fd wd fb wb vd y vb z fc wc fa wa vc k va l end"
    monkeypatch.setattr(pieces, "_PIECE", 1)
    monkeypatch.setattr(pieces, "_PIECES", 2)
    assert in_pieces(ddp(trace(), 4)) == "x1 g0 h0 x2 g1 h1 f0 f1 x3 g2 h2 x4 g3 h3 f2 f3 r0 r1 r2 r3 end"


def test_a_fuser_cuts_where_the_least_is_needed_on_both_sides(trace, monkeypatch):
    """Two gradients are a piece. The third one of the layer needs what the second one does, the next layer does not."""
    monkeypatch.setattr(pieces, "_PIECE", 8)
    t = trace()
    for i in range(3):
        t.op("mul", f"x{i} y", f"s{i} t{i}")
        for name in "abc":
            t.op("matmul", f"s{i} t{i}", f"{name}{i}")
        t.op("mul", f"x{i} y", f"x{i + 1}")
    names = [f"{name}{i}" for i in range(3) for name in "abc"]
    for name in names:
        call(t, "all_reduce", name, f"f{name}")
    for name in names:
        call(t, "wait", f"f{name}", f"r{name}")
    t.returns(" ".join(f"r{name}" for name in names))
    assert in_pieces(t).startswith("s0 a0 b0 c0 fa0 fb0 fc0 x1 s1 a1 b1 c1 fa1 fb1 fc1 x2 s2 ")


@pytest.mark.parametrize(
    ("kind", "ranks", "launches"),
    [("all_gather", 2, 2), ("all_gather", 4, 2), ("reduce_scatter", 2, 2), ("all_reduce", 2, 2), ("all_reduce", 4, 4)],
)
def test_small_collectives_of_a_kind_are_one_launch(trace, monkeypatch, kind, ranks, launches):
    """Three of 4 bytes fit in one launch. More than two ranks sum in an order that depends on how much is summed."""
    monkeypatch.setattr(coalescing, "_COALESCED", 12)
    t, bound = trace(), Bound((ProcessGroup(0, ranks), DistributedReduceOps.SUM))
    for i in range(4):
        t.op(f"torch_{kind}_prim_impl", f"p{i}", f"f{i}", symbol=bound)
    ops = t.done()
    assert len(coalescing.coalesced(ops.ops, ops.values)) == launches


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 20])
def test_memory_does_not_decide_what_is_one_launch(trace, monkeypatch, nbytes):
    """A rank with a small batch would have one region and one launch where others keep the order of the trace."""
    monkeypatch.setattr(classify, "capture_problem", lambda group, device_type: None)  # it asks a group that works
    t, bound = trace(**{f"b{i}": nbytes for i in range(8)}), Bound((ProcessGroup(0, 2),))
    for i in range(2):
        t.op("torch_all_gather_prim_impl", f"a{i}", f"f{i}", symbol=bound)
    for i in range(8):
        t.add("a", f"b{i}").add("a", f"g{i}").item(f"b{i}", f"n{i}")
    for i in range(2):
        call(t, "wait", f"f{i}", f"w{i}")
    (region,) = t.returns("w0 w1").regions()
    assert region[:2] == (0, 1)


def test_what_differs_is_not_one_launch(trace):
    group, other = ProcessGroup(0, 2), ProcessGroup(0, 2)
    t = trace()
    for i, args in enumerate([
        (group, DistributedReduceOps.SUM), (group, DistributedReduceOps.SUM), (other, DistributedReduceOps.SUM),
        (group,), (group,), (),
    ]):  # fmt: skip
        t.op("torch_all_reduce_prim_impl", f"p{i}", f"f{i}", symbol=Bound(args))
    t.op("torch_all_gather_prim_impl", "p6", "f6", symbol=Bound((group,)))
    t.op("torch_all_reduce_prim_impl", "p7", "x7", symbol=Bound((group,)))  # it waits at once: no future
    ops = t.done()
    assert coalescing.coalesced(ops.ops, ops.values) == [[0, 1], [2], [3, 4], [5], [6], [7]]


def test_which_reductions_need_no_copy(trace):
    """Those of what an op, or a fusion that keeps its results apart, has made for them alone."""
    t, group = trace(), ProcessGroup(0, 2)

    def reduced(name, waits=False, in_place=False):
        args = (name, DistributedReduceOps.SUM, group, not waits, in_place)
        made = f"r{name}" if waits else f"f{name}"
        t.op("torch_all_reduce_prim_impl", name, made, symbol=Bound(args))
        return len(t.ops) - 1

    t.op("mul", "x y", "a").op("mul", "x y", "b").op("mul", "x y", "e").op("permute", "e", "g").op("mul", "x y", "h")
    inside = (t.make("mul", "x y", "o"), t.make("mul", "x y", "q"))
    t.op(None, "x y", "o q", executor="inductor", is_fusion=True, subs=inside)
    t.op(None, "x y", "s", executor="torchcompile", is_fusion=True, subs=(t.make("mul", "x y", "s"),)).mine("x", "u")
    needless = [reduced("a"), reduced("o")]
    for name in ("b", "x", "g", "h", "h", "s", "u"):  # read, an argument, a view, twice, another fuser, unknown
        reduced(name)
    t.op("mul", "x y", "k").op("mul", "x y", "l")
    reduced("k", waits=True), reduced("l", in_place=True), reduced("q")  # q is returned
    t.op("mul", "b b", "v").op("mul", "b e", "w")
    call(t, "wait", "fa", "z").op("permute", "z", "m").returns("m v w q")
    ops = t.done()
    assert needless_copies(ops, Aliasing.of(ops)) == needless


def test_reductions_follow_their_gradient_and_waits_come_last(trace):
    expected = "x1 g0 h0 f0 x2 g1 h1 f1 x3 g2 h2 f2 r0 r1 r2 end"
    assert order(ddp(trace())) == expected


def test_gathers_come_in_the_order_of_first_use_and_waits_right_before_it(trace):
    assert order(fsdp(trace())) == "fd fb fc fa wd vd y wb vb z wc vc k wa va l end"


def test_no_more_is_gathered_ahead_than_the_limit(trace, monkeypatch):
    """Of the four gathers of 4 bytes, the next is issued before the op that it may run beside."""
    monkeypatch.setattr(collectives, "_IN_FLIGHT", 4)
    assert order(fsdp(trace())) == "fd wd vd fb y wb vb fc z wc vc fa k wa va l end"
    monkeypatch.setattr(collectives, "_IN_FLIGHT", 8)
    assert order(fsdp(trace())) == "fd fb wd vd fc y wb vb fa z wc vc k wa va l end"


def test_no_more_reductions_are_waited_for_than_the_limit(trace, monkeypatch):
    monkeypatch.setattr(collectives, "_IN_FLIGHT", 8)
    expected = "x1 g0 h0 f0 x2 g1 h1 f1 x3 g2 h2 f2 r0 x4 g3 h3 f3 r1 r2 r3 end"
    assert order(ddp(trace(), 4)) == expected


def test_one_reduction_is_in_flight_however_large(trace, monkeypatch):
    monkeypatch.setattr(collectives, "_IN_FLIGHT", 1)
    assert order(ddp(trace(), 2)) == "x1 g0 h0 f0 x2 g1 h1 f1 r0 r1 end"


def test_what_one_fusion_makes_or_uses_is_in_flight_while_another_runs(trace, monkeypatch):
    monkeypatch.setattr(collectives, "_IN_FLIGHT", 4)
    t = trace()
    for piece in "ab":
        t.op("matmul", "x y", f"{piece}0 {piece}1")
        for i in range(2):
            call(t, "all_reduce", f"{piece}{i}", f"f{piece}{i}")
    for name in ("a0", "a1", "b0", "b1"):
        call(t, "wait", f"f{name}", f"r{name}")
    assert order(t.returns("ra0 ra1 rb0 rb1")) == "a0 fa0 fa1 b0 fb0 fb1 ra0 ra1 rb0 rb1 end"
    t = trace()
    for name in ("a0", "a1", "b0", "b1"):
        call(call(t, "all_gather", f"p{name}", f"f{name}"), "wait", f"f{name}", f"w{name}")
    t.op("matmul", "x wa0 wa1", "y").op("matmul", "y wb0 wb1", "z").returns("z")
    assert order(t) == "fa0 fa1 wa0 wa1 fb0 fb1 y wb0 wb1 z end"


def test_a_reduction_whose_result_is_used_is_waited_for_there(trace):
    """As tensor parallelism has it: between the two runs what does not need the result."""
    t = trace().op("matmul", "x y", "g")
    call(call(t, "all_reduce", "g", "f"), "wait", "f", "r")
    t.op("mul", "x y", "z").op("add", "r z", "k").returns("k")
    assert order(t) == "g f z r k end"


def test_a_cast_before_a_gather_moves_with_it(trace):
    t = trace().op("mul", "x y", "z").op("to", "pa", "b")
    call(call(t, "all_gather", "b", "f"), "wait", "f", "w").op("linear", "z w", "k").returns("k")
    assert order(t) == "b f z w k end"


def test_a_reduction_of_a_reduction_is_issued_while_others_are_in_flight(trace):
    """As where sharded replicas reduce twice: not one after the other for each parameter."""
    t = trace()
    for i in range(2):
        t.op("matmul", "x y", f"g{i}")
    for i in range(2):
        call(call(t, "reduce_scatter", f"g{i}", f"f{i}"), "wait", f"f{i}", f"s{i}")
        call(call(t, "all_reduce", f"s{i}", f"fr{i}"), "wait", f"fr{i}", f"r{i}")
    assert order(t.returns("r0 r1")) == "g0 f0 g1 f1 s0 fr0 s1 fr1 r0 r1 end"


# --------------------------------------------------------------------------------------------------- what must not move


def test_a_division_whose_input_others_need_stays(trace):
    """Both would be alive at once, for longer than in the trace as it was."""
    t = trace().op("matmul", "x y", "g").op("mul", "g y", "z").op("true_divide", "g", "h")
    t = call(call(t.op("mul", "z y", "k"), "all_reduce", "h", "f"), "wait", "f", "r").returns("k r")
    assert order(t) == "g z h f k r end"


def test_a_write_to_what_is_being_gathered_stays_after_the_wait(trace):
    """The gather reads the parameter until its wait."""
    t = call(call(trace(), "all_gather", "pa", "f"), "wait", "f", "w")
    t.op("copy_", "x pa", "b").op("linear", "y w", "k").returns("k b")
    assert order(t) == "f w b k end"


def test_a_read_of_what_is_being_reduced_stays_after_the_wait(trace):
    """The reduction writes its input until its wait."""
    t = call(call(trace().op("matmul", "x y", "g"), "all_reduce", "g", "f"), "wait", "f", "r")
    t.op("mul", "g y", "k").op("add", "k r", "l").returns("l")
    assert order(t) == "g f r k l end"


def test_a_copy_of_what_was_waited_for_comes_as_late_as_the_wait(trace):
    """A collective in place is one in new memory and a copy."""
    t = call(call(trace().op("sin", "x", "z").op("matmul", "x y", "g"), "all_gather", "g", "f"), "wait", "f", "r")
    t.op("copy_", "r z", "c").op("mul", "y y", "k").op("mul", "k y", "l").op("add", "l c", "m").returns("m")
    assert order(t) == "z g f k l r c m end"


def test_a_copy_of_what_was_waited_for_stays_before_a_write_to_what_it_wrote(trace):
    t = call(call(trace().op("sin", "x", "z").op("matmul", "x y", "g"), "all_gather", "g", "f"), "wait", "f", "r")
    t.op("copy_", "r z", "c").op("mul", "y y", "k").op("copy_", "k z", "d").op("mul", "k y", "l").returns("l d")
    assert order(t) == "z g f k r c d l end"


def test_the_return_comes_after_collectives_that_only_other_ranks_need(trace):
    t = call(call(trace().op("matmul", "x y", "g"), "all_gather", "g", "f"), "wait", "f", "r").op("mul", "x y", "k")
    ops = t.returns("k").done()
    before = {name for index in dependencies(ops, Aliasing.of(ops))[-1] for name in ops.ops[index].outputs}
    assert before == {"f", "r", "k"}


def test_draws_let_collectives_pass_and_unknown_operators_do_not(trace):
    def backward(id_, executor):
        t = trace().op("matmul", "x y", "g").op(id_, "x", "k", executor=executor).op("mul", "k y", "l")
        return call(call(t, "all_reduce", "g", "f"), "wait", "f", "r").returns("l r")

    assert order(backward("dropout", "torch")) == "g f k l r end"
    assert order(backward("mine", "my_ex")) == "g k f l r end"


def test_an_unknown_operator_waits_for_the_collectives_before_it(trace):
    t = call(trace().op("matmul", "x y", "g"), "reduce_scatter", "g", "f")
    t.mine("y", "k").op("mul", "k y", "l")
    assert order(call(t, "wait", "f", "r").returns("l r")) == "g f k l r end"


def random_trace(trace, rng):
    t, pool, futures = trace(), ["a", "b", "pa", "pb"], []
    for i in range(rng.randint(5, 30)):
        kind = rng.choice(["add", "view", "copy", "mine", "rand", "wait", *COLLECTIVES])
        source = rng.choice(pool)
        if kind in COLLECTIVES:
            futures.append(f"f{i}")
            call(t, kind, source, futures[-1])
            continue
        if kind == "wait":
            if not futures:
                continue
            call(t, kind, futures.pop(rng.randrange(len(futures))), f"a{i}")
        elif kind == "add":
            t.add(f"{source} {rng.choice(pool)}", f"a{i}")
        elif kind == "view":
            t.op("permute", source, f"a{i}")
        elif kind == "copy":
            t.op("copy_", f"{source} {rng.choice(pool)}", f"a{i}")
        elif kind == "mine":
            t.mine(source, f"a{i}")
        else:
            t.op("rand", "", f"a{i}")
        pool.append(f"a{i}")
    return t.returns(" ".join(rng.sample(pool, min(3, len(pool)))))


def copies_of_results(ops):
    """Indices of copies of what waits give, also through views of it and copies."""
    names, found = set(), set()
    for op in ops.ops:
        if op.id == "copy_" and op.inputs[0] in names:
            found.add(op.index)
        if op.index in found or (op.id == "permute" and op.inputs[0] in names) or "wait" in (op.id or ""):
            names.update(op.outputs)
    return found


@pytest.mark.parametrize("limit", [1, 8, 1 << 20])
def test_schedules_are_legal(trace, monkeypatch, limit):
    monkeypatch.setattr(collectives, "_IN_FLIGHT", limit)
    moved = 0
    for seed in range(300):
        ops = random_trace(trace, random.Random(seed)).done()
        aliasing = Aliasing.of(ops)
        found = Scheduler(Movable(ops, aliasing)).run()
        assert sorted(found) == list(range(len(ops.ops))) and found[-1] == len(ops.ops) - 1
        position = {index: at for at, index in enumerate(found)}
        for later, before in enumerate(dependencies(ops, aliasing, collectives_in_order=False)):
            assert all(position[other] < position[later] for other in before)
        late = copies_of_results(ops)
        stay = [i for i in found if ops.ops[i].id in ("copy_", "my_op", "rand") or len(set(ops.ops[i].inputs)) > 1]
        stay = [i for i in stay if i not in late]
        assert stay == sorted(stay)
        moved += found != sorted(found)
    assert moved > 100


@pytest.mark.parametrize("make", [ddp, fsdp])
def test_a_schedule_is_scheduled_as_it_is(trace, make):
    ops = make(trace()).done()
    found = [ops.ops[i] for i in Scheduler(Movable(ops, Aliasing.of(ops))).run()]
    again = replace(ops, ops=tuple(replace(op, index=at) for at, op in enumerate(found)))
    assert Scheduler(Movable(again, Aliasing.of(again))).run() == list(range(len(found)))


def test_a_long_backward_is_scheduled_fast(trace):
    t = ddp(trace(), 1000)
    ops, start = t.done(), time.perf_counter()
    Scheduler(Movable(ops, Aliasing.of(ops))).run()
    assert time.perf_counter() - start < 5.0


# ---------------------------------------------------------------------------------------------------------- real traces


@pytest.fixture(scope="module")
def runs(request):
    """What ranks make of the same programs: one that is this process, and at night two with other hash seeds."""
    if not request.config.getoption("--nightly"):
        return [collective_traces.run(0)]
    processes = []
    for rank in range(2):
        environment = {**os.environ, "PYTHONHASHSEED": str(rank + 1), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, collective_traces.__file__, str(rank)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.nightly
def test_the_order_is_the_same_on_all_ranks_and_with_any_hash_seed(runs):
    assert runs[0] == runs[1] and len(runs[0]) == 3


def names(symbols, *parts):
    return [at for at, (name, _, _) in enumerate(symbols) if any(part in name for part in parts)]


def test_a_backward_of_ddp_reduces_while_it_computes(runs):
    before, after = (runs[0]["ddp, each launched by itself"][1][when] for when in ("before", "after"))
    assert names(before, "all_reduce")[0] > names(before, "matmul")[-1]
    products, reductions, waits = (names(after, part) for part in ("matmul", "all_reduce", "wait"))
    assert len(reductions) == len(waits) == 6
    assert sum(at < products[-1] for at in reductions) >= 3 and reductions[-1] < waits[0]
    for at in names(after, "true_divide"):
        if at + 1 in reductions:  # the division comes right behind its input, and right before the reduction
            assert set(after[at][1]) <= set(after[at - 1][2])
            assert after[at + 1][1] == after[at][2]


def test_gradients_are_reduced_in_place(runs):
    assert [runs[0]["ddp"][1][f"copies {when}"] for when in ("before", "after")] == [6, 0]


def test_small_reductions_of_ddp_are_coalesced(runs):
    after = [symbol for symbol in runs[0]["ddp"][1]["after"] if symbol[0] != "del"]
    reductions = names(after, "all_reduce")
    assert reductions == [*range(reductions[0], reductions[0] + 6)]


def test_a_forward_of_fsdp_gathers_in_the_order_of_first_use(runs):
    before, after = (runs[0]["fsdp"][0][when] for when in ("before", "after"))
    gathered = lambda symbols: [symbols[at][1][0] for at in names(symbols, "all_gather")]  # noqa: E731
    assert gathered(before) == sorted(gathered(before))
    assert [name.split("_")[1] for name in gathered(after)] == ["0", "0", "2", "2", "4", "4"]
    after = [symbol for symbol in after if symbol[0] != "del"]
    made = {value: at for at, (_, _, outputs) in enumerate(after) for value in outputs}
    for at in names(after, "linear"):  # right behind the waits for its weight and bias
        waits = [made[value] for value in after[at][1] if made.get(value) in names(after, "wait")]
        assert sorted(waits) == [at - 2, at - 1]


def test_only_the_order_changes_and_every_value_is_deleted_after_its_last_use(runs):
    for traces in runs[0].values():
        for trace in traces:
            before, after = (sorted(s for s in trace[when] if s[0] != "del") for when in ("before", "after"))
            assert before == after
            alive = set()
            for name, inputs, outputs in trace["after"]:
                if name == "del":
                    assert alive.issuperset(inputs)
                    alive -= set(inputs)
                else:
                    alive.update(inputs, outputs)
            kept = set(trace["after"][-1][1])
            assert {v for v in alive - kept if v.startswith("ft")} == set()


def test_no_schedule_holds_more_memory_than_the_trace_as_it_was(runs):
    for traces in runs[0].values():
        for trace in traces:
            assert trace["peak after"] <= trace["peak before"]
