"""Collectives of ``torch.distributed`` in what is compiled: symbols of the trace, in graphs with their waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import thunder
import torch
from ranks import Ranks
from test_functional_collectives import Between
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from thunder_cg import executors, explain, thunderfx
from thunder_cg.errors import CollectiveError

SPLITS = [([1, 2], [1, 3]), ([3, 2], [2, 2])]  # received and sent, of each rank


def broadcasts(x: torch.Tensor) -> torch.Tensor:
    """In place, of an argument, of a view, and of a value of the graph."""
    y = torch.sin(x)
    dist.broadcast(x, 1)
    handle = dist.broadcast(y[1], group_src=0, async_op=True)
    z = torch.cos(x)
    handle.wait()
    other = x * 2
    dist.broadcast(other, 1, dist.group.WORLD)
    return y * z + other


def exchanges(x: torch.Tensor) -> torch.Tensor:
    received, sent = SPLITS[dist.get_rank()]
    found = torch.empty(sum(received), 8, device=x.device)
    handle = dist.all_to_all_single(found, torch.sin(x), received, sent, async_op=True)
    equal = torch.empty_like(x)
    dist.all_to_all_single(equal, x * 2)
    x.add_(1)
    handle.wait()
    return torch.cat([found, equal, x])


def reduces(x: torch.Tensor) -> torch.Tensor:
    """All at once, as of gradients; what is added afterwards stays apart."""
    parts = [torch.sin(x * i) for i in range(1, 4)]
    kinds = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
    handles = [dist.all_reduce(part, kind, async_op=True) for part, kind in zip(parts, kinds)]
    gathered = torch.empty(8, 8, device=x.device)
    dist.all_gather_into_tensor(gathered, x)
    scattered = torch.empty(2, 8, device=x.device)
    dist.reduce_scatter_tensor(scattered, x)
    for handle in handles:
        handle.wait()
    parts[0].add_(1)
    dist.all_reduce(parts[0])
    return torch.cat([*parts, gathered, scattered])


def functionally(x: torch.Tensor) -> torch.Tensor:
    world = dist.group.WORLD
    total = functional.all_reduce(x, "sum", world)
    parts = functional.all_gather_tensor(torch.sin(x), 0, world)
    meanwhile = torch.cos(x)
    mean = functional.reduce_scatter_tensor(parts, "max", 0, world)
    exchanged = functional.all_to_all_single(mean, None, None, world)
    return functional.broadcast(exchanged * meanwhile, 1, world) + functional.wait_tensor(total)


def reduces_in_place(x: torch.Tensor) -> torch.Tensor:
    """An argument that was written before, and a view of what is used afterwards."""
    x.mul_(2)
    dist.all_reduce(x)
    y = x + 1
    dist.all_reduce(y[0])
    return y * x


def unused(x: torch.Tensor) -> torch.Tensor:
    """Rank 1 sends, and uses nothing of it."""
    sent = functional.broadcast(torch.sin(x), 1, dist.group.WORLD)
    total = functional.all_reduce(torch.cos(x), "sum", dist.group.WORLD)
    return sent + total if dist.get_rank() == 0 else x + 1


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    each.__name__: each for each in (broadcasts, exchanges, reduces, reduces_in_place, functionally, unused)
}


def batches(steps: int) -> list[torch.Tensor]:
    import parallel

    seeds = [torch.Generator().manual_seed(2 * step + parallel.RANK()) for step in range(steps)]
    return [torch.randn(4, 8, generator=seed).to(parallel.device()) for seed in seeds]


def called(name: str, by: str, capture: str = "auto") -> tuple[int, list[dict[str, Any]], str]:
    """How many results and arguments differ from eager ones, what ran, and the report."""
    import parallel

    torch._dynamo.reset()
    function = FUNCTIONS[name]
    if by != "thunderfx":
        options = {"executors": executors()} if by == "jit, fused" else {}
        compiled = thunder.jit(function, transforms=[parallel.transform(capture_collectives=capture)], **options)
    else:
        kind = "tape" if parallel.device().type == "cpu" else "cuda"
        compiled = thunderfx(function, backend=kind, debug=True)
    found: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for each in (function, compiled):
            x = torch.empty(4, 8, device=parallel.device())
            found.append([])
            for batch in batches(4):
                found[-1] += [each(x.copy_(batch)), x.clone()]
    return parallel.differing(*found), parallel.summary(compiled), str(explain(compiled))


CASES = {
    "broadcasts": "3 broadcast",
    "exchanges": "2 all_to_all",
    "reduces": "4 all_reduce",
    "functionally": "1 all_to_all",
}


@pytest.mark.nightly_after(2)
@pytest.mark.parametrize("name", CASES)
def test_collectives_are_captured_with_their_waits(ranks: Ranks, name: str) -> None:
    for differing, (trace,), text in ranks.run(called, name, "jit"):
        assert not differing
        assert trace["eager"] == [] and trace["replays"] == [3] and not trace["fallbacks"]
        assert f"{CASES[name]} of " in text and "default_pg of 2 ranks, captured" in text


@pytest.mark.parametrize("by", [pytest.param("jit", marks=pytest.mark.nightly), "jit, fused"])
def test_what_shares_memory_is_reduced_where_it_is(ranks: Ranks, by: str) -> None:
    """A fusion returns it as the argument, or the view, that it is."""
    for differing, (trace,), text in ranks.run(called, "reduces_in_place", by):
        assert not differing and trace["replays"] == [3] and "2 all_reduce of " in text


def returns_handles() -> tuple[int, list[dict[str, Any]]]:
    """As `called`, for a function that leaves it to the caller to wait."""
    import parallel

    def begins(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        y = x * 2
        return y, dist.all_reduce(y, async_op=True)

    compiled = thunder.jit(begins, transforms=[parallel.transform()])
    found: list[list[torch.Tensor]] = [[], []]
    for batch in batches(4):
        for each, values in zip((begins, compiled), found):
            y, handle = each(batch)
            assert handle.wait()
            values.append(y)
    return parallel.differing(*found), parallel.summary(compiled)


def test_a_handle_may_be_returned(ranks: Ranks) -> None:
    for differing, (trace,) in ranks.run(returns_handles):
        assert not differing and trace["eager"] == [] and trace["replays"] == [3]


def beside_python() -> int:
    """How many results differ where rank 1 has compiled a function, and then runs it in Python, as Dynamo may."""
    import parallel

    group = dist.new_group([0, 1])

    def reverses(x: torch.Tensor) -> torch.Tensor:
        """What is there first is communicated last."""
        parts = [torch.sin(x[: i + 1]) for i in range(4)]
        squares = [part * part for part in parts]
        sums = [functional.all_reduce(part, "sum", group) for part in reversed(parts)]
        return torch.cat(squares + sums)

    compiled = thunder.jit(reverses, transforms=[parallel.transform(capture_collectives="always")])
    expected, found = [reverses(batch) for batch in batches(6)], []
    for step, batch in enumerate(batches(6)):
        found.append((reverses if step and parallel.RANK() == 1 else compiled)(batch))
    dist.destroy_process_group(group)
    return parallel.differing(found, expected)


def test_collectives_of_the_user_keep_their_order(ranks: Ranks) -> None:
    assert ranks.run(beside_python) == [0, 0]


def test_what_is_done_at_once_runs_beside_what_follows(ranks: Ranks) -> None:
    """The exchange of `exchanges` is read last, and the sine of it was computed before."""
    for _, _, text in ranks.run(called, "exchanges", "jit"):
        assert "captured; 2 can overlap with compute" in text


def test_no_collective_is_captured_if_the_user_says_never(ranks: Ranks) -> None:
    for differing, (trace,), _ in ranks.run(called, "reduces", "jit", "never"):
        assert not differing and "collectives_all_gather" in trace["eager"]


def test_ranks_that_do_not_use_a_result_take_part(ranks: Ranks) -> None:
    """Thunder would drop what communicates there, and the other rank would wait for ever."""
    for differing, (trace,), _ in ranks.run(called, "unused", "jit"):
        assert not differing and trace["collectives"] == 2


@pytest.mark.nightly
def test_ranks_that_do_not_use_a_result_take_part_under_thunderfx() -> None:
    """In processes of its own: one rank alone asks the other one for its votes, which the others' tests would miss."""
    pool = Ranks(2, "cpu")
    try:
        assert [differing for differing, *_ in pool.run(called, "unused", "thunderfx")] == [0, 0]
    finally:
        pool.close()


