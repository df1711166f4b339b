"""Whole steps with their collectives as one graph on each rank: the bits of the plain loop, whatever another rank does.

| hazard                                                     | test                                         |
| ---------------------------------------------------------- | -------------------------------------------- |
| a rank captures, which runs nothing, while another waits   | test_a_rank_that_cannot_capture              |
| a rank replays while another runs Python                   | test_ranks_that_differ                       |
| calls are numbered otherwise where they are replayed       | test_ranks_that_differ                       |
| a graph holds the communicator of a group that goes        | test_a_group_that_is_destroyed               |
| memory is used again while a collective runs               | test_what_is_not_captured                    |
| a capture that fails leaves C++ in between                 | test_what_is_not_captured                    |
| NCCL reads memory that is nobody's argument               | test_what_is_not_captured                    |
| a collective writes to the batch, and no version says so   | test_what_is_not_captured                    |
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import Ranks
from test_ranks_differ import Watched, store_operations
from thunder.dynamo import thunderfx
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from thunder_cg import explain, graphed_step
from thunder_cg.compat import distributed
from thunder_cg.runtime.ranks import groups
from thunder_cg.runtime.ranks.steps import StepCall

nightly = pytest.mark.nightly
_OBSERVED = {"the first call of its kind: what the step does is noted": 1}
_OBSERVED |= {
    "len(optimizer.state) changed from 0 to 7, in the step, as in the first step of an optimizer: nothing to change": 1
}


def graphed(fn: Callable[..., Any], **options: Any) -> Any:
    import parallel

    return graphed_step(fn, backend="tape" if parallel.device().type == "cpu" else "cuda", **options)


def training_step(model: Any) -> Callable[..., Any]:
    """A step of all micro-batches, of which the last communicates; it returns the mean of the loss over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(*batches):
        optimizer.zero_grad()
        for i, tokens in enumerate(batches):
            with model.no_sync() if i < len(batches) - 1 else nullcontext():
                loss = model(tokens).square().mean()
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean

    return step


