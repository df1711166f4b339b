"""Large results of inference that callers get where the graph wrote them, without a copy.

Note [Lent results]
    Without graphs, the memory of a large result, such as the logits of a long prompt, exists once. If a graph kept it
    and copied it out, it would exist twice. So a trace without a backward that is one region lends its large results:
    the caller's tensor owns the memory that the graph wrote, in the arena's pool. Nothing moves such a tensor, and
    nothing writes to it while somebody has it. Only the allocator knows whether somebody has: a tensor, a stream that
    ``record_stream`` named, another process. So before the arena is used, that memory is allocated anew. If the
    allocator returns the same place, nobody has it. The allocator does not know on which stream the caller used the
    memory, so the stream of the new call then waits for the stream of the call that lent it.

    A graph may be replayed beside a held result if it does not write there. So a recording keeps the places that it
    spares: those that tensors held from before its capture to after it, and those that later warm-ups and captures got
    in new segments. In a loop like ``y = model(x)``, the last result is held while the next one is made. Then the next
    call captures once more, and from then on two graphs take turns, with two places. Two results exist without graphs,
    too. If both are held, or after more captures beside held results, the pair copies its results out. If a function
    was captured beside held results several times, its later captures use an arena of which nobody has results. So do
    calls that train, since their backward may write where their forward does not.

    Nothing is lent in an arena that calls have trained in, since one held result would have all of them take another
    arena, with as much memory. Nor is anything lent with ``verify=``, which runs calls twice, nor with
    ``memory_budget=``, which would count it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch

from thunder_cg.analysis.segments import is_large
from thunder_cg.compat.tensors import storage_id
from thunder_cg.errors import ReplayRefused
from thunder_cg.runtime.backend import Loan, Pool
from thunder_cg.runtime.tensors import is_whole

if TYPE_CHECKING:
    from thunder_cg.runtime.arena import Arena
    from thunder_cg.runtime.pair import Pair


class LentResult:
    """A result of a graph, and how each replay hands it out.

    Args:
        position: among the region's results.
        tensor: that the capture made.
        on_loan: of the arena: where callers may have memory of it. A replay adds its own.
    """

    def __init__(self, position: int, tensor: torch.Tensor, loan: Loan, on_loan: list[Loan]) -> None:
        self.loan, self._position, self._on_loan = loan, position, on_loan
        self._dtype, self._device = tensor.dtype, tensor.device
        self._layout = int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride()

    def hand_out(self, results: list[object]) -> None:
        """Puts a new tensor, which owns the memory, into ``results``. `ReplayRefused` if somebody has the last one."""
        storage = self.loan.take()
        if storage is None:
            raise ReplayRefused("somebody has the memory of a result that it lends")
        if self.loan not in self._on_loan:
            self._on_loan.append(self.loan)
        results[self._position] = torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._layout)


class Lending:
    """Which results a warm-up or a capture lends, and how. To be made before it."""

    def __init__(self, arena: Arena, pool: Pool) -> None:
        self._arena, self._pool = arena, pool
        self._ranges = pool.ranges()  # where earlier graphs may write
        self._loans: dict[int, Loan] = {}  # by storage

    def choose(self, tensors: Sequence[torch.Tensor]) -> Set[int]:
        """The storages of those of the results that are large, and alone in their memory, and that the pool lends."""
        uses = Counter(map(storage_id, tensors))
        alone = (each for each in tensors if uses[storage_id(each)] == 1 and is_whole(each) and is_large(each.nbytes))
        self._loans = {storage_id(each): loan for each in alone if (loan := self._pool.loan(each)) is not None}
        return self._loans.keys()

    def results(self, chosen: Mapping[int, torch.Tensor], pair: Pair) -> list[LentResult]:
        """How to hand out what was chosen, by its position. Earlier graphs of the arena spare new segments."""
        pair.note_places([*self._loans.values()], self._arena, self._ranges)
        on_loan = self._arena.on_loan
        return [LentResult(i, tensor, self._loans[storage_id(tensor)], on_loan) for i, tensor in chosen.items()]
