"""Finds the memory that a captured step uses and that belongs to nothing it was given.

Note [Memory that a step may use]
    A graph reads and writes memory of its own, and that of the batch and of the state. Any other memory would belong to
    a tensor that nobody has told of, so nobody would notice when the step comes to use another one. Such a capture is
    refused. So is one that leaves a tensor behind, other than gradients and results: each replay would overwrite it.

Note [Numbers that look like addresses]
    The addresses are found among the arguments of kernels, which hold other numbers, too. A number of four bytes and
    four bytes that nobody has set (see Note [Stale arguments] in stack.py) may be the address of some tensor: 0.125 is
    half of one at a multiple of 32 MiB. So the tensors that seem to be used are moved, and the step is captured once
    more. Only where the new addresses show up are the tensors really used. What nobody has set may be another number
    then, and the address of another tensor, which is moved as well.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from thunder_cg.compat.distributed import local_tensor
from thunder_cg.compat.objects import counting
from thunder_cg.compat.tensors import autograd_base, has_no_other_tensors, storage_id, version
from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.backend import Pool
from thunder_cg.runtime.tensors import address, address_if_any
from thunder_cg.step.heap import holder_of, known_tensors


class Addresses:
    """Numbers that kernels got as arguments, the addresses of tensors among them, and the names of the kernels."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names, self._numbers = names, sorted(names)

    def user_of(self, tensor: Tensor) -> str | None:
        """The name of a kernel that got an address in the tensor's storage, if it has one."""
        start = address_if_any(tensor := local_tensor(tensor))
        return self.user_of_memory(start, tensor.untyped_storage().nbytes()) if start else None

    def user_of_memory(self, start: int, nbytes: int) -> str | None:
        """The same for memory that begins at ``start``."""
        at = bisect.bisect_left(self._numbers, start)
        is_used = at < len(self._numbers) and self._numbers[at] < start + nbytes
        return self._names[self._numbers[at]] if is_used else None


class OtherMemoryUsed(CaptureRefused):
    """Kernels seem to use the memory of these tensors, of which the step was not told."""

    def __init__(self, problem: str, fix: str, tensors: Sequence[Tensor]) -> None:
        super().__init__(problem, fix)
        self.tensors = tensors


Memory = dict[int, tuple[int, str]]  # by address: bytes, and what is there


def memory_of_tensors(device: torch.device) -> Memory:
    """Where all tensors of the device are. It keeps none of them."""
    with counting:
        tensors = [tensor for tensor in known_tensors() if tensor.device == device]
        found = {address(tensor): (tensor.untyped_storage().nbytes(), _shown(tensor)) for tensor in tensors}
        tensors.clear()
    return found


def refuse_other_memory(
    addresses: Addresses,
    known: Sequence[Tensor | None],
    own: Sequence[object],
    device: torch.device,
    pool: Pool,
    before: Memory,
) -> None:
    """Looks at all tensors of the device. See Note [Memory that a step may use].

    What would be refused may be garbage that has come since the last collection, so another one comes first.

    Args:
        known: tensors whose memory the step may use.
        own: the tensors that the capture itself has made.
        before: memory of tensors that there were before the step, some of which may be gone.
    """
    storages = {storage_id(tensor) for tensor in known if tensor is not None}
    objects = {id(tensor) for tensor in (*known, *own)}
    ranges = pool.ranges()

    def refuse_any_of(tensors: Sequence[Tensor]) -> None:
        used: list[tuple[Tensor, str]] = []
        gone = before.keys() - set(map(address_if_any, known))
        for tensor in tensors:
            is_in_pool = any(start <= address(tensor) < stop for start, stop in ranges)
            if is_in_pool or id(tensor) not in objects:  # what a tape has recorded keeps memory of others
                gone.discard(address(tensor))
            if id(tensor) in objects or tensor.device != device or storage_id(tensor) in storages:
                continue
            if is_in_pool:
                by, fix = "", "return it, or write it into a tensor that exists before the step"
                if (holder := holder_of(tensor)) is not None:
                    by = f" by {holder}"
                elif any(autograd_base(each) is tensor for each in tensors):
                    by, fix = " by a view, such as a gradient,", "have the step leave a clone of the view"
                problem = f"{_shown(tensor)} that the step makes is still held{by} after it"
                raise CaptureRefused(f"{problem}, and a replay would overwrite it", fix)
            if (user := addresses.user_of(tensor)) is not None:
                used.append((tensor, user))
        if used:
            tensor, user = used[0]
            problem = f"the step seems to use {_shown(tensor)} in {user}, and it is not known where from"
            fix = "pass it as an argument, or let the step's function name it"
            raise OtherMemoryUsed(problem, fix, [tensor for tensor, _ in used])
        for start in gone:
            nbytes, shown = before[start]
            if (user := addresses.user_of_memory(start, nbytes)) is not None:
                problem = f"the step seems to use {shown} in {user}, and lets go of it"
                raise OtherMemoryUsed(problem, "pass it as an argument", [])

    with suppress(CaptureRefused):  # which holds the tensors, until it is gone
        return refuse_any_of(known_tensors())
    return refuse_any_of(_all_tensors())


@contextmanager
def moved(refusal: OtherMemoryUsed) -> Iterator[None]:
    """The tensors have other memory with the same content. See Note [Numbers that look like addresses].

    Raises:
        OtherMemoryUsed: ``refusal``, if not all of what refers to the memory can be moved.
    """
    homes = {storage_id(tensor): tensor.untyped_storage() for tensor in refusal.tensors}
    with counting:
        tensors = [tensor for tensor in _all_tensors() if storage_id(tensor) in homes]
    ids = [storage_id(tensor) for tensor in tensors]
    if not (has_no_other_tensors(homes, tensors) and all(map(can_move, tensors))):
        raise refusal
    try:
        copies = {home: storage.clone() for home, storage in homes.items()}
    except torch.OutOfMemoryError:
        raise refusal from None
    versions = [version(tensor) for tensor in tensors]
    for tensor, home in zip(tensors, ids):
        _move(tensor, copies[home])
    try:
        yield
    finally:
        for tensor, home, then in zip(tensors, ids, versions):
            if version(tensor) != then:  # written meanwhile, by another thread
                homes[home].copy_(copies[home])
            _move(tensor, homes[home])


def can_move(tensor: Tensor) -> bool:
    """Whether a tensor can get other memory."""
    is_lazy = tensor.is_inference() or tensor.is_neg() or tensor.is_conj()
    return type(tensor) in (Tensor, nn.Parameter) and not is_lazy


def _move(tensor: Tensor, storage: torch.UntypedStorage) -> None:
    with torch.no_grad():
        place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = place.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _shown(tensor: Tensor) -> str:
    shape = "that is nested" if tensor.is_nested else tuple(tensor.shape)
    return f"a tensor {shape} of {str(tensor.dtype).removeprefix('torch.')}"


def _all_tensors() -> list[Tensor]:
    """Those with memory, without garbage."""
    gc.collect()
    return known_tensors()