def test_thunderfx_has_functional_collectives_in_its_graphs(ranks: Ranks) -> None:
    for differing, (trace,), _ in ranks.run(called, "functionally", "thunderfx"):
        assert not differing
        assert trace["collectives"] == 5 and trace["replays"] == [3] and not trace["fallbacks"]


class Trains(Between):
    """The same with statistics that have no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.communicate(torch.tanh(self.first(x)))
        scale = y.detach().mean(0)
        dist.all_reduce(scale)
        with torch.no_grad():
            shift = y.sum(0)
            dist.broadcast(shift, 1, async_op=True).wait()
        return self.second(y) * scale + shift


def by_experts(y: torch.Tensor) -> torch.Tensor:
    """The expert of rank 0 gets three rows of each rank, that of rank 1 one, so what they send back differs in size."""
    sent, received = [3, 1], [3 - 2 * dist.get_rank()] * 2
    rows = functional.all_to_all_single_autograd(y, received, sent, dist.group.WORLD)
    return functional.all_to_all_single_autograd(torch.sin(rows), sent, received, dist.group.WORLD)


DIFFERENTIABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": lambda y: functional.all_reduce(y, "sum", dist.group.WORLD),
    "all_gather": lambda y: functional.all_gather_tensor(y, 0, dist.group.WORLD),
    "reduce_scatter": lambda y: functional.reduce_scatter_tensor_autograd(y, "sum", 1, dist.group.WORLD),
    "all_to_all": by_experts,
}


def trained(name: str) -> tuple[list[list[torch.Tensor]], list[dict[str, Any]]]:
    """Losses and gradients of eager PyTorch, with graphs and without; and what ran."""
    import parallel

    found: list[list[torch.Tensor]] = []
    width = slice(4) if name == "reduce_scatter" else slice(8)
    for capture in (None, "auto", "never"):
        model = Trains(lambda y: torch.nn.functional.pad(DIFFERENTIABLE[name](y)[:, width], (0, 8 - width.stop)))
        model = model.to(parallel.device())
        compiled = (
            thunder.jit(model, transforms=[parallel.transform(capture_collectives=capture)]) if capture else model
        )
        found.append([])
        for batch in batches(4):
            model.zero_grad()
            loss = compiled(batch).square().sum()
            loss.backward()
            found[-1] += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if capture == "auto":
            traces = parallel.summary(compiled)
    return found, traces


@pytest.mark.parametrize(
    "name", [each if each == "all_to_all" else pytest.param(each, marks=pytest.mark.nightly) for each in DIFFERENTIABLE]
)
def test_gradients_are_pytorchs(ranks: Ranks, name: str) -> None:
    """Thunder's kernels are not all PyTorch's, so bits are those of what Thunder runs eagerly."""
    for (eager, graphs, without), (forward, backward) in ranks.run(trained, name):
        assert len(graphs) == 4 * 5
        torch.testing.assert_close(graphs, eager)
        assert all(map(torch.equal, graphs, without))
        own = 2 if name == "all_to_all" else 1
        assert (forward["collectives"], backward["collectives"]) == (2 + own, own)
        assert forward["replays"] == backward["replays"] == [3]


def gathers_list(x: torch.Tensor) -> torch.Tensor:
    dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x)
    return x


def sends(x: torch.Tensor) -> torch.Tensor:
    dist.send(x, 0)
    return x


def gathers_objects(x: torch.Tensor) -> torch.Tensor:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, dist.get_rank())
    return x * sum(found)


def awaits_others(x: torch.Tensor) -> torch.Tensor:
    """Thunder would do so while it traces, and never again."""
    dist.monitored_barrier()
    return x * 2


def loses_gradient(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.broadcast(y, 0)
    return y


def asks_for_future(x: torch.Tensor) -> torch.Tensor:
    dist.broadcast(x, 0, async_op=True).get_future()
    return x


def has_other_dtype(x: torch.Tensor) -> torch.Tensor:
    found = torch.empty(8, 8, dtype=torch.float64, device=x.device)
    dist.all_gather_into_tensor(found, x)
    return found


MESSAGES = {
    gathers_list: "all_gather, in a compiled function: Thunder cannot trace it; call all_gather_into_tensor",
    sends: "send, in a compiled function: Thunder cannot trace it; call it outside of that",
    gathers_objects: "all_gather_object, in a compiled function: Thunder cannot trace it; call it outside of that",
    awaits_others: "monitored_barrier, in a compiled function: Thunder cannot trace it; call it outside of that",
    loses_gradient: "takes a tensor that has a gradient, which would be lost; call it with x.detach()",
    asks_for_future: "its handle has no get_future in a trace; call wait()",
    has_other_dtype: "tensors of thunder.dtypes.float64 (8, 8) and thunder.dtypes.float32 (4, 8) do not fit 2 ranks",
}


def messages() -> list[str]:
    import parallel

    found = []
    for function in MESSAGES:
        compiled = thunder.jit(function, transforms=[parallel.transform()])
        x = torch.zeros(4, 8, device=parallel.device(), requires_grad=function is loses_gradient)
        try:
            compiled(x)
            found.append("nothing was raised")
        except CollectiveError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_traced_says_so(ranks: Ranks) -> None:
    for found in ranks.run(messages):
        for expected, said in zip(MESSAGES.values(), found):
            assert expected in said
        assert "broadcast at test_traced_collectives.py:" in found[4]


class Varies(torch.nn.Module):
    """Communicates in the group, and by the reduction, that it has, that a variable has, or that a call brings."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.op = dist.group.WORLD, dist.ReduceOp.SUM

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        y, z, total = torch.sin(x), torch.cos(x), torch.tanh(x)
        dist.all_reduce(y, self.op, self.group)
        dist.all_reduce(z, **options)
        dist.all_reduce(total, _settings.op, _settings.group)
        return y * z + total


