"""A private pool of PyTorch's caching allocator."""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar

import torch

from thunder_cg.compat import cuda
from thunder_cg.runtime.cuda.streams import CaptureLock, capture_lock


class PrivatePool:
    """A private pool of the caching allocator. It exists as long as an arena or a graph refers to it."""

    _capture_lock: ClassVar[CaptureLock] = capture_lock  # for a destructor that runs while the interpreter ends

    def __init__(self, index: int) -> None:
        self._index = index
        self._users = 1
        self.id = cuda.new_pool(index)
        self.keep_alive: list[torch.cuda.CUDAGraph] = []  # the keep-alive graph: see CudaPool._keep_pool_alive

    def mark_broken(self) -> None:
        """After a capture that CUDA broke off. RuntimeError if the last capture ended in good order."""
        cuda.end_allocate_to_pool(self._index, self.id)
        self._users += 1  # PyTorch counts that capture as a user until somebody releases the pool for it

    def __del__(self) -> None:
        if "keep_alive" in self.__dict__:
            self._capture_lock.destroy(self.keep_alive)
            for _ in range(self._users):
                with suppress(RuntimeError):
                    cuda.release_pool(self._index, self.id)
