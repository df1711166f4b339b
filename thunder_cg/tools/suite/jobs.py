"""Measures each row in a process of its own: one that crashes or hangs costs only its row."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from thunder_cg.tools.suite.row import Row, measure
from thunder_cg.tools.workers import Parent, Workers

# For the packages of the models: no network, no chatter, and no more processes. The last one makes cuBLAS
# deterministic, and is read before CUDA starts.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@dataclass(frozen=True, slots=True)
class Job:
    """What one process measures.

    Attributes:
        catalogue: the module that has the model in its `MODELS`.
    """

    catalogue: str
    model: str
    package: str
    mode: str
    device: torch.device
    calls: int


def measure_all(jobs: Sequence[Job], at_once: int, seconds: float) -> Iterator[Row]:
    """The rows as they come, `at_once` of them in the making.

    On a GPU each is made without times first; once nothing else runs any more, they are timed one by one, and come a
    second time. What only waits for that takes GPU memory, and no processor.

    Args:
        seconds: after which the process of a row is ended, and as many again for its timing.
    """
    workers = Workers(_work, jobs, at_once, seconds, held=len(jobs), environment=ENVIRONMENT)
    for answer in workers.answers():
        row = answer.result or Row(answer.task.model, answer.task.package, answer.task.mode)
        yield replace(row, failure=answer.failure) if answer.failure else row


def _work(job: Job, parent: Parent) -> None:
    def ready(row: Row) -> None:
        parent.give(row)
        parent.wait()

    entry = importlib.import_module(job.catalogue).MODELS[job.model]
    with torch._dynamo.config.patch(recompile_limit=64):  # several compiled copies share the model's code
        parent.give(measure(entry, job.mode, job.device, job.calls, ready, parent.say))