_settings = SimpleNamespace()


def varied() -> tuple[int, int]:
    """How many results are not those of eager calls, and how often Thunder compiled."""
    import parallel

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    module, differing = Varies(), 0
    compiled = thunder.jit(module, transforms=[parallel.transform()])
    usual = {"group": dist.group.WORLD, "op": dist.ReduceOp.SUM}
    others = [{}, {"group": alone}, {"op": dist.ReduceOp.MAX}]
    for mine, calls, globals_ in [*((each, {}, {}) for each in others), ({}, others[1], {}), ({}, {}, others[2])]:
        vars(_settings).update(usual | globals_)
        module.group, module.op = (usual | mine).values()
        for x in batches(3):
            differing += not torch.equal(compiled(x, usual | calls), module(x, usual | calls))
    return differing, thunder.cache_misses(compiled)


@pytest.mark.nightly
def test_other_groups_and_reductions_compile_anew(ranks: Ranks) -> None:
    assert ranks.run(varied) == [(0, 5)] * 2


@dataclass
class Reducer:
    """Has a group; ``Grouped`` is told apart by its type."""

    group: Any

    def reduce(self, y: torch.Tensor) -> None:
        dist.all_reduce(y, group=self.group)


class Grouped(Reducer):
    pass


def _with_default(group: Any) -> Callable[..., Any]:
    def reduce(y: torch.Tensor, group: Any = group) -> None:
        dist.all_reduce(y, group=group)

    return reduce


