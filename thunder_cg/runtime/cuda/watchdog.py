"""Ends a process whose collectives in CUDA graphs never end, as NCCL's own watchdog does for those that it sees.

PyTorch's watchdog watches the work that it launched itself. When a rank dies, the kernels of a replayed graph on the
other ranks wait for it for ever, and nobody is told. So each replay that communicates records an event, and a thread
asks once a second whether it is done. The thread records nothing, since the stream may be a user's that captures.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from thunder_cg.compat import cuda, distributed
from thunder_cg.compat.distributed import ProcessGroup

_PAUSE = 1.0  # seconds between two looks


class Watchdog:
    """Watches one device from a thread of its own.

    Args:
        event: it is recorded after each replay, on the replay's stream.
        begin: what the thread does first. If it raises RuntimeError, nothing is watched, with a warning.
        end: what to do with a message when time is up.
    """

    def __init__(self, event: Any, end: Callable[[str], None], begin: Callable[[], None] = lambda: None) -> None:
        self._event, self._begin, self._end = event, begin, end
        self._groups: Sequence[ProcessGroup] = ()  # of the last replay
        self._replays = 0
        self._has_replays = threading.Event()
        threading.Thread(target=self._run, name="thunder_cg watchdog", daemon=True).start()

    def watch(self, groups: Sequence[ProcessGroup], stream: Any) -> None:
        """Has what was launched on ``stream`` so far watched."""
        self._event.record(stream)
        self._groups = groups
        self._replays += 1
        if not self._has_replays.is_set():
            self._has_replays.set()

    def _run(self) -> None:
        try:
            self._begin()
        except RuntimeError as error:
            warnings.warn(f"thunder_cg: nobody watches the collectives in CUDA graphs: {error}", stacklevel=1)
            return
        seen, since = 0, 0.0
        while True:
            self._has_replays.wait()
            self._has_replays.clear()
            while not self._event.query():
                replays, groups = self._replays, self._groups
                if replays != seen:  # the host still launches
                    seen, since = replays, time.monotonic()
                limit = min(map(distributed.timeout, groups))
                if time.monotonic() - since > limit:
                    ranks = ", ".join(f"rank {group.rank()} of {group.size()}" for group in groups)
                    self._end(
                        f"thunder_cg ({ranks}): collectives in a CUDA graph have not ended within {limit:g} s, the "
                        "time-out of their process group. Another rank has died, hangs, or makes other calls."
                    )
                    return
                time.sleep(min(_PAUSE, limit / 10))
            time.sleep(_PAUSE)


def _end_process(message: str) -> None:
    """As torch's watchdog: `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` has the process go on."""
    print(message, file=sys.stderr, flush=True)
    if distributed.setting_of_nccl("ASYNC_ERROR_HANDLING")[1] != "0":
        os.abort()


@cache
def watchdog(index: int) -> Watchdog:
    """The watchdog of device ``index``."""
    return Watchdog(torch.cuda.Event(), _end_process, partial(cuda.leave_captures_alone, index))
