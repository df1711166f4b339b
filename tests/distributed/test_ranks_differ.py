"""Ranks that differ: there is no deadlock, and each rank has the bits of uncaptured Thunder."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import thunder
import torch
from ranks import Ranks
from thunder.distributed import ddp
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_cg import explain
from thunder_cg.errors import CaptureError
from thunder_cg.runtime.recording import RegionGraph

STEPS = 9
LAST = 3  # every so many steps, a batch may be smaller


class Watched(TorchDispatchMode):
    """A user's mode, which has to see each operator, so nothing is captured or replayed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def what_runs(builder: str, what: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains without and with graphs, while rank 1 does something else; what differs, and what ran."""
    import parallel

    build = parallel.BUILDERS[builder]
    theirs = _train(build(), what)
    compiled = build(parallel.transform(**options))
    with patch("thunder_cg.runtime.ranks.groups._TIMEOUT", 0.5), patch_capture(what):
        ours = _train(compiled, what)
    traces = parallel.explain(compiled).to_dict()["traces"]
    regions = [each for trace in traces for each in trace["regions"]]
    return {
        "differing": parallel.differing(ours, theirs),
        "failures": [each["failure"] for each in regions if each["failure"]],
        "fallbacks": [reason for trace in traces for reason in trace["fallbacks"]],
        "replays": sum(each["replays"] for each in regions),
        "regions": len(regions),
        "traces": len(traces),
    }


def _train(compiled: Any, what: str) -> list[torch.Tensor]:
    import parallel

    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    is_other, found = parallel.RANK() == 1, []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        batch = 3 if what == "uneven batches" and is_other and step % LAST == LAST - 1 else 4
        batch -= what == "other batches" and is_other
        if what == "evaluates" and is_other and step % 2:
            compiled.eval()
            with torch.no_grad():
                found.append(compiled(parallel.tokens(step, batch=2)).clone())
            compiled.train()
        if what == "saves" and is_other and step % 2:
            torch.save(compiled.state_dict(), io.BytesIO())
        if what == "raises" and is_other and step in (1, 3, 6):
            with pytest.raises(RuntimeError):
                compiled(torch.zeros(4, dtype=torch.long, device=parallel.device()).float())
            with pytest.raises(ZeroDivisionError):
                compiled(parallel.tokens(step, batch=batch)).sum().item() / 0
        watched = Watched() if what == "is watched" and is_other and step == 1 else nullcontext()
        with watched:
            loss = compiled(parallel.tokens(step, batch=batch)).square().mean()
            loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in compiled.parameters())]
        optimizer.step()
    return found


