"""Collectives in the order of `schedule_collectives`: the bits of Thunder's order, one order on all ranks."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import thunder
import torch
from ranks import Ranks

from thunder_cg import dump_dot, explain
from thunder_cg.analysis import coalescing, collectives
from thunder_cg.compat import distributed
from thunder_cg.runtime.tape import TapeBackend

BUILDERS = ("ddp", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("fsdp zero2", "tensor parallel")))


def same_bits(builder: str, in_flight: int, at_once: int):
    """How many values differ, and for each trace its collectives before and after, and the operands of each launch."""
    import parallel
    from thunder.core.transform_common import Transform

    from thunder_cg.analysis.ops import read

    class Schedules(Transform):
        def __init__(self) -> None:
            self.found = []

        def transform_trace_post_optimization(self, trace, **kwargs):
            new = collectives.schedule_collectives(trace)
            ops = read(new)
            launches = [[ops.ops[i] for i in launch] for launch in coalescing.coalesced(ops.ops, ops.values)]
            sizes = [
                [max(ops.values[name].nbytes for name in op.names) for op in launch]
                for launch in launches
                if launch[0].communicates and "wait" not in launch[0].name
            ]
            self.found.append([*(communicating(each) for each in (trace, new)), sizes])
            return new

    def communicating(trace):
        ops = read(trace).ops
        return [(op.name, op.inputs, op.outputs) for op in ops if op.rule is not None and op.rule.is_collective]

    build, shared = parallel.BUILDERS[builder], "tensor" in builder
    theirs = parallel.reference(builder, 5, 1)
    limit = mock.patch.object(collectives, "_IN_FLIGHT", in_flight)
    with limit, mock.patch.object(coalescing, "_COALESCED", at_once):
        schedules = Schedules()
        ours = parallel.train(build(schedules, parallel.transform()), 5, shared=shared)
    return parallel.differing(ours, theirs), schedules.found


@pytest.mark.parametrize("builder", BUILDERS)
def test_same_bits_and_one_order(ranks: Ranks, builder: str) -> None:
    """With little in flight and in one launch; test_parallel.py has the limits that are in force."""
    at_once = 2048
    results = ranks.run(same_bits, builder, 1, at_once)
    for differing, _ in results:
        assert not differing
    traces = results[0][1]
    assert traces == results[1][1] and len(traces) == 2
    for before, after, sizes in traces:
        assert sorted(before) == sorted(after)
        assert all(len(launch) == 1 or sum(launch) <= at_once for launch in sizes)
    assert "tensor" in builder or any(before != after for before, after, _ in traces)
    # Each collective of tensor parallelism is waited for before the next one can begin.
    assert ("tensor" in builder) == all(len(launch) == 1 for *_, sizes in traces for launch in sizes)
    assert "tensor" in builder or all(len(sizes) > 1 for *_, sizes in traces if sizes)


@pytest.fixture(scope="module")
def spawned() -> Iterator[Ranks]:
    """Two processes that hash strings differently, so that sets of them have other orders."""
    pool = Ranks(2, "cpu", spawns=True)
    yield pool
    pool.close()


def hash_and_order(builder: str):
    return hash("a"), same_bits(builder, 1, 2048)


@pytest.mark.nightly
@pytest.mark.parametrize("builder", ["ddp", "fsdp zero2", "fused ddp", "fused fsdp"])
def test_one_order_whatever_the_hashes(spawned: Ranks, builder: str) -> None:
    (first_hash, first), (second_hash, second) = spawned.run(hash_and_order, builder)
    assert first_hash != second_hash
    assert first == second and not first[0] and len(first[1]) == 2


class Many(torch.nn.Module):
    """So many small parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(1 + i % 5)) for i in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([*self.all]).square().sum() * x.sum()


def reduce_many(parameters: int) -> tuple[int, list[Counter[str]], dict[str, Any]]:
    """How many gradients differ; what plain Thunder and an eager call of ours launch; what ran of the backward."""
    import parallel

    found: list[list[torch.Tensor]] = []
    launched: list[Counter[str]] = []
    for graphs in ([], [parallel.transform()]):
        compiled = thunder.distributed.ddp(thunder.jit(Many(parameters).to(parallel.device()), transforms=graphs))
        found.append([])
        launched.append(Counter())
        for step in range(4):
            compiled.zero_grad()
            with mock.patch.object(TapeBackend, "coalesce", lambda self, group: distributed.coalesce(group)):
                loss = compiled(torch.full((3,), step + parallel.RANK() + 0.1, device=parallel.device()))
                told = distributed.told_of_collectives(lambda name, *_: launched[-1].update([name]), ignored, ignored)
                with told if step == 0 else nullcontext():
                    loss.backward()
            found[-1] += [p.grad.clone() for p in compiled.parameters()]
    return parallel.differing(*found), launched, parallel.summary(compiled)[1]


def ignored(*args: Any) -> None:
    pass


@pytest.mark.parametrize("parameters", [9, pytest.param(149, marks=pytest.mark.nightly)])
def test_many_small_collectives_are_one_launch(ranks: Ranks, parameters: int) -> None:
    """Two numbers have one sum in either order."""
    for differing, launched, backward in ranks.run(reduce_many, parameters):
        assert not differing and launched == [{"allreduce": parameters}, {"allreduce_coalesced": 1}]
        assert (backward["collectives"], backward["launches"], backward["replays"]) == (parameters, 1, [3])


def beside(builder: str) -> list[tuple[list[bool], list[bool]]]:
    """Of the collectives of each trace: whether compute follows before the wait; whether kernels of the graph are tied
    to it in neither order.
    """
    import parallel

    found = []
    with mock.patch.object(coalescing, "_COALESCED", 0):
        compiled = parallel.BUILDERS[builder](parallel.transform())
        parallel.train(compiled, 3)
        for trace in explain(compiled).traces:
            for region in trace.regions if trace.collectives else ():
                with TemporaryDirectory() as folder:
                    dump_dot(compiled, region.name, Path(folder, "graph.dot"))
                    text = Path(folder, "graph.dot").read_text()
                found.append(([each.overlaps for each in trace.collectives], untied(text)))
    return found


def untied(text: str) -> list[bool]:
    """For each collective of a graph in Graphviz's language, whether there is a kernel neither before nor after it."""
    labels = dict(re.findall(r'^ *"?(\w+)"? ?\[(.*?)"\];', text, re.DOTALL | re.MULTILINE))
    kernels = {node for node, label in labels.items() if "KERNEL" in label or "aten::" in label}
    following = defaultdict(set)
    for first, second in re.findall(r'"?(\w+)"? -> "?(\w+)', text):
        following[first].add(second)

    def after(node: str) -> set[str]:
        reached, waiting = {node}, [node]
        while waiting:
            new = following[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached

    communicating = [node for node, label in labels.items() if "nccl" in label or "_record_collective" in label]
    kernels -= {*communicating}
    return [any(node not in after(kernel) for kernel in kernels - after(node)) for node in communicating]


@pytest.mark.parametrize("builder", ["ddp", pytest.param("fsdp zero2", marks=pytest.mark.nightly)])
def test_collectives_run_beside_compute(ranks: Ranks, builder: str) -> None:
    """A GPU has them on another branch of the graph: what is on one stream is a chain. The tape ties data only."""
    for found in ranks.run(beside, builder):
        assert len(found) == (1 if builder == "ddp" else 2)
        for overlaps, are_untied in found:
            assert len(overlaps) == len(are_untied) == 7
            assert sum(are_untied) >= sum(overlaps) >= 5