def step_of_own(model: Any, group: Any = None) -> Callable[..., Any]:
    """The usual step of one who reduces gradients with torch.distributed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(tokens):
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        works = [dist.all_reduce(p.grad, group=group, async_op=True) for p in model.parameters()]
        for work in works:
            work.wait()
        optimizer.step()
        return loss.detach()

    step.optimizer = optimizer
    return step


def state_of(model: Any) -> list[torch.Tensor]:
    tensors = [t for p in model.parameters() for t in (p, p.grad)]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def with_and_without(
    make: Callable[[Any], Callable[..., Any]], steps: int, around: Callable[[int], Any] = nullcontext
) -> tuple[int, Any]:
    """How many losses, batches, parameters and gradients of so many steps differ with graphs; and the step with graphs.

    Args:
        make: makes the step of a model.
        around: is entered around each step.
    """
    import parallel

    found: list[list[torch.Tensor]] = []
    for wrap in (lambda step: step, graphed):
        model = parallel.model()
        step = wrap(make(model))
        found.append([])
        for i in range(steps):
            tokens = parallel.tokens(i)
            with around(i):
                found[-1] += [step(tokens).clone(), tokens, *state_of(model)]
    return parallel.differing(*found), step


# Each kind of parallelism


_others: list[Any] = []


def sharded_parameter() -> torch.nn.Parameter:
    import parallel

    mesh = init_device_mesh(parallel.device().type, (dist.get_world_size(),))
    local = torch.ones(4, 8, device=parallel.device())
    return torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def same_bits(builder: str, steps: int, micro: int) -> tuple[int, int, dict[str, int]]:
    import parallel

    found: list[list[torch.Tensor]] = []
    _others.append(sharded_parameter())  # another part of the program has it, and its memory is a stand-in
    for graphs in ([], [parallel.transform()]):
        model = parallel.BUILDERS[builder](*graphs)
        step = training_step(model)
        step = graphed(step, modules=model) if graphs else step
        found.append([])
        for i in range(steps):
            tokens = (parallel.tokens(i * micro + j, shared="tensor" in builder) for j in range(micro))
            found[-1] += [step(*tokens).clone(), *state_of(model)]
    return parallel.differing(*found), step.replays, dict(step.in_python)


@pytest.mark.parametrize(
    ("builder", "micro"),
    [("ddp", 2), *(pytest.param(builder, 1, marks=nightly) for builder in ("fsdp zero2", "tensor parallel"))],
)
def test_same_bits(ranks: Ranks, builder: str, micro: int) -> None:
    for differing, replays, in_python in ranks.run(same_bits, builder, 6, micro):
        assert (differing, replays, in_python) == (0, 3, _OBSERVED)


# Ranks that differ


def meets(what: str) -> dict[str, list[Any]]:
    """Trains without and with graphs; one rank alone needs a capture until the ranks meet."""
    import parallel

    is_other, found = parallel.RANK() == 1, []
    parallel.forget_meetings()
    for wrap in (lambda step: step, graphed):
        model = parallel.model()
        step, values = wrap(step_of_own(model)), []
        for i in range(24):
            if what == "is released" and wrap is graphed and is_other and i == 6:
                step.release()
            batch = 3 + i % 2 if what == "other batches" and is_other else 4
            with patch.multiple(groups, _TIMEOUT=1.0, _MEETING_TIMEOUT=10.0, _PERIOD=5, _MEETING=4):
                loss = step(parallel.tokens(i, batch=batch)).clone()
                loss.item()  # so neither rank runs ahead
                values += [loss, *state_of(model)]
        found.append(values)
    in_python = dict(step.in_python)
    return {"differing": parallel.differing(*found), "n": (step.captures, step.replays), "in_python": in_python}


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["is released", "other batches"])
def test_ranks_get_together_again(ranks: Ranks, what: str) -> None:
    """A rank that replays captures with one that needs it, as soon as they meet."""
    first, second = ranks.run(meets, what)
    assert not first["differing"] and not second["differing"], (first, second)
    captures, replays = zip(first["n"], second["n"])
    assert captures == (2, 2) and replays[0] >= 18 and 8 <= replays[1] < replays[0], (first, second)


def what_runs(what: str, steps: int = 10) -> dict[str, Any]:
    """Trains without and with graphs, while rank 1 does something else, and then captures another step."""
    import parallel

    is_other, found = parallel.RANK() == 1, []
    for wrap in (lambda step: step, graphed):
        model = parallel.model()
        fn = step_of_own(model)
        step, values, held = wrap(fn), [], []
        with patched_capture(what, is_other):
            for i in range(steps):
                if what == "evaluates" and is_other and i % 2:
                    with torch.no_grad():
                        values.append(model(parallel.tokens(i, batch=2)))
                if what == "raises" and is_other and i in (1, 3, 6):
                    with pytest.raises(RuntimeError):
                        step(torch.zeros(4, device=parallel.device()))
                if what == "another learning rate" and is_other and i == 6:
                    fn.optimizer.param_groups[0]["lr"] = 0.2
                if what == "holds a gradient" and is_other and i == 6:
                    held.append(next(model.parameters()).grad)
                watched = Watched() if what == "is watched" and is_other and i in (2, 6) else nullcontext()
                batch = 3 if what == "uneven batches" and is_other and i % 3 == 2 else 4
                patience = 0.25 if i > 4 else groups._TIMEOUT  # both have captured, and rank 1 waits in vain
                with watched, patch.object(groups, "_TIMEOUT", patience):
                    values += [step(parallel.tokens(i, batch=batch)).clone(), *state_of(model)]
        found.append(values)
    after = graphed(step_of_own(parallel.model()))
    for i in range(4):
        after(parallel.tokens(i))
    return {
        "differing": parallel.differing(*found),
        "replays": step.replays,
        "captures": step.captures,
        "in_python": [reason for reason, count in step.in_python.items() for _ in range(count)],
        "after": after.captures,
    }


def patched_capture(what: str, is_other: bool) -> Any:
    """On rank 1, steps cannot be captured."""
    import parallel

    pool = parallel.pool_class()
    capture = pool.capture

    def fails(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(fn, functools.partial):
            capture(self, fn, *args, **kwargs)
            raise torch.OutOfMemoryError("none is left")
        return capture(self, fn, *args, **kwargs)

    return patch.object(pool, "capture", fails) if what == "cannot capture" and is_other else nullcontext()


def test_a_rank_that_cannot_capture(ranks: Ranks) -> None:
    first, second = ranks.run(what_runs, "cannot capture")
    for found in (first, second):
        assert not found["differing"] and not found["captures"] and found["after"] == 1, found
    assert first["in_python"][2:] == [f"rank 1 does not capture it: {second['in_python'][2]}"] * 8
    assert second["in_python"][2].startswith("OutOfMemoryError: none is left")


@pytest.mark.parametrize(
    ("what", "replays"),
    [
        ("uneven batches", (6, 4)),
        *(
            pytest.param(what, replays, marks=nightly)
            for what, replays in (
                ("is watched", (6, 5)),
                ("evaluates", (7, 7)),
                ("raises", (7, 5)),  # after zero_grad, so the next call finds no gradients, which takes another graph
                ("another learning rate", (7, 3)),
                ("holds a gradient", (7, 3)),
            )
        ),
    ],
)
def test_ranks_that_differ(ranks: Ranks, what: str, replays: tuple[int, int]) -> None:
    """One replays while the other runs Python, and they number their calls alike, so that both capture later."""
    answers = ranks.run(what_runs, what)
    for rank, found in enumerate(answers):
        assert not found["differing"] and found["captures"] == found["after"] == 1, found
        assert found["replays"] == replays[rank], (rank, found)
    reasons = answers[what == "uneven batches"]["in_python"]
    if what == "is watched":
        assert any("rank 1 does not capture it: a torch dispatch" in reason for reason in reasons)
    if what == "uneven batches":
        assert any("rank 0 did not answer within 0." in reason for reason in reasons)


def store_operations_of_a_step(batches: Sequence[int]) -> list[Counter[str]]:
    import parallel

    return store_operations(graphed(step_of_own(parallel.model())), batches)


def test_ranks_agree_at_captures_only(ranks: Ranks) -> None:
    """The third call captures. Replays ask nothing of a store."""
    for calls in ranks.run(store_operations_of_a_step, (4,) * 6):
        assert [each["set"] for each in calls[:3]] == [0, 1, 2] and not any(calls[3:])


def beside_a_thread() -> tuple[int, int, dict[str, int]]:
    """Trains without and with graphs; at the end of a call, a thread communicates elsewhere, as a checkpoint may do."""
    import parallel

    other, look = dist.new_group(), StepCall.look
    numbers = torch.ones(1, device=parallel.device())

    def communicates(call: StepCall) -> None:
        thread = threading.Thread(target=dist.all_reduce, args=(numbers,), kwargs={"group": other})
        thread.start()
        thread.join()
        look(call)

    def around(i: int) -> Any:
        return patch.object(StepCall, "look", communicates) if i == 1 else nullcontext()

    differing, step = with_and_without(step_of_own, 8, around)
    return differing, step.replays, dict(step.in_python)


@nightly
def test_another_thread_that_communicates(ranks: Ranks) -> None:
    """What it did during a call in Python keeps the step from being captured only once."""
    for differing, replays, in_python in ranks.run(beside_a_thread):
        assert not differing and replays == 4, in_python
        assert any("communicates in other groups than the call before" in reason for reason in in_python), in_python


def counts_less(uncounted: Sequence[int]) -> tuple[int, dict[str, int]]:
    """Each rank makes the collectives of so many calls of the others by itself. Returns the replays of the rest."""
    import parallel

    model = parallel.model()
    step = graphed(step_of_own(model))
    with patch.multiple(groups, _TIMEOUT=1.0, _SHORTEST=1.0):
        for i in range(14):
            if i < uncounted[parallel.RANK()]:
                for parameter in model.parameters():
                    dist.all_reduce(total := torch.zeros_like(parameter))
                total.sum().item()  # so neither rank runs ahead
            else:
                step(parallel.tokens(i)).item()
    parallel.forget_meetings()
    return step.replays, dict(step.in_python)


@nightly  # it waits for ranks that are late
def test_a_rank_that_has_counted_less(ranks: Ranks) -> None:
    """As `Join` has it of one without batches. The ranks number alike once they have asked in vain twice."""
    (first, said), (second, _) = ranks.run(counts_less, (2, 0))
    assert first == second >= 5, said


def in_groups_of_their_own() -> tuple[int, int, dict[str, int]]:
    """Trains without and with graphs; each rank also communicates in another group, of itself, and once more often."""
    import parallel

    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][parallel.RANK()]

    def make(model: Any) -> Callable[..., Any]:
        inner = step_of_own(model)

        def step(tokens):
            loss = inner(tokens)
            for _ in range(1 + dist.get_rank()):
                dist.all_reduce(loss, group=own)
            return loss

        return step

    differing, step = with_and_without(make, 6)
    return differing, step.replays, dict(step.in_python)


def test_ranks_with_other_groups(ranks: Ranks) -> None:
    """The ranks of a group agree on what happens in that group, whatever each does in others."""
    for differing, replays, in_python in ranks.run(in_groups_of_their_own):
        assert not differing and replays == 3, in_python


# Functional collectives, and those of DTensors that the step makes


def reduce_functionally(gradients: list[torch.Tensor], mesh: Any) -> None:
    """Waited for late, in place, of each other, of several tensors, and by a DTensor."""
    sums = [functional.all_reduce(each, "sum", mesh) for each in gradients[:2]]
    functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(gradients[2], "sum", mesh.get_group().group_name))
    both = functional.all_gather_tensor(functional.broadcast(gradients[3], 1, mesh), 0, mesh)
    gradients[3].copy_(functional.reduce_scatter_tensor(both, "sum", 0, mesh))
    sums += functional.all_reduce_coalesced(gradients[4:6], "sum", mesh)
    for gradient, total in zip(gradients[:2] + gradients[4:], sums):
        gradient.copy_(total)
    parts = DTensor.from_local(gradients[6], mesh, [Partial()], run_check=False)
    gradients[6].copy_((parts * 2).redistribute(mesh, [Replicate()]).to_local())


def functionally() -> tuple[int, int, str]:
    import parallel

    mesh = init_device_mesh(parallel.device().type, (dist.get_world_size(),))

    def make(model: Any) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(tokens):
            optimizer.zero_grad()
            loss = functional.all_reduce(model(tokens), "sum", mesh).square().mean()  # which has a gradient
            loss.backward()
            reduce_functionally([p.grad for p in model.parameters()], mesh)
            optimizer.step()
            return loss.detach()

        return step

    differing, step = with_and_without(make, 6)
    return differing, step.replays, str(explain(step))


def test_functional_collectives(ranks: Ranks) -> None:
    for differing, replays, text in ranks.run(functionally):
        assert not differing and replays >= 3, text
        group = r"in the group default_pg of 2 ranks"
        said = rf"Graph 0: \d+ .*; 5 all_reduce of 8\.1 KiB {group}; 2 can .*; 1 broadcast of 2\.0 KiB {group}; 0 can "
        assert re.search(said, text), text


def overlapping() -> str:
    """Reduces two gradients, and computes with the first only while the second is under way; and the rest together."""
    import parallel

    def make(model: Any) -> Callable[..., Any]:
        def step(tokens):
            model.zero_grad()
            loss = model(tokens).square().mean()
            loss.backward()
            first, second, *others = (p.grad for p in model.parameters())
            works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
            works[0].wait()
            first.div_(2)
            works[1].wait()
            with distributed.coalescing():
                for each in others:
                    dist.all_reduce(each)
            return loss.detach()

        return step

    step = graphed(make(parallel.model()))
    for i in range(4):
        step(parallel.tokens(i))
    return str(explain(step))


def test_what_overlaps(ranks: Ranks) -> None:
    """`explain` counts the collectives that have work between their start and their wait."""
    for text in ranks.run(overlapping):
        group = "in the group default_pg of 2 ranks"
        assert f"2 all_reduce of 4.0 KiB {group}; 1 can overlap with compute" in text, text
        assert f"1 allreduce_coalesced of 2.3 KiB {group}; 0 can overlap with compute" in text, text


# Parameters that are DTensors


def on_dtensors(model: Any) -> Callable[..., Any]:
    """With PyTorch's tensor parallelism, an embedding too. It clips gradients by their norm, and returns that, too."""
    import parallel

    mesh = init_device_mesh(parallel.device().type, (dist.get_world_size(),))
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True)
    rows = RowwiseParallel(input_layouts=Replicate())
    plan = {"words": rows, "block.up": ColwiseParallel(), "block.down": RowwiseParallel(), "block": whole}
    parallelize_module(model, mesh, plan)
    parameters = [*model.parameters()]
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)  # which takes no DTensors with others

    def step(tokens):
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(sharded, 0.1).full_tensor()
        optimizer.step()
        return torch.stack([loss.detach(), norm])

    return step


