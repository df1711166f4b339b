"""Value hashes: a number for each value that an op makes, from an eager run and from a second graph of the region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_cg.compat.tensors import is_inexact
from thunder_cg.runtime.backend import Backend, Graph, Pool, sentinels
from thunder_cg.runtime.inputs import MakeBuffers, detached, with_buffers
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.runtime.tensors import copy_all
from thunder_cg.verify.compare import bits, effective_layout

NO_HASH = -(2**63)  # of a value that is not hashed
CHUNK = 2**22  # elements that are hashed at a time
_MIXER = 0x1E3779B97F4A7C15  # odd, and without a pattern

OpHashes = list[list[int]]  # of one op's values: a row of strict hashes and a row of lenient ones


def hash_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes with the bits of the tensor, their order and its strides, without much memory."""
    total = torch.full((), hash(effective_layout(tensor)), dtype=torch.int64, device=tensor.device)
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:  # expanded: the same memory again and again
            tensor = tensor.narrow(dim, 0, 1)
    flat = bits(tensor).reshape(-1)
    # Each place has an odd factor of its own. Sums of rows and columns would not tell a matrix from its mirror image.
    places = torch.arange(1, min(flat.numel(), CHUNK) + 1, device=tensor.device) * _MIXER
    weights = (places ^ (places >> 32)) | 1
    for chunk in flat.split(CHUNK):
        total = total * 31 + (chunk * weights[: chunk.numel()]).sum()
    return total


def hash_values(device: torch.device, *values: Any) -> torch.Tensor:
    """The hashes of one op's values, in a graph or in an eager run: a row of strict ones and a row of lenient ones.

    Integers beside floating-point values have lenient hashes: they are seeds and the like, which an op may never write.
    A lenient hash counts only if the op does write the value.
    """
    any_float = any(map(is_inexact, values))
    none = torch.full((), NO_HASH, dtype=torch.int64, device=device)
    pairs = [(none, none)]
    for value in values:
        if not isinstance(value, torch.Tensor) or value.device != device:
            pairs.append((none, none))
        elif any_float and not is_inexact(value):
            pairs.append((none, hash_tensor(value)))
        else:
            pairs.append((hash_tensor(value), none))
    return torch.stack([torch.stack(row) for row in zip(*pairs)])


def hashes_differ(one: OpHashes, other: OpHashes, filled: OpHashes | None = None) -> bool:
    """Whether the values of an op differ. Lenient hashes count if they are the same on memory that was ``filled``."""
    lenient = zip(one[1], other[1], filled[1]) if filled is not None else ()
    pairs = [*zip(one[0], other[0]), *((a, b) for a, b, on_filled in lenient if a == on_filled)]
    return any(a != b for a, b in pairs if NO_HASH not in (a, b))


@dataclass(frozen=True, slots=True)
class HashGraph:
    """A second graph of a region, which computes the value hashes of each op.

    It is recorded with the first one: what an operator wrongly freezes may have changed by the time of a disagreement.
    """

    graph: Graph
    copies: tuple[Any, ...]
    hashes: tuple[torch.Tensor, ...]

    @classmethod
    def record(
        cls, region: RuntimeRegion, backend: Backend, pool: Pool, args: Sequence[Any], place: MakeBuffers
    ) -> HashGraph:
        assert region.hash_function is not None
        copies, buffers = place()
        targets, scalars = [each.target for each in copies], sentinels(len(region.io.scalars))
        inputs = [*with_buffers(detached(args, region.written), buffers), *scalars]
        if backend.runs_captures:
            copy_all(targets, [each.source(args) for each in copies])
        graph, hashes = pool.capture(region.hash_function, [inputs], targets, sentinels=scalars)
        return cls(graph, tuple(copies), tuple(map(pool.alias, hashes)))

    def replay(self, args: Sequence[Any], scalars: Sequence[int]) -> list[OpHashes]:
        """The value hashes of each op."""
        self.graph.replay([each.source(args) for each in self.copies], scalars=scalars)
        return [hashes.tolist() for hashes in self.hashes]
