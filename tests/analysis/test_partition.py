"""partition: the fewest regions that the dependencies allow."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.classify import UserRules, classify
from thunder_cg.analysis.dependencies import dependencies
from thunder_cg.analysis.partition import Eager, Region, partition
from thunder_cg.analysis.rules import Reason


def flat(plan):
    return [op for step in plan.steps for op in (step.ops if isinstance(step, Region) else (step.op,))]


def kinds(plan):
    return ["R" if isinstance(step, Region) else "e" for step in plan.steps]


# -------------------------------------------------------------------------------------------------------------- regions


def test_one_chain_is_one_region(trace):
    t = trace().add("a", "b").add("b", "g").add("g", "h").returns("h")
    plan = t.plan()
    assert plan.steps == (Region((0, 1, 2), "cuda:0", ""), Eager(3))


def test_item_splits_and_the_split_names_it(trace):
    t = (
        trace()
        .add("a", "b")
        .add("b", "g")
        .item("g", "n1")
        .op("mul", "g n1", "h")
        .add("h", "i")
        .add("i", "j")
        .returns("j")
    )
    plan = t.plan()
    first, last = (step for step in plan.steps if isinstance(step, Region))
    assert (first.ops, last.ops) == ((0, 1), (4, 5))
    assert "Tensor.item at model.py:7: depends on what tensors hold" in first.split
    assert "mul" not in first.split  # which is eager because of it
    assert last.split == ""


def test_item_at_the_end_splits_nothing(trace):
    t = trace().add("a", "b").item("b", "n1").add("b", "g").returns("g n1")
    assert t.regions() == [(0, 2)]


def test_a_cpu_chain_woven_through_a_cuda_chain_leaves_one_region(trace):
    t = trace()
    for i in range(20):
        t.add(f"a{i}", f"a{i + 1}").add(f"c{i}", f"c{i + 1}")
    plan = t.returns("a20 c20").plan()
    assert kinds(plan).count("R") == 1
    assert [s.op for s in plan.steps if isinstance(s, Eager)] == [*range(1, 40, 2), 40]


def test_two_devices_get_a_region_each(trace):
    t = trace()
    for i in range(5):
        t.add(f"a{i}", f"a{i + 1}").add(f"d{i}", f"d{i + 1}")
    assert sorted(t.regions()) == [tuple(range(0, 10, 2)), tuple(range(1, 10, 2))]


def test_a_device_waits_for_the_other_if_that_saves_a_region(trace):
    """cuda:0 has work at once and more after a transfer from cuda:1: one region each, cuda:1 first."""
    t = (
        trace()
        .add("a", "b")
        .add("b", "g")
        .add("d1", "d2")
        .add("d2", "d3")
        .op("to", "d3", "h")
        .add("h g", "i")
        .add("i", "j")
    )
    assert t.regions() == [(2, 3), (0, 1, 5, 6)]


def test_eager_steps_keep_trace_order_where_regions_allow(trace):
    t = (
        trace()
        .add("c1", "c2")
        .add("a", "b")
        .add("b", "g")
        .add("c2", "c3")
        .mine("g", "h")
        .add("c3", "c4")
        .returns("h c4")
    )
    eager = [s.op for s in t.plan().steps if isinstance(s, Eager)]
    assert eager == sorted(eager)


def test_frame_stays_first_and_last(trace):
    t = trace()
    t.op("UNPACK_SEQUENCE", "saved", "C0 x", executor=None, bookkeeping=True)
    t.op("clear_mutable_collection", "saved", executor="python", bookkeeping=True)
    t.op("UNPACK_SEQUENCE", "C0", "a b", executor=None, bookkeeping=True)
    t.op("clear_mutable_collection", "C0", executor="python", bookkeeping=True)
    t.add("a", "g").add("g", "h").add("c1", "c2").returns("h c2")
    order = flat(t.plan())
    assert order[:4] == [0, 1, 2, 3] and order[-1] == 7


# --------------------------------------------------------------------------------------------------------- dependencies


def test_a_write_stays_after_earlier_reads_and_before_later_ones(trace):
    """The read before the write is eager and the one after it is captured."""
    t = trace().add("a", "b").add("b", "g").mine("x", "h").op("copy_", "g x", "i").add("x", "j").add("j h", "k")
    order = flat(t.plan())
    assert order.index(2) < order.index(3) < order.index(4)


def dependencies_of(t, **kwargs):
    return dependencies(t.done(), Aliasing.of(t.done()), **kwargs)


def test_views_carry_writes(trace):
    t = trace().op("reshape", "x", "v").item("v", "n1").add("a", "b").op("copy_", "b x", "w").item("v", "n2")
    deps = dependencies_of(t)
    assert 1 in deps[3] and 3 in deps[4]


def test_random_draws_and_collectives_each_keep_an_order_that_opaque_operators_belong_to(trace):
    t = trace().op("uniform", "", "a").mine("", "g").op("torch_all_gather_prim_impl", "h", "i").op("rand", "", "j")
    t.op("torch_all_gather_prim_impl", "k", "l").mine("", "o")
    assert dependencies_of(t) == [[], [0], [1], [1], [1, 2], [3, 4]]
    assert dependencies_of(t, collectives_in_order=False) == [[], [0], [1], [1], [1], [2, 3, 4]]


def test_a_wait_follows_its_collective_alone(trace):
    t = trace().op("torch_all_gather_prim_impl", "a", "f1").op("torch_all_gather_prim_impl", "b", "f2")
    t.op("rand", "", "j").op("torch_wait_prim_impl", "f1", "g").mine("", "h")
    assert dependencies_of(t) == [[], [0], [], [0], [1, 2]]


def test_an_opaque_operator_keeps_its_place_among_writes_to_buffers(trace):
    t = trace().op("copy_", "a p1", "b").mine("x", "y").op("copy_", "g p2", "h")
    assert dependencies_of(t) == [[], [0], [1]]


def test_arguments_may_overlap_once_one_is_written(trace):
    quiet = trace().item("x", "n1").add("y", "a").add("a", "b")
    assert dependencies_of(quiet) == [[], [], [1]]
    writing = trace().item("x", "n1").op("copy_", "a y", "b")
    assert dependencies_of(writing) == [[], [0]]
    parameter = trace().item("x", "n1").op("copy_", "p2 p1", "b")
    assert dependencies_of(parameter) == [[], [0]]


def a_gather(trace):
    """A gather, two ops, and its wait."""
    t = trace().add("a", "b").add("b", "g").op("torch_all_gather_prim_impl", "g", "f1").add("g", "h").add("h", "i")
    t.op("torch_wait_prim_impl", "f1", "j").add("i j", "k").add("k", "l").returns("l")
    return t


def test_a_collective_and_its_wait_are_in_a_region(trace):
    assert a_gather(trace).regions() == [tuple(range(8))]


def test_a_collective_and_its_wait_never_part(trace):
    """An opaque operator, which may communicate, keeps its place between them, so both stay eager."""
    t = trace().add("a", "b").add("b", "g").op("torch_all_gather_prim_impl", "g", "f1").mine("g", "h").add("h", "i")
    t.add("i", "i2").op("torch_wait_prim_impl", "f1", "j").add("i2 j", "k").add("k", "l").returns("l")
    plan = t.plan()
    assert [i for i in (2, 6) if plan.verdicts[i].capture] == []
    assert all(plan.verdicts[i].reason is Reason.COLLECTIVE and plan.verdicts[i].fix for i in (2, 6))
    assert all("not in one region" in plan.verdicts[i].detail for i in (2, 6))


def test_a_collective_that_nothing_waits_for_is_eager(trace):
    t = trace().add("a", "b").add("b", "g").op("torch_all_gather_prim_impl", "g", "f1").add("g", "h").add("h", "i")
    verdict = t.returns("i").plan().verdicts[2]
    assert (verdict.capture, verdict.reason, verdict.fix) == (
        False,
        Reason.COLLECTIVE,
        "wait for it in what is compiled",
    )
    assert verdict.detail.startswith("nothing in the trace waits for the collective")


def test_a_collective_is_eager_with_its_wait_for_the_reason_of_the_wait(trace):
    denied = "torch_wait_prim_impl"
    plan = a_gather(trace).plan(deny=[denied])
    collective, wait = plan.verdicts[2], plan.verdicts[5]
    assert not collective.capture and (collective.reason, collective.fix) == (wait.reason, wait.fix)
    assert wait.detail in collective.detail and wait.reason is Reason.USER_DENY


def test_collectives_that_are_not_captured_are_eager_and_in_order(trace):
    plan = a_gather(trace).plan(collectives=False)
    assert [s.op for s in plan.steps if isinstance(s, Eager)] == [2, 5, 8]
    assert all(plan.verdicts[i].reason is Reason.COLLECTIVE for i in (2, 5))


# ------------------------------------------------------------------------------------------------------------ too small


@pytest.mark.parametrize("ids", [["add"], ["permute", "view"], ["permute", "add"], []])
def test_a_region_without_two_kernels_is_eager(trace, ids):
    t = trace()
    for i, id_ in enumerate(ids):
        t.op(id_, f"a{i}", f"a{i + 1}")
    plan = t.returns("a0").plan()
    assert kinds(plan) == ["e"] * (len(ids) + 1)
    for verdict in plan.verdicts[:-1]:
        assert verdict.reason is Reason.TOO_SMALL and verdict.fix and not verdict.capture and verdict.device == "cuda:0"


def test_a_fusion_or_an_operator_that_the_user_allows_is_enough(trace):
    t = trace()
    subs = tuple(t.make(id_, "a", "b", executor=None) for id_ in ("ADD", "MUL", "TRANSPOSE"))
    t.op(None, "a", "b", executor="torchcompile", is_fusion=True, subs=subs)
    assert t.regions() == [(0,)]
    assert trace().mine("a", "b").regions(allow=("my_ex.my_op",)) == [(0,)]


# --------------------------------------------------------------------------------------------------------------- memory


def late_use(trace, nbytes):
    """Eager reads of big tensors, each right after it is made: one region would make them all before the first is
    read."""
    t = trace(**{f"b{i}": nbytes for i in range(8)})
    for i in range(8):
        t.add("a", f"b{i}").add("a", f"g{i}").item(f"b{i}", f"n{i}")
    return t.returns(" ".join(f"n{i}" for i in range(8)))


def test_trace_order_is_kept_where_regrouping_would_raise_the_peak(trace):
    plan = late_use(trace, 1 << 20).plan()
    assert flat(plan) == list(range(len(plan.verdicts)))
    assert kinds(plan).count("R") == 8
    first = next(s for s in plan.steps if isinstance(s, Region))
    assert "kept in trace order" in first.split and "Tensor.item at model.py:7" in first.split


def test_small_tensors_are_regrouped_however_long_they_live(trace):
    assert len(late_use(trace, 1 << 10).regions()) == 1


def test_memory_of_the_cpu_does_not_count(trace):
    t = trace(**{f"c{i}": 1 << 30 for i in range(40)})
    for i in range(0, 40, 2):
        t.add(f"a{i}", f"a{i + 2}").add("c", f"c{i}").mine(f"c{i}", f"n{i}")
    assert len(t.returns("a40").regions()) == 1


# ------------------------------------------------------------------------------------------- properties, by brute force


def random_trace(trace, rng, length, devices="a"):
    t = trace()
    pool = [f"{d}0" for d in devices] + ["p0", "c0"]
    for i in range(1, length + 1):
        kind = rng.choice(["add", "add", "add", "view", "item", "cpu", "copy", "mine", "rand", "reduce", "transfer"])
        device = rng.choice(devices)
        gpu = [n for n in pool if n[0] in (device, "p" if device == "a" else device)]
        source = rng.choice(gpu)
        if kind == "add":
            t.add(f"{source} {rng.choice(gpu)}", f"{device}{i}")
        elif kind == "view":
            t.op("permute", source, f"{device}{i}")
        elif kind == "item":
            t.item(source, f"n{i}")
            continue
        elif kind == "cpu":
            t.add(rng.choice([n for n in pool if n[0] == "c"]), f"c{i}")
            pool.append(f"c{i}")
            continue
        elif kind == "copy":
            t.op("copy_", f"{source} {rng.choice(gpu)}", f"{device}{i}")
        elif kind == "mine":
            t.mine(source, f"{device}{i}")
        elif kind == "rand":
            t.op("rand", "", f"{device}{i}")
        elif kind == "reduce":
            t.op("torch_all_reduce_prim_impl", source, f"f{i}").op("torch_wait_prim_impl", f"f{i}", f"{device}{i}")
        else:
            t.op("to", rng.choice(pool), f"{device}{i}")
        pool.append(f"{device}{i}")
    return t


def pairs_in_order(ops):
    """Every pair that must keep its order, found pair by pair from the definitions."""
    aliasing = Aliasing.of(ops)
    reads, writes, opaque = aliasing.reads, aliasing.writes, aliasing.opaque
    outside = aliasing.sets_of(ops.args)
    if any(outside & names for names in writes):
        reads, writes = (
            [{"<arguments>" if n in outside else n for n in ns} for ns in all_] for all_ in (reads, writes)
        )
        outside = {"<arguments>"}
    for (i, a), (j, b) in itertools.combinations(enumerate(ops.ops), 2):
        uses = set(a.outputs) & set(b.inputs)
        conflict = (writes[i] & reads[j]) | (reads[i] & writes[j])
        effects = orders_of(aliasing, i) & orders_of(aliasing, j)
        seen = (i in opaque and writes[j] & outside) or (j in opaque and writes[i] & outside)
        if uses or conflict or effects or seen:
            yield i, j


def orders_of(aliasing, index):
    """The common orders that the op belongs to."""
    if index in aliasing.opaque:
        return {"effects", "collectives"}
    if index in aliasing.waits:
        return set()
    if index in aliasing.collectives:
        return {"collectives"}
    return {"effects"} if index in aliasing.effects else set()


def fewest_groups(colors, pairs):
    """The fewest groups of captured ops over all orders, by search over sets of ops that have run."""
    before = {j: {i for i, k in pairs if k == j} for j in range(len(colors))}
    everything = frozenset(range(len(colors)))
    frontier = {(frozenset(), None): 0}
    best = None
    while frontier:
        reached = {}
        for (ran, last), groups in frontier.items():
            if ran == everything:
                best = groups if best is None else min(best, groups)
                continue
            for op in everything - ran:
                if before[op] <= ran:
                    cost = groups + (colors[op] is not None and colors[op] != last)
                    key = (ran | {op}, colors[op])
                    reached[key] = min(cost, reached.get(key, cost))
        frontier = reached
    return best


def groups_of(plan, verdicts):
    """Groups of captured ops in the plan's order, those too small to be regions included."""
    colors = [verdicts[op].device if verdicts[op].capture else None for op in flat(plan)]
    return sum(color is not None for color, _ in itertools.groupby(colors))


