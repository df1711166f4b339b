"""Runs each row in a process of its own: one that crashes or hangs costs only its row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

import torch

from thunder_cg.zoo.models import Entry
from thunder_cg.zoo.results import read_row
from thunder_cg.zoo.row import Row
from thunder_cg.zoo.worker import STAGE

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
        timeout: seconds after which the process is ended, and as many again for its timing.
    """

    catalogue: str
    entry: Entry
    mode: str
    device: torch.device
    calls: int
    timeout: float


class Worker:
    """A process that measures a row in two parts, the second one only on a GPU."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._row = Row(job.entry.name, job.entry.package, job.mode)
        self._late = False
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        words = (job.catalogue, job.entry.name, job.mode, str(job.device), str(job.calls))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "thunder_cg.zoo.worker", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # so that what it starts ends with it
        )

    def row(self) -> Row:
        """The next row that it writes; if it crashes or takes too long, the one before, as a failure."""
        assert self._process.stdout is not None
        late = threading.Timer(self.job.timeout, self._end_late)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        if line:
            self._row = read_row(json.loads(line))
        else:
            self._row = replace(self._row, failure=self._failure())
        return self._row

    def time(self) -> Row:
        """The row with its times."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it crashed meanwhile, as `row` finds
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self.row()

    def _end_late(self) -> None:
        self._late = True
        self.end()

    def _failure(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        stages = [line.removeprefix(STAGE) for line in said if line.startswith(STAGE)] or ["at its start"]
        others = [line for line in said if not line.startswith(STAGE)] or ["it said nothing"]
        if self._late:
            return f"ended after {self.job.timeout:g} s, {stages[-1]}"
        return f"the process ended with status {status}, {stages[-1]}: {others[-1]}"[:300]

    def end(self) -> None:
        """Ends the process and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.end()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def measure_all(jobs: Sequence[Job], at_once: int) -> Iterator[Row]:
    """The rows as they come, `at_once` of them in the making.

    On a GPU each is made without times first; once nothing else runs any more, they are timed one by one, and come a
    second time. What only waits for that takes GPU memory, and no processor.
    """
    workers: list[Worker] = []

    def make(job: Job) -> tuple[Worker, Row]:
        worker = Worker(job)
        workers.append(worker)
        return worker, worker.row()

    pool = ThreadPoolExecutor(at_once)
    try:
        waiting = []
        for future in as_completed([pool.submit(make, job) for job in jobs]):
            worker, row = future.result()
            if row.failure or worker.job.device.type != "cuda":
                worker.close()
            else:
                waiting.append(worker)
            yield row
        for worker in waiting:
            yield worker.time()
            worker.close()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()
