"""How PyTorch's caching allocator of CUDA lays tensors out in segments, and which first segment has it take the least.

Note [First segment]
    A tensor gets the smallest free block that it fits into, or a new segment. A private pool keeps its segments, so
    those of a capture are as large together as the order of its tensors makes them: the memory of two is no place for
    a third one that is a little larger than each. One large segment, which is split and joined again, often takes less
    in all; where a few tensors are very large it takes more. So a few sizes of it are tried on what is known of the
    order, before anything is allocated. What a fusion allocates inside is not known, and splits the segment elsewhere,
    so that there may be no room for the largest tensor that it was to have. So each size is tried on a second order as
    well, in which each tensor is made with another one of its size, which is freed at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

# How the allocator rounds, in bytes (torch 2.9 to 2.11, unless PYTORCH_CUDA_ALLOC_CONF says otherwise).
SMALL = 2**20  # tensors up to this size have segments of their own, of 2 MiB
LEAST_SEGMENT = 20 * 2**20  # for tensors of less than half of it
_LEAST_ALONE = LEAST_SEGMENT // 2  # tensors from this size on have a segment to themselves, if no free block fits
_ROUND_SEGMENT, _ROUND_BLOCK = 2 * 2**20, 512

_LARGEST = (1, 4, 16, 32, 64)  # the first segment has room for tensors up to the peak divided by one of these
_WORTH = 0.985  # of the memory without a first segment, which is taken if it saves more

Event = tuple[str, int]  # a piece of memory, by name, and the bytes that are allocated; 0 if it is freed


class Segments:
    """The segments of the large tensors of one pool.

    Args:
        first: bytes of a segment that is there before; 0 for none.
    """

    def __init__(self, first: int = 0) -> None:
        self.nbytes = 0
        self._count = 0
        self._free: list[tuple[int, int, int]] = []  # in order: bytes, segment, offset in it
        self._blocks: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        if first:
            self._free.append(self._segment(first))

    def play(self, events: Sequence[Event]) -> Segments:
        """Allocates and frees in this order."""
        for name, nbytes in events:
            if nbytes > SMALL:
                self._allocate(name, -nbytes // _ROUND_BLOCK * -_ROUND_BLOCK)
            elif not nbytes:
                for block in self._blocks.pop(name, ()):
                    self._join(*block)
        return self

    def _allocate(self, name: str, nbytes: int) -> None:
        position = bisect_left(self._free, (nbytes,))
        is_there = position < len(self._free)
        size, segment, offset = self._free.pop(position) if is_there else self._segment(nbytes)
        if size - nbytes > SMALL:
            insort(self._free, (size - nbytes, segment, offset + nbytes))
            size = nbytes
        self._blocks[name].append((size, segment, offset))

    def _segment(self, nbytes: int) -> tuple[int, int, int]:
        size = -nbytes // _ROUND_SEGMENT * -_ROUND_SEGMENT if is_large(nbytes) else LEAST_SEGMENT
        self.nbytes += size
        self._count += 1
        return size, self._count, 0

    def _join(self, size: int, segment: int, offset: int) -> None:
        """Frees a block, which becomes one with free neighbours."""
        for block in [block for block in self._free if block[1] == segment]:
            if block[2] + block[0] == offset or offset + size == block[2]:
                self._free.remove(block)
                size, offset = size + block[0], min(offset, block[2])
        insort(self._free, (size, segment, offset))


def is_large(nbytes: int) -> bool:
    """Whether a tensor of so many bytes has a segment to itself, if no free block fits."""
    return nbytes >= _LEAST_ALONE


def first_segment(events: Sequence[Event]) -> int:
    """Bytes to have in one segment before what allocates and frees in this order; 0 for none."""
    orders = events, [*_with_temporaries(events)]

    def needs_with(first: int) -> int:
        return sum(Segments(first).play(order).nbytes for order in orders)

    large = [event for event in events if not event[1] or event[1] > SMALL]
    most = peak(large, {})
    sizes = {peak((event for event in large if event[1] <= most // part), {}) for part in _LARGEST}
    if (with_temporaries := peak(_with_temporaries(large), {})) < LEAST_SEGMENT:
        sizes.add(with_temporaries)
    needs = {size: needs_with(size) for size in {max(size, _LEAST_ALONE) for size in sizes}}
    best = min(needs, key=lambda size: (needs[size], size), default=0)
    return best if best and needs[best] < _WORTH * needs_with(0) else 0


def _with_temporaries(events: Iterable[Event]) -> Iterator[Event]:
    for name, nbytes in events:
        yield from (("", nbytes), (name, nbytes), ("", 0)) if nbytes else ((name, 0),)


def peak(events: Iterable[Event], start: Mapping[str, int]) -> int:
    """Bytes that live at a time, at most, if ``start`` does before."""
    size = dict(start)
    alive = most = sum(size.values())
    for name, nbytes in events:
        if nbytes:
            size[name] = size.get(name, 0) + nbytes
            alive += nbytes
            most = max(most, alive)
        else:
            alive -= size.pop(name, 0)
    return most