_found: Any = None  # what the functions below find


def reduces(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    _found(y)
    return y


def reduces_in(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, group=_found)
    return y


def reduces_maybe(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if _found is not None:
        dist.all_reduce(y, group=_found)
    return y


def reduces_with(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, **_found)
    return y


def reduces_with_more(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, **{"op": dist.ReduceOp.SUM, **_found})
    return y


def reduces_by_getattr(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, group=getattr(_found, "group", None))
    return y


def reduces_by_type(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, group=_found.group if isinstance(_found, Grouped) else None)
    return y


def counts(x: torch.Tensor) -> torch.Tensor:
    y = x * (2 + dist.get_rank(_found))
    dist.all_reduce(y)
    return y


def _keywords(group: Any) -> dict[str, Any]:
    return {} if group is None else {"group": group}


# Functions, and how they find a group.
SPELLINGS: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = [
    (reduces, lambda group: partial(dist.all_reduce, group=group)),
    (reduces, lambda group: partial(dist.all_reduce, **_keywords(group))),
    (reduces, lambda group: partial(partial(dist.all_reduce, op=dist.ReduceOp.SUM), group=group)),
    (reduces, lambda group: lambda y: dist.all_reduce(y, group=group)),
    (reduces, lambda group: (lambda y: dist.all_reduce(y, group=group)) if group else dist.all_reduce),
    (reduces, _with_default),
    (reduces, lambda group: Reducer(group).reduce),
    (reduces_in, lambda group: group),
    (reduces_maybe, lambda group: group),
    (reduces_with, lambda group: {"group": group}),
    (reduces_with, _keywords),
    (reduces_with_more, _keywords),
    (reduces_by_getattr, lambda group: SimpleNamespace(**_keywords(group))),
    (reduces_by_type, lambda group: (Grouped if group else Reducer)(group)),
    (counts, lambda group: group),
]


def of_the_default_group_at_first() -> list[tuple[int, int]]:
    """For each spelling, how many results are not those of eager calls where None stands for the group at first.

    And how many versions there are.
    """
    import parallel

    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    answers = []
    for function, found in SPELLINGS:
        compiled, differing = thunder.jit(function, transforms=[parallel.transform()]), 0
        for group in (None, mine, dist.group.WORLD, None):
            globals()["_found"] = found(group)
            for x in batches(2):
                differing += not torch.equal(compiled(x), function(x))
        answers.append((differing, thunder.cache_misses(compiled)))
    return answers


@pytest.mark.nightly
def test_none_may_be_a_group_later(ranks: Ranks) -> None:
    for answers in ranks.run(of_the_default_group_at_first):
        assert all(differing == 0 and versions in (2, 3) for differing, versions in answers), answers


def alone() -> list[str]:
    """Thunder's symbols in what Thunder compiles without this package's transform, after one with it."""
    import parallel

    thunder.jit(sends, transforms=[parallel.transform()])
    compiled = thunder.jit(lambda x: dist.all_gather_into_tensor(torch.empty(8, 8), x, dist.group.WORLD))
    compiled(torch.zeros(4, 8))
    return [symbol.sym.name for symbol in thunder.last_traces(compiled)[-1].bound_symbols]


def test_thunder_alone_traces_its_own(ranks: Ranks) -> None:
    if ranks.device == "cpu":
        for names in ranks.run(alone):
            assert any("all_gather_prim_impl" in name for name in names)