def with_dtensors(what: str) -> tuple[int, tuple[int, int], list[str]]:
    """How much differs from the plain loop, where something happens to a DTensor before the seventh step."""
    models: list[Any] = []
    held: list[tuple[Any, torch.Tensor]] = []

    def make(model: Any) -> Callable[..., Any]:
        models.append(model)
        return on_dtensors(model)

    @contextmanager
    def around(i: int) -> Iterator[None]:
        if i == 6:
            _HAPPEN[what](models[-1].block.up.weight, held)
        yield

    differing, step = with_and_without(make, 12, around)
    differing += sum(not torch.equal(local(each), then) for each, then in held)
    return differing, (step.captures, step.replays), [*step.in_python]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _hold(held: list[Any], each: torch.Tensor) -> None:
    held.append((each, local(each).clone()))


@torch.no_grad()
def _replace_part(weight: DTensor, held: list[Any]) -> None:
    weight._local_tensor = weight._local_tensor * 2


@torch.no_grad()
def _swap(weight: DTensor, held: list[Any]) -> None:
    """As ``module.to()`` does."""
    other = DTensor.from_local(weight.to_local() * 2, weight.device_mesh, weight.placements, run_check=False)
    torch.utils.swap_tensors(weight, torch.nn.Parameter(other))


def _free_part(weight: DTensor, held: list[Any]) -> None:
    """As FSDP2 does, and it comes back at the same place, or at another one."""
    storage = weight._local_tensor.untyped_storage()
    content = weight._local_tensor.detach().clone()
    storage.resize_(0)
    _hold(held, torch.ones_like(content))
    storage.resize_(content.nbytes)
    weight._local_tensor.detach().copy_(content)


