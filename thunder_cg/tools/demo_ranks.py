"""The demo on several ranks: trains the small GPT under Thunder's ddp or fsdp, without CUDA graphs and with them.

Each rank draws its own batches and dropout masks. It compares each of its losses and parameters, bit for bit.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import thunder
import thunder.distributed
import torch

from thunder_cg import cudagraph_transform
from thunder_cg.progress import Progress
from thunder_cg.tools import demo
from thunder_cg.tools.demo import CharacterGPT, Corpus, DemoRun, DemoSettings, print_lines
from thunder_cg.tools.ranks import Rank, RankFailed, run_on_ranks
from thunder_cg.tools.workers import Supervisor, WorkerProgress

TIMEOUT = 900.0  # seconds for all of it

PARALLEL: Mapping[str, Callable[[Any, torch.device], Any]] = {
    "ddp": lambda compiled, device: thunder.distributed.ddp(compiled),
    "fsdp": lambda compiled, device: thunder.distributed.fsdp(compiled, device=device),
}


@dataclass(frozen=True, slots=True)
class RankDemo:
    """What one rank found."""

    losses: int
    parameters: int
    differences: list[str]
    last_loss: float
    plain_ms: float
    captured_ms: float
    plan: list[str]


def run(settings: DemoSettings, parallel: str, size: int) -> int:
    """Starts the ranks and prints what they found. Returns 0; 1 if a rank fails, or its two runs differ in one bit."""
    print_lines(_introduction(settings, parallel, size))
    progress = Progress(2 * settings.steps)

    def show(stage: str, ticks: int) -> None:
        if ticks:
            progress.tick(stage, ticks)
        else:
            progress.show(stage)

    try:
        found = run_on_ranks(train_twice, (settings, parallel), size, settings.device.type, TIMEOUT, show)
        progress.clear()
    except RankFailed as failure:
        print(f"FAILED, and all other ranks were ended: {failure}", flush=True)
        return 1
    return _print_results(settings, found)


def run_here(settings: DemoSettings, parallel: str, here: Rank) -> int:
    """Is one of the ranks that torchrun started. Rank 0 prints; all return the status of `run`."""
    here.begin_group()
    if here.rank == 0:
        print_lines(_introduction(settings, parallel, here.size))
    found: list[Any] = [None] * here.size
    torch.distributed.all_gather_object(found, train_twice(here, None, settings, parallel))
    torch.distributed.destroy_process_group()
    if here.rank == 0:
        return _print_results(settings, found)
    return int(any(rank.differences for rank in found))


def train_twice(here: Rank, supervisor: Supervisor | None, settings: DemoSettings, parallel: str) -> RankDemo:
    """Both runs on one rank, whose group has begun."""
    settings = replace(settings, device=here.device)
    with demo.deterministic():
        torch.manual_seed(demo.SEED)  # ranks begin with the same weights
        corpus = Corpus.of(demo.package_source(), settings.device)
        model = CharacterGPT(settings, len(corpus.vocabulary)).to(settings.device)
        runs = []
        progress = Progress(2 * settings.steps, sys.stderr if here.rank == 0 else StringIO())
        if supervisor is not None:
            progress = WorkerProgress(supervisor)
        for transforms in ([], [cudagraph_transform(backend=settings.backend)]):
            stage = "training with graphs" if transforms else "training without graphs"
            compiled = PARALLEL[parallel](thunder.jit(copy.deepcopy(model), transforms=transforms), settings.device)
            clock = demo.Clock(settings.device, progress, stage)
            runs.append(_train(compiled, corpus, settings, clock, here.rank))
        progress.clear()
    plain, captured = runs
    return RankDemo(
        len(plain.losses),
        len(plain.parameters),
        demo.differences(plain, captured),
        captured.losses[-1].item(),
        plain.step_ms,
        captured.step_ms,
        [*demo.plan("the training step", captured.step)],
    )


def _train(compiled: Any, corpus: Corpus, settings: DemoSettings, clock: demo.Clock, rank: int) -> DemoRun:
    torch.manual_seed(demo.SEED + rank)
    losses, step_ms = demo.train(compiled, corpus, settings, clock, demo.SEED + rank)
    parameters = {name: parameter.detach() for name, parameter in compiled.named_parameters()}
    return DemoRun(losses, parameters, "", step_ms, math.nan, compiled, None)


def _introduction(settings: DemoSettings, parallel: str, size: int) -> Iterator[str]:
    kind = "NCCL, a GPU each" if settings.backend == "cuda" else "gloo; the tape backend stands in for CUDA graphs"
    yield f"A character-level GPT, {settings.layers} layers x {settings.width}, {parallel} on {size} ranks ({kind})"
    yield f"  train  {settings.steps} steps of {settings.batch} x {settings.context} characters a rank, AdamW, dropout"
    yield "  twice  from one seed: with plain thunder.jit, and with cudagraph_transform()"


def _print_results(settings: DemoSettings, found: Sequence[RankDemo]) -> int:
    print_lines(found[0].plan)
    print_lines(_times(settings, found))
    print_lines(_verdict(found))
    return int(any(rank.differences for rank in found))


def _times(settings: DemoSettings, found: Sequence[RankDemo]) -> Iterator[str]:
    yield ""
    yield f"{'Milliseconds a step':24}{'without':>10}{'with':>10}{'ratio':>10}{'last loss':>12}"
    for number, rank in enumerate(found):
        times = f"{rank.plain_ms:10.2f}{rank.captured_ms:10.2f}{rank.plain_ms / rank.captured_ms:9.2f}x"
        yield f"  {f'rank {number}':22}{times}{rank.last_loss:12.4f}"
    if settings.backend == "tape":
        yield demo.TAPE_NOTE


def _verdict(found: Sequence[RankDemo]) -> Iterator[str]:
    yield ""
    total = f"{found[0].losses} losses and {found[0].parameters} parameters"
    if not any(rank.differences for rank in found):
        yield f"Agreement: on each of {len(found)} ranks, {total} are the same with and without graphs, bit for bit."
        return
    for number, rank in enumerate(found):
        if not rank.differences:
            continue
        yield f"DISAGREEMENT on rank {number}: of {total}, {len(rank.differences)} differ with graphs from without:"
        yield from (f"  {line}" for line in rank.differences[: demo.SHOWN_DIFFERENCES])
    yield demo.BUG