@contextmanager
def patch_capture(what: str) -> Iterator[None]:
    """On rank 1, the capture of the backward fails: once for lack of memory, or always."""
    import parallel

    from thunder_cg.errors import CaptureRefused

    pool = parallel.pool_class()
    capture, failed = pool.capture, []

    def fails(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        (region_function,) = [cell.cell_contents for cell in fn.__closure__ or ()] or [fn]
        if "torch_all_reduce" in str(region_function.__code__.co_names) and not (what == "has no memory" and failed):
            failed.append(fn)
            raise torch.OutOfMemoryError("none") if what == "has no memory" else CaptureRefused("refused here")
        return capture(self, fn, *args, **kwargs)

    fails_here = what in ("has no memory", "cannot capture") and parallel.RANK() == 1
    with patch.object(pool, "capture", fails) if fails_here else nullcontext():
        yield


def meets(builder: str) -> dict[str, Any]:
    """Rank 1 keeps the gradients of a step, which are in memory of its graphs, so that it has to capture anew."""
    import parallel

    from thunder_cg.runtime.ranks import groups

    found, kept = [], []
    parallel.forget_meetings()
    with patch.multiple(groups, _TIMEOUT=1.0, _MEETING_TIMEOUT=10.0, _PERIOD=12, _MEETING=8):
        for graphs in ([], [parallel.transform()]):
            compiled, values = parallel.BUILDERS[builder](*graphs), []
            for step in range(24):
                compiled.zero_grad(set_to_none=True)
                compiled(parallel.tokens(step)).square().mean().backward()
                if step == 4 and parallel.RANK() == 1:
                    kept += [p.grad for p in compiled.parameters()]
                values += [p.grad.clone() for p in compiled.parameters()]
            found.append(values)
    half = len(kept) // 2
    differing = parallel.differing(*found) + parallel.differing(kept[:half], kept[half:])
    return {"differing": differing, "traces": parallel.summary(compiled), "explained": str(explain(compiled))}


@pytest.mark.nightly
def test_ranks_get_together_again(ranks: Ranks) -> None:
    """Where the others replay what one rank has lost, all capture again as soon as they meet."""
    first, second = ranks.run(meets, "fsdp zero2")
    for found in (first, second):
        assert not found["differing"]
        assert [trace["captures"] for trace in found["traces"]] == [[2], [2]], found
    for ours, theirs in zip(first["traces"], second["traces"]):
        assert not ours["fallbacks"] and theirs["fallbacks"] and theirs["replays"][0] > 6
    assert "zero_grad() before one rank calls alone" in second["explained"]


@pytest.mark.nightly
def test_ranks_that_need_not_agree(ranks: Ranks) -> None:
    for found in ranks.run(what_runs, "ddp", "the same", {"capture_collectives": "always"}):
        assert not found["differing"] and not found["failures"]
        assert found["regions"] == found["traces"] == 2 and found["replays"] == 2 * (STEPS - 1)


@pytest.mark.nightly
def test_collectives_can_stay_eager(ranks: Ranks) -> None:
    for found in ranks.run(what_runs, "fsdp zero2", "the same", {"capture_collectives": "never"}):
        assert not found["differing"] and not found["failures"] and found["replays"] >= 2 * (STEPS - 1)


@pytest.mark.parametrize(
    "what",
    [
        *("is watched", "raises"),
        *(pytest.param(what, marks=pytest.mark.nightly) for what in ("has no memory", "evaluates", "saves")),
    ],
)
@pytest.mark.nightly_after(1)
def test_what_passes(ranks: Ranks, what: str) -> None:
    """The ranks capture together as soon as they can."""
    answers = ranks.run(what_runs, "ddp", what, {})
    said = "rank 1 does not capture it: it runs eagerly, since a torch dispatch or function mode"
    assert any(said in reason for reason in answers[0]["fallbacks"]) == (what == "is watched"), answers[0]["fallbacks"]
    for found in answers:
        assert not found["differing"] and not found["failures"], found
        assert found["replays"] >= 2 * (STEPS - 4)
        assert all(reason.count("tries left") < 2 for reason in found["fallbacks"])  # of one rank


def test_a_rank_that_cannot_capture(ranks: Ranks) -> None:
    first, second = ranks.run(what_runs, "ddp", "cannot capture", {})
    for found in (first, second):
        assert not found["differing"]
        assert found["replays"] == STEPS - 1  # of the forward, which does not communicate
    assert first["failures"] == ["rank 1 does not capture it: CaptureRefused: refused here"]
    assert second["failures"] == ["CaptureRefused: refused here"]


@pytest.mark.parametrize("builder", ["ddp", pytest.param("fsdp zero2", marks=pytest.mark.nightly)])
def test_other_batches(ranks: Ranks, builder: str) -> None:
    """They make the same collectives, so the ranks capture together."""
    for found in ranks.run(what_runs, builder, "other batches", {}):
        assert not found["differing"] and not found["failures"], found
        assert found["replays"] == 2 * (STEPS - 1)


@pytest.mark.parametrize("builder", ["ddp", pytest.param("fsdp zero2", marks=pytest.mark.nightly)])
def test_uneven_batches(ranks: Ranks, builder: str) -> None:
    """The small batch of rank 1 has functions of its own, and its captures wait in vain for rank 0, which replays."""
    first, second = ranks.run(what_runs, builder, "uneven batches", {})
    assert not first["differing"] and not second["differing"]
    assert not first["failures"] and first["replays"] == 2 * (STEPS - 1)
    waited = [re.search(r"rank 0 did not answer within ([\d.]+) s", failure) for failure in second["failures"]]
    assert any(found is not None and float(found[1]) <= 0.25 for found in waited), second["failures"]  # at first, 0.5


class Raises(TorchDispatchMode):
    """Raises in the first matrix product."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            _raise()
        return func(*args, **(kwargs or {}))


def raises_before_it_communicates() -> tuple[int, list[int]]:
    """Rank 1 lacks memory in some backwards, for which rank 0 waits, and does these steps again."""
    import parallel

    found: list[list[torch.Tensor]] = []
    for graphs in ([], [parallel.transform()]):
        compiled = parallel.ddp(*graphs)
        found.append([])
        for step in range(STEPS):
            compiled.zero_grad(set_to_none=True)
            if parallel.RANK() == 1 and step in (0, 2, 3):
                _raise_in_backward(compiled, parallel.tokens(step), Raises())
            compiled(parallel.tokens(step)).square().mean().backward()
            found[-1] += [p.grad.clone() for p in compiled.parameters()]
    return parallel.differing(*found), parallel.summary(compiled)[1]["replays"]


def _raise(*args: Any) -> None:
    raise torch.OutOfMemoryError("none is left")


def _raise_in_backward(compiled: Any, tokens: torch.Tensor, raises: AbstractContextManager[Any]) -> None:
    loss = compiled(tokens).square().mean()
    with raises:
        try:
            loss.backward()
        except torch.OutOfMemoryError:
            return
    raise AssertionError("it has not raised")


@pytest.mark.nightly
def test_a_rank_that_raises_before_it_communicates(ranks: Ranks) -> None:
    """It numbers its calls as the others do: a call that has not communicated is none."""
    assert ranks.run(raises_before_it_communicates) == [(0, [STEPS - 1])] * 2


def replay_raises() -> tuple[int, list[int]]:
    """Rank 1 raises in a replay of a backward of several regions, before the collectives, and does the step again."""
    import parallel

    found: list[list[torch.Tensor]] = []
    for graphs in ([], [parallel.transform(deny=["torch.mul"])]):
        compiled = parallel.ddp(*graphs)
        found.append([])
        for step in range(2 * STEPS):
            compiled.zero_grad(set_to_none=True)
            tokens = parallel.tokens(step, batch=3 + step // STEPS)
            if graphs and parallel.RANK() == 1 and step == STEPS - 1:
                _raise_in_backward(compiled, tokens, patch.object(RegionGraph, "replay", _raise))
            compiled(tokens).square().mean().backward()
            found[-1] += [p.grad.clone() for p in compiled.parameters()]
    backwards = [trace for trace in parallel.summary(compiled) if trace["kind"] == "backward"]
    return parallel.differing(*found), [min(trace["replays"]) for trace in backwards]


@pytest.mark.nightly
def test_a_rank_that_raises_in_a_replay(ranks: Ranks) -> None:
    """Before it communicates: another layout is captured by all ranks later."""
    assert ranks.run(replay_raises) == [(0, [STEPS - 1, STEPS - 1])] * 2


def strictly() -> str:
    """What a call raises that would capture a collective of another type on one rank than on the other."""
    import parallel

    def exchange(x):
        found = torch.empty_like(x)
        torch.distributed.all_to_all_single(found, x * 2)
        return found + 1

    compiled = thunder.jit(exchange, transforms=[parallel.transform(strict=True)])
    x = torch.ones(4, 4, device=parallel.device(), dtype=(torch.float32, torch.int32)[parallel.RANK()])
    compiled(x)
    with pytest.raises(CaptureError) as caught:
        compiled(x)
    return str(caught.value)


def test_strict_says_what_ranks_have_to_do(ranks: Ranks) -> None:
    for message in ranks.run(strictly):
        assert "captures something else" in message and "; make the same calls on all ranks" in message


def in_a_group_of_some() -> tuple[int, list[int]]:
    """Rank 0 communicates in a group of its own, beside the default one; what differs, and replays."""
    import parallel

    some = torch.distributed.new_group([0])

    def reduced(x):
        y = x * 2
        torch.distributed.all_reduce(y)
        y = torch.sin(y) + 1
        torch.distributed.all_reduce(y, group=some)  # which warns on rank 1
        return y * 3

    compiled, differing = thunder.jit(reduced, transforms=[parallel.transform()]), 0
    for step in range(5):
        x = torch.full((4,), float(step + parallel.RANK()), device=parallel.device())
        differing += not torch.equal(compiled(x), reduced(x))
    return differing, parallel.summary(compiled)[0]["replays"]


def test_a_group_of_some_ranks(ranks: Ranks) -> None:
    """The ranks of a group have to make the same collectives in it alone."""
    assert ranks.run(in_a_group_of_some) == [(0, [4])] * 2


def other_options(what: str) -> list[str]:
    """What two calls raise where rank 1 has compiled the model in another way."""
    import parallel

    from thunder_cg.compat import distributed
    from thunder_cg.errors import OptionsDiffer

    is_other = parallel.RANK() == 1
    if what == "no transform" and is_other:
        parallel.ddp()  # a call of which would wait for rank 0
        return []
    options: dict[str, Any] = {"deny": ["torch.nn.functional.gelu"]} if what == "operators" and is_other else {}
    options |= {"capture_collectives": "never"} if what == "capture" and is_other else {}
    others: dict[str, Any] = {"executors": []} if what == "executors" and is_other else {}
    compiled = parallel.ddp(parallel.transform(**options), **others)
    found = []
    with patch.object(distributed, "timeout", lambda group: 0.5 if what == "no transform" else 60.0):
        for _ in range(2):
            loss = compiled(parallel.tokens(0)).square().mean()
            with pytest.raises(OptionsDiffer) as caught:
                loss.backward()
            found.append(str(caught.value))
    return found


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("operators", r"rank 1 has deny=\['torch.nn.functional.gelu'\], not \[\]"),
        ("executors", r"rank 1 has executors=\['torch', 'python'\], not \['"),
        ("capture", r"rank 1 has capture_collectives='never', not 'auto'"),
        ("no transform", r"rank 1 has run no function that was compiled with the transform and .*, in 0.5 s"),
    ],
)
def test_ranks_that_have_compiled_otherwise(ranks: Ranks, what: str, said: str) -> None:
    """They would make their collectives in another order, or launch others of them together."""
    first, second = ranks.run(other_options, what)
    assert len(first) == 2 and first[0] == first[1] and re.search(said, first[0]), first
    assert first[0].endswith("compile it on all ranks alike")
    assert all("rank 0 has " in each for each in second) and len(second) == (0 if what == "no transform" else 2)


def compiles_anew() -> tuple[int, list[str]]:
    """Rank 1 compiles the model once more, and rank 0 goes on with what it has."""
    import parallel

    found: list[list[torch.Tensor]] = []
    for graphs in ([], [parallel.transform()]):
        transforms = [DDPTransform(torch.distributed.group.WORLD, 25.0, None), *graphs]
        compiled = thunder.jit(parallel.model(), transforms=transforms)
        found.append(parallel.train(compiled, 3))
        with patch("thunder_cg.runtime.ranks.groups._TIMEOUT", 0.5):
            if parallel.RANK() == 1:
                compiled = thunder.jit(compiled._model, transforms=transforms)
            found[-1] += parallel.train(compiled, 3)
        compiled = thunder.jit(parallel.model(), transforms=transforms)  # on both
        found[-1] += parallel.train(compiled, 3)
    return parallel.differing(*found), [trace["captures"] for trace in parallel.summary(compiled)]


@pytest.mark.nightly
def test_a_rank_that_compiles_anew(ranks: Ranks) -> None:
    """It waits for the others for a short time only, and they capture together what all compile later."""
    assert ranks.run(compiles_anew) == [(0, [[1], [1]])] * 2


def other_options_without_graphs() -> tuple[int, str]:
    """How many regions a module has, and what its backward raises."""
    import parallel

    from thunder_cg.errors import OptionsDiffer

    operators = ["shallow_copy", "torch.nn.functional.linear", "torch.matmul", "torch.sum", "torch.true_divide"]
    operators += ["torch.permute", "torch_all_reduce_prim_impl", "torch_wait_prim_impl"]
    transform = parallel.transform(deny=operators[: None if parallel.RANK() == 1 else -2])
    compiled = ddp(thunder.jit(torch.nn.Linear(3, 3).to(parallel.device()), transforms=[transform]))
    with pytest.raises(OptionsDiffer) as caught:
        compiled(torch.ones(2, 3, device=parallel.device())).sum().backward()
    return parallel.summary(compiled)[1]["regions"], str(caught.value)


def test_ranks_without_graphs_that_have_compiled_otherwise(ranks: Ranks) -> None:
    """Rank 0 has collectives in a region, and rank 1 has no region."""
    first, second = ranks.run(other_options_without_graphs)
    assert first[0] and not second[0], (first, second)
    assert "rank 1 has deny=[" in first[1] and "rank 0 has deny=[" in second[1]


class CountedStore:
    """The store of a group. Counts how often each of its methods is called."""

    def __init__(self, store: Any, calls: Counter[str]) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> Any:
        self._calls[name] += 1
        return getattr(self._store, name)


def store_operations(call: Callable[[torch.Tensor], Any], batches: Sequence[int]) -> list[Counter[str]]:
    """What each call, with a batch of this size, asks of the stores of groups."""
    import parallel

    from thunder_cg.compat import distributed

    found: list[Counter[str]] = []
    store = distributed.store
    with patch.object(distributed, "store", lambda group: CountedStore(store(group), found[-1])):
        for batch in batches:
            found.append(Counter())
            call(parallel.tokens(0, batch=batch))
    return found


def store_operations_of_ddp(batches: Sequence[int]) -> list[Counter[str]]:
    import parallel

    compiled = parallel.ddp(parallel.transform())
    return store_operations(lambda tokens: compiled(tokens).square().mean().backward(), batches)


def test_ranks_agree_at_captures_only(ranks: Ranks) -> None:
    """One round for each layout: a vote before the capture and one after it. Steady calls ask nothing of a store."""
    for calls in ranks.run(store_operations_of_ddp, (4, 4, 4, 4, 3, 3, 3, 4, 3)):
        # The generation of the group, the options of the ranks, and that it warms up.
        assert calls[0].pop("check") >= 1 and calls[0] == {"add": 1, "set": 2, "get": 1}
        assert calls[1]["set"] == calls[5]["set"] == 2 and calls[4] == {"set": 1}
        assert not any(calls[i] for i in (2, 3, 6, 7, 8))


def other_batches_each_time() -> tuple[int, list[str]]:
    """Rank 1 has four sizes in turns, so it warms up while rank 0 tries to capture, and captures later."""
    import parallel

    def reduced(x):
        y = x.sum(0) * 2
        torch.distributed.all_reduce(y)
        return x + y

    found: list[list[torch.Tensor]] = []
    for function in (reduced, thunder.jit(reduced, transforms=[parallel.transform()])):
        rows = (2 + step % 4 if parallel.RANK() else 4 for step in range(8))
        # Copied to the host, since NCCL lets a rank run ahead.
        found.append([function(torch.arange(8.0 * n, device=parallel.device()).view(n, 8)).cpu() for n in rows])
    return parallel.differing(*found), [why for trace in parallel.summary(function) for why in trace["fallbacks"]]


def test_a_rank_that_has_given_up_says_so(ranks: Ranks) -> None:
    """Whoever captures later hears why it stays eager, and does not wait for it."""
    first, second = ranks.run(other_batches_each_time)
    assert first[0] == second[0] == 0 and len(second[1]) > 3
    for reason in second[1]:
        assert "rank 1 does not capture it: it warms up" in reason and reason.count("same calls") < 2, reason