_HAPPEN: dict[str, Callable[[Any, list[Any]], object]] = {
    "nothing": lambda weight, held: None,
    "its gradient is held": lambda weight, held: _hold(held, weight.grad),
    "the part of its gradient is held": lambda weight, held: _hold(held, weight.grad._local_tensor),
    "a view of that is held": lambda weight, held: _hold(held, weight.grad.to_local()[1:]),
    "it has another part": _replace_part,
    "it is swapped": _swap,
    "its part has other memory": _free_part,
}


@pytest.mark.parametrize("what", _HAPPEN)
@pytest.mark.nightly_after(1)
def test_dtensors(ranks: Ranks, what: str) -> None:
    """A replay needs the parts whose addresses its graph has, and overwrites no gradient that is held."""
    if what == "it is swapped" and sys.version_info >= (3, 12):
        pytest.skip("swap_tensors refuses it: something has a weak reference to a parameter that a step has noted")
    for differing, (captures, replays), in_python in ranks.run(with_dtensors, what):
        assert not differing, in_python
        if "held" in what:
            assert (captures, replays) == (1, 3) and "still held" in in_python[-1]
        else:
            assert captures >= 1 and replays >= (9 if what == "nothing" else 6), in_python


def replicates_implicitly() -> tuple[int, int]:
    """Replays of a step that takes a plain tensor for a replicated DTensor, and what it raises where that is off."""
    import parallel

    mesh = init_device_mesh(parallel.device().type, (dist.get_world_size(),))
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(4, device=parallel.device()), mesh, [Replicate()]))

    @graphed
    def step(x):
        weight.grad = None
        loss = (weight * x).to_local().sum()
        loss.backward()
        return loss.detach()

    x = torch.ones(4, device=parallel.device())
    with implicit_replication():
        for _ in range(5):
            step(x)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        step(x)
    return step.captures, step.replays