@pytest.mark.parametrize("batch", range(3))
def test_plans_are_legal_and_have_the_fewest_regions(trace, batch):
    for seed in range(200 * batch, 200 * batch + 200):
        check_fewest(trace, random.Random(seed))


def check_fewest(trace, rng):
    t = random_trace(trace, rng, rng.randint(1, 7))
    ops, verdicts = t.done(), t.verdicts()
    plan = partition(ops, verdicts, Aliasing.of(ops))
    order = flat(plan)
    assert sorted(order) == list(range(len(ops.ops)))
    pairs = set(pairs_in_order(ops))
    at = {op: position for position, op in enumerate(order)}
    assert all(at[i] < at[j] for i, j in pairs)
    colors = [v.device if v.capture else None for v in verdicts]
    assert groups_of(plan, verdicts) == fewest_groups(colors, pairs)


@pytest.mark.nightly
def test_long_plans_on_two_devices_are_legal(trace):
    for seed in range(150):
        check_legal(trace, random.Random(seed))


def check_legal(trace, rng):
    t = random_trace(trace, rng, rng.randint(20, 60), devices="ad")
    ops = t.done()
    plan = partition(ops, t.verdicts(), Aliasing.of(ops))
    order = flat(plan)
    at = {op: position for position, op in enumerate(order)}
    assert sorted(order) == list(range(len(ops.ops)))
    assert all(at[i] < at[j] for i, j in pairs_in_order(ops))
    for step in plan.steps:
        if isinstance(step, Region):
            assert list(step.ops) == sorted(step.ops)
            assert {plan.verdicts[op].device for op in step.ops} == {step.device}
            assert all(plan.verdicts[op].capture for op in step.ops)
        else:
            assert not plan.verdicts[step.op].capture


