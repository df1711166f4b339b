"""Ends a process whose collectives in CUDA graphs never end, as NCCL's own watchdog does for those that it sees.

PyTorch's watchdog watches the work that it launched itself. When a rank dies, the kernels of a replayed graph on the
other ranks wait for it for ever, and nobody is told. So a thread looks at one event of each device about once a second.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import torch

from thunder_cg.compat import cuda, distributed
from thunder_cg.compat.distributed import ProcessGroup

_PAUSE = 1.0  # seconds between two looks


class Watchdog:
    """Watches one device from a thread of its own.

    Args:
        begin: what the thread does first. If it raises, nothing is watched.
        end: what to do with a message when time is up.
    """

    def __init__(
        self, record_event: Callable[[], Any], end: Callable[[str], None], begin: Callable[[], None] = lambda: None
    ) -> None:
        self._record_event, self._begin, self._end = record_event, begin, end
        self._is_idle = True
        self._events: SimpleQueue[tuple[Any, float, str]] = SimpleQueue()
        threading.Thread(target=self._run, name="thunder_cg watchdog", daemon=True).start()

    def watch(self, groups: Sequence[ProcessGroup]) -> None:
        """Has what was launched on the current stream watched, unless other work is being watched still."""
        if self._is_idle:
            self._is_idle = False
            ranks = ", ".join(f"rank {group.rank()} of {group.size()}" for group in groups)
            self._events.put((self._record_event(), min(map(distributed.timeout, groups)), ranks))

    def _run(self) -> None:
        try:
            self._begin()
        except RuntimeError:
            self._is_idle = False  # for good
            return
        while True:
            event, limit, ranks = self._events.get()
            start = time.monotonic()
            while not event.query():
                if time.monotonic() - start > limit:
                    self._end(
                        f"thunder_cg ({ranks}): collectives in a CUDA graph have not ended within {limit:g} s, the "
                        "time-out of their process group. Another rank has died, hangs, or makes other calls."
                    )
                    break
                time.sleep(min(_PAUSE, limit / 10))
            del event
            time.sleep(_PAUSE)
            self._is_idle = True


def _end_process(message: str) -> None:
    """As torch's watchdog: `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` has the process go on."""
    print(message, file=sys.stderr, flush=True)
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0":
        os.abort()


def _recorded(index: int) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(index))
    return event


@cache
def watchdog(index: int) -> Watchdog:
    """The watchdog of device ``index``."""
    return Watchdog(partial(_recorded, index), _end_process, cuda.leave_captures_alone)
