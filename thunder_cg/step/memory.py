"""What calls in Python show of the memory that a step's graph needs, and what they leave for it.

Note [What a step needs]
    A graph needs the memory that the step allocates at a time, and a copy of the batch. Where a call in Python has
    raised the peak of PyTorch's memory statistics, the peak says what it has allocated. The statistics are not reset,
    since they are the user's: where the call has not raised the peak, and on the tape, only the gradients that it has
    left are known. So this is a lower bound, and the memory budget is compared with the pool once more after a capture.

Note [State of optimizers]
    An optimizer makes its state in its first call, and PyTorch takes what the backward has just freed for it. Later
    backwards without graphs use what is left in between. A graph cannot: it has a pool of its own. So the state is made
    apart, and what the first calls have used can go back to the device before the capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from thunder_cg.compat.distributed import local_tensor
from thunder_cg.compat.tensors import has_storage
from thunder_cg.compat.torch import making_states_in
from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.tensors import span
from thunder_cg.step.state import StepState


class PythonCall:
    """Notes what there is before a call in Python. See Note [What a step needs]."""

    def __init__(self, state: StepState, backend: Backend) -> None:
        self._backend, self._device = backend, state.device
        self._gradients = [
            (parameter, weakref.ref(gradient), nbytes([gradient]))
            for parameter in state.parameters
            if (gradient := parameter.grad) is not None
        ]
        self._allocated, self._peak = backend.allocated_nbytes(self._device)

    def allocated(self, state: StepState) -> int:
        """Bytes that the call has allocated at a time, at least; ``state`` is the one after it."""
        before = {id(gradient) for _, ref, _ in self._gradients if (gradient := ref()) is not None}
        gradients = [parameter.grad for parameter in state.parameters if parameter.grad is not None]
        new = nbytes(gradient for gradient in gradients if id(gradient) not in before)
        # Gradients that made place for new ones. Those that were only dropped, at the end, were there at the peak.
        freed = sum(size for parameter, ref, size in self._gradients if ref() is None and parameter.grad is not None)
        _, peak = self._backend.allocated_nbytes(self._device)
        return max(new, peak - self._allocated + freed if peak > self._peak else 0)


@contextmanager
def making_states_apart(state: StepState, backend: Backend) -> Iterator[None]:
    """Around a call in Python. See Note [State of optimizers]."""
    if not (optimizers := [each for each in state.optimizers() if not each.state]):
        yield
        return
    with backend.memory_apart() as apart, making_states_in(apart, optimizers):
        yield


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory between the first and the last element of each, together."""
    return sum(span(each) * each.element_size() for each in map(local_tensor, tensors) if has_storage(each))