# ----------------------------------------------------------------------------------------------------------------- time

MANY = 10_000


def alternating(t):
    for i in range(MANY // 2):
        t.add(f"a{i}", f"b{i}").mine(f"b{i}", f"a{i + 1}")


def fan_out(t):
    for i in range(MANY):
        (t.add if i % 2 else t.item)("a", f"b{i}" if i % 2 else f"n{i}")


def one_buffer(t):
    for i in range(MANY // 2):
        t.op("copy_", "a p1", f"b{i}").item("p1", f"n{i}")


def many_reads_many_writes(t):
    for i in range(MANY):
        if i % 100:
            t.add("p1", f"b{i}")
        else:
            t.op("copy_", "a p1", f"b{i}")


def views_of_one(t):
    for i in range(MANY):
        t.op("reshape", f"a{i}", f"a{i + 1}")


def one_uses_all(t):
    for i in range(MANY):
        t.add("a", f"b{i}")
    t.op("cat", " ".join(f"b{i}" for i in range(MANY)), "g")


def two_devices(t):
    for i in range(MANY // 4):
        t.add(f"a{i}", f"b{i}").op("to", f"b{i}", f"d{i}").add(f"d{i}", f"dd{i}").op("to", f"dd{i}", f"a{i + 1}")


@pytest.mark.parametrize(
    "shape", [alternating, fan_out, one_buffer, many_reads_many_writes, views_of_one, one_uses_all, two_devices]
)
@pytest.mark.nightly_after(1)
def test_ten_thousand_ops_take_less_than_two_seconds(trace, shape):
    t = trace()
    shape(t)
    ops = t.done()
    start = time.process_time()
    aliasing = Aliasing.of(ops)
    partition(ops, classify(ops, aliasing, UserRules(), "cuda"), aliasing)
    assert time.process_time() - start < 2.0


# ---------------------------------------------------------------------------------------------------------- real traces


def test_an_mlp_is_one_region_forward_and_one_backward(traces_of, on_cpu):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    forward, backward = traces_of(model, torch.randn(3, 4))
    for ops in (forward, backward):
        plan = on_cpu(ops)
        assert kinds(plan).count("R") == 1
        assert all(ops.ops[s.op].bookkeeping for s in plan.steps if isinstance(s, Eager))


class Block(torch.nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + torch.nn.functional.dropout(self.mlp(self.norm(x)), 0.1)


def test_a_gpt_block_with_dropout_is_one_region_each_way(traces_of, on_cpu):
    for ops in traces_of(Block(), torch.randn(2, 5, 16)):
        assert kinds(on_cpu(ops)).count("R") == 1


def test_batch_norm_in_training_is_one_region_each_way(traces_of, on_cpu):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3)
    )
    for ops in traces_of(model, torch.randn(2, 3, 8, 8)):
        assert kinds(on_cpu(ops)).count("R") == 1


def test_item_in_a_real_model_splits_it(traces_of, on_cpu):
    def model(x):
        y = torch.exp(torch.sin(x))
        return torch.cos(y * y.sum().item()) + torch.tan(y)

    (ops,) = traces_of(model, torch.randn(3))
    plan = on_cpu(ops)
    assert kinds(plan).count("R") == 2
    first = next(s for s in plan.steps if isinstance(s, Region))
    assert "Tensor.item" in first.split and "test_partition.py" in first.split


def test_setitem_in_place_is_captured_whole(traces_of, on_cpu):
    def model(x):
        y = x + 1
        y[0] = 2.0
        return (y * y).sum()

    (ops,) = traces_of(model, torch.randn(3, 4))
    plan = on_cpu(ops)
    assert kinds(plan).count("R") == 1 and all(ops.ops[s.op].bookkeeping for s in plan.steps if isinstance(s, Eager))
