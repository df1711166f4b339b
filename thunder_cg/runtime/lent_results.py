"""Large results of inference that callers get where the graph wrote them, without a copy.

Note [Lent results]
    Without graphs, the memory of a large result, such as the logits of a long prompt, exists once. If a graph kept it
    and copied it out, it would exist twice. So a trace without a backward that is one region lends its large results:
    the caller's tensor owns the memory that the graph wrote, in the arena's pool. Nothing moves such a tensor, and
    nothing writes to it while somebody has it. Only the allocator knows whether somebody has: a tensor, a stream that
    ``record_stream`` named, another process. So before a replay, the memory is allocated anew. Where the allocator
    returns the same place, nobody has it.

    A graph may be replayed beside a held result if it does not write there. So a recording keeps the places that it
    spares: those that were held from before its capture to after it, and those that later warm-ups and captures got in
    new segments. In a loop like ``y = model(x)``, the last result is held while the next one is made. Then the next
    call captures once more, and from then on two graphs take turns, with two places, as two results exist without
    graphs. If both are held, or after many captures, the pair copies its results out. Calls that train use another
    arena while a result is held, since their backward may write where their forward does not. So do the captures of a
    function that was captured beside held results several times.

    Nothing is lent in an arena that calls have trained in, since one held result would have all of them take another
    arena, with as much memory. Nor is anything lent with ``verify=``, which runs calls twice, nor with
    ``memory_budget=``, which would count it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from thunder_cg.analysis.segments import is_large
from thunder_cg.compat.tensors import storage_id
from thunder_cg.errors import ReplayRefused
from thunder_cg.runtime.backend import Loan, Pool
from thunder_cg.runtime.tensors import is_whole


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


def large(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """By their storages, the tensors that are large enough to be lent, and alone in their memory."""
    uses = Counter(map(storage_id, tensors))
    return {
        storage: tensor
        for tensor in tensors
        if uses[storage := storage_id(tensor)] == 1 and is_whole(tensor) and is_large(tensor.nbytes)
    }


def loans(pool: Pool, tensors: Sequence[torch.Tensor]) -> Mapping[int, Loan]:
    """By their storages, how the pool lends those of the results that are large."""
    found = {storage: pool.loan(tensor) for storage, tensor in large(tensors).items()}
    return {storage: loan for storage, loan in found.items() if loan is not None}