@nightly
def test_implicit_replication(ranks: Ranks) -> None:
    assert ranks.run(replicates_implicitly) == [(1, 2)] * 2


# Groups that go


def destroy_and_begin_anew() -> dict[str, Any]:
    import parallel

    found: list[list[torch.Tensor]] = []
    counts = []
    for wrap in (lambda step: step, graphed):
        model = parallel.model()
        for _ in range(2):
            group = dist.new_group([0, 1])
            step = wrap(step_of_own(model, group))
            found.append([step(parallel.tokens(i)).clone() for i in range(5)])
            dist.destroy_process_group(group)  # which hangs if a graph holds a communicator of NCCL
            if wrap is graphed:
                counts.append((step.captures, step.replays, len(step.recordings)))
    return {"differing": parallel.differing(found[0] + found[1], found[2] + found[3]), "counts": counts}


def test_a_group_that_is_destroyed(ranks: Ranks) -> None:
    for found in ranks.run(destroy_and_begin_anew):
        assert not found["differing"] and found["counts"] == [(1, 2, 0)] * 2, found


# What is not captured


def refused(what: str) -> tuple[int, int, list[str]]:
    differing, step = with_and_without(lambda model: STEPS[what](model, dist.group.WORLD), 5)
    return differing, step.captures, [reason for reason, count in step.in_python.items() if count > 1]


