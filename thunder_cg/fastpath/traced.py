"""The fast path for any trace: the prologue's guard, then the computation as Thunder would run it."""

from __future__ import annotations

from typing import Any

from thunder_cg.compat.thunder import connect_to_autograd
from thunder_cg.fastpath.compiled import Compiled, MetadataGuard
from thunder_cg.fastpath.guard import PrologueGuard
from thunder_cg.fastpath.outcomes import MISS


class TracedFastPath:
    """Runs the computation as Thunder would. It takes the values that the guard looked up, and may return `MISS`."""

    def __init__(self, compiled: Compiled, guard: PrologueGuard, values: list[Any]) -> None:
        self._entry = compiled.entry
        self._options = compiled.options
        self._pick_inputs, self._pick_passed_on = guard.picker(guard.inputs), guard.picker(guard.passed_on)
        self._tensors = MetadataGuard(guard, list(guard.metadata), values)

    def __call__(self, values: list[Any]) -> Any:
        if not self._tensors.holds(values):
            return MISS
        entry = self._entry
        result = entry.computation_fn(*self._pick_inputs(values))
        if entry.backward_fn:
            data, (saved_tensors, saved_other) = result
            connect_to_autograd(
                backward_fn=entry.backward_fn,
                flat_args=data["flat_args"],
                flat_output=data["flat_output"],
                saved_tensors=saved_tensors,
                saved_other=saved_other,
                return_none_instead_of_grads=entry.return_none_instead_of_grads,
                disable_split_autograd=self._options.get("thunderfx_disable_split_autograd", False),
                is_differentiable_outputs=self._options.get("is_differentiable_outputs"),
            )
            result = data["output"]
        return entry.epilogue_fn(*self._pick_passed_on(values), *result)
