"""The ranks of one process group on one machine, each in a process of its own. One that fails or hangs ends all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from thunder_cg.tools.workers import Supervisor, Workers

COLLECTIVE = timedelta(seconds=180)  # after which a rank that waits for another one fails, or NCCL's watchdog ends it


class RankFailed(RuntimeError):
    """A rank raised, died or hung; the others were ended. It says which rank, why, and where the others were.

    Attributes:
        stage: what the rank had reported last.
    """

    def __init__(self, problem: str, stage: str = "") -> None:
        super().__init__(problem)
        self.stage = stage


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a group: NCCL with a GPU for each rank, or gloo on the CPU."""

    rank: int
    size: int
    device_type: str
    init_method: str = "env://"

    @classmethod
    def of_torchrun(cls) -> Rank | None:
        """This process, if torchrun started it."""
        if not torch.distributed.is_torchelastic_launched():
            return None
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "cpu")

    @property
    def device(self) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))

    def begin_group(self) -> None:
        kind: dict[str, Any] = {"backend": "gloo"}
        if self.device_type == "cuda":
            torch.cuda.set_device(self.device)
            kind = {"backend": "nccl", "device_id": self.device}
        torch.distributed.init_process_group(
            rank=self.rank, world_size=self.size, init_method=self.init_method, timeout=COLLECTIVE, **kind
        )


@dataclass(frozen=True, slots=True)
class _RankTask:
    rank: Rank
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


def run_on_ranks(
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    size: int,
    device_type: str,
    timeout: float,
    on_progress: Callable[[str, int], None] = lambda stage, ticks: None,
    on_result: Callable[[Any], None] = lambda result: None,
) -> list[Any]:
    """What ``work(rank, supervisor, *arguments)`` returns on each rank.

    Args:
        work: a function of a module, so that it can be pickled, as can its arguments and its result.
        timeout: seconds for all of it.
        on_progress: called with what rank 0 reports, a stage and its ticks.
        on_result: called with each result that rank 0 sends, and with what it returns.

    Raises:
        RankFailed: a rank failed; it says which one, and why.
    """
    results: list[Any] = [None] * size
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Rank(rank, size, device_type, f"file://{folder}/store") for rank in range(size)]
        workers = Workers(
            _work,
            [_RankTask(rank, work, arguments) for rank in ranks],
            jobs=size,
            timeout=timeout,
            tasks_per_process=2,  # of which there is one: no process ends before the last rank is done
            on_progress=lambda task, stage, ticks: None if task.rank.rank else on_progress(stage, ticks),
            on_result=lambda task, result: None if task.rank.rank else on_result(result),
        )
        with closing(workers.answers()) as answers:  # closed, it ends all processes
            for answer in answers:
                if answer.failure:
                    others = workers.where() if answer.hangs else []
                    said = [(answer.task, answer.failure), *others]
                    problem = "; ".join(f"rank {task.rank.rank}: {each}" for task, each in said)
                    raise RankFailed(problem, answer.stage)
                results[answer.task.rank.rank] = answer.result
    return results


def _work(task: _RankTask, supervisor: Supervisor) -> None:
    """The group is not destroyed: a graph that was made by hand and lives would hang that. The process ends anyway."""
    task.rank.begin_group()
    supervisor.send_result(task.work(task.rank, supervisor, *task.arguments))