def _with(communicate: Callable[..., Any]) -> Callable[..., Any]:
    """A step that calls this on the gradient of a parameter, and the group."""

    def made(model: Any, group: Any) -> Callable[..., Any]:
        first = next(model.parameters())
        training = step_of_own(model)

        def step(tokens):
            loss = training(tokens)
            communicate(first.grad, group)
            return loss

        return step

    return made


def _send(gradient: torch.Tensor, group: Any) -> None:
    if dist.get_rank() == 0:
        dist.send(gradient, 1)
    else:
        dist.recv(gradient, 0)


def _wait_for_another(gradient: torch.Tensor, group: Any) -> None:
    """Two collectives, and two waits for one of them."""
    dist.all_reduce(gradient.clone(), group=group, async_op=True)
    work = dist.all_reduce(gradient, group=group, async_op=True)
    work.wait()
    work.wait()


def _wait_for_others(gradient: torch.Tensor, group: Any) -> None:
    (dist.monitored_barrier if gradient.device.type == "cpu" else dist.barrier)(group)


def _poll(gradient: torch.Tensor, group: Any) -> None:
    work = dist.all_reduce(gradient, group=group, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


def _wrapped_by(wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    def made(model: Any, group: Any) -> Callable[..., Any]:
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)

        def step(tokens):
            optimizer.zero_grad()
            loss = wrapped(tokens).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    return made


def _sharded_by_torch(model: Any) -> Any:
    import parallel

    return FullyShardedDataParallel(model, device_id=parallel.device())


def _reduces_an_argument(model: Any, group: Any) -> Callable[..., Any]:
    training = step_of_own(model)

    def step(tokens):
        dist.all_reduce(tokens[1:], dist.ReduceOp.MAX)
        return training(tokens)

    return step


def _kept_eager(model: Any, group: Any) -> Callable[..., Any]:
    import parallel

    if "kept eager" not in _compiled:
        _compiled["kept eager"] = parallel.ddp(parallel.transform(capture_collectives="never"))
    compiled = _compiled["kept eager"]
    return lambda tokens: _loss_with_gradients(compiled, model, tokens)


_compiled: dict[str, Any] = {}


def _loss_with_gradients(compiled: Any, model: Any, tokens: torch.Tensor) -> torch.Tensor:
    compiled.zero_grad()
    model.zero_grad()
    loss = compiled(tokens).square().mean() + model(tokens).square().mean()
    loss.backward()
    return loss


def _hidden(model: Any, group: Any) -> Callable[..., Any]:
    import parallel

    hidden = ctypes.py_object(torch.zeros((), device=parallel.device()))  # what it holds is not looked at
    step = step_of_own(model)

    def with_it(tokens):
        loss = step(tokens)
        dist.all_reduce(getattr(hidden, "val" + "ue"))
        return loss

    return with_it


STEPS: dict[str, Callable[..., Any]] = {
    "an argument": _reduces_an_argument,
    "objects": _with(lambda gradient, group: dist.broadcast_object_list([None], 0, group)),
    "point to point": _with(_send),
    "functional, not waited for": _with(lambda gradient, group: functional.all_reduce(gradient, "sum", group)),
    "barrier": _with(_wait_for_others),
    "not waited for": _with(_wait_for_another),
    "polled": _with(_poll),
    "a method": _with(lambda gradient, group: group.allreduce([gradient]).wait()),
    "DistributedDataParallel": _wrapped_by(DistributedDataParallel),
    "FullyShardedDataParallel": _wrapped_by(_sharded_by_torch),
    "fully_shard": _wrapped_by(fully_shard),
    "kept eager": _kept_eager,
    "unknown origin": _hidden,
}


REASONS = {
    "an argument": "a collective writes to an argument of the step, at .*; clone it first",
    "not waited for": r"a collective is not waited for in the step, at .*; call wait\(\) of what it returns",
    "polled": r"the host asks whether a collective is done, at .*; call wait\(\) of what it returns",
    "DistributedDataParallel": r"DistributedDataParallel counts gradients in C\+\+.*; take thunder.distributed.ddp",
    "kept eager": r'was compiled with capture_collectives="never"; compile it without that option',
    "FullyShardedDataParallel": r"PyTorch's FSDP gathers and frees .* in between.*; compile its modules with thunderfx",
    "fully_shard": r"PyTorch's FSDP .* \(see test_whole_steps.py:\d+\); compile its modules with thunderfx",
    "functional, not waited for": r"a collective is not waited for in the step, at .*; call wait\(\)",
    "point to point": r"it communicates from point to point \((send|recv)\), at .*; do that outside of the step",
    "objects": r"it communicates objects of Python \(broadcast_object_list\), at .*; do that outside of the step",
    "barrier": r"the host waits for the other ranks \((monitored_)?barrier\), at .*; do that outside of the step",
    "a method": r"it calls a method of a process group itself, at .*; call the function of torch.distributed",
    "unknown origin": r"the step seems to use a tensor \(\) of float32 in .*, and it is not known where from",
}


@pytest.mark.parametrize("what", [*[*REASONS][:5], *(pytest.param(what, marks=nightly) for what in [*REASONS][5:])])
def test_what_is_not_captured(ranks: Ranks, what: str) -> None:
    for differing, captures, in_python in ranks.run(refused, what):
        assert not differing and not captures, in_python
        assert len(in_python) == 1 and re.search(REASONS[what], in_python[0]), in_python


def on_fsdp2(reshard: bool, micro: int) -> tuple[int, int, list[str]]:
    """How much differs in ten steps of a model that PyTorch shards; the fewest replays of its graphs; what is said."""
    import parallel

    found: list[list[torch.Tensor]] = []
    for graphs in ([], [parallel.transform()]):
        torch._dynamo.reset()
        model = parallel.model()
        for module in (model.block, model):
            fully_shard(module, reshard_after_forward=reshard)
        compiled = thunderfx(model, transforms=graphs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(*batches, model=model, compiled=compiled, optimizer=optimizer):
            optimizer.zero_grad()
            for i, tokens in enumerate(batches):
                model.set_requires_gradient_sync(i == len(batches) - 1)
                loss = compiled(tokens).square().mean()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss.detach()

        step = graphed(step) if graphs else step
        found.append([])
        for i in range(10):
            found[-1] += [step(*(parallel.tokens(i * micro + j) for j in range(micro))).clone(), *state_of(model)]
    replays = [trace["replays"] for trace in parallel.summary(compiled) if trace["regions"]]
    return parallel.differing(*found), min(map(min, replays)), [*step.in_python]


@pytest.mark.parametrize(("reshard", "micro"), [(True, 1), (False, 1), (True, 2)])
@nightly
def test_fsdp2_in_a_step_has_graphs_of_its_own(ranks: Ranks, reshard: bool, micro: int) -> None:
    for differing, replays, in_python in ranks.run(on_fsdp2, reshard, micro):
        assert not differing and replays >= 3, (replays, in_python)
        assert len(in_python) <= 2 and any("gathers and frees" in each for each in in_python), in_python
