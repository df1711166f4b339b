"""The inputs of a program: what is known of them before the first call, and what calls have shown of them since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.compat.settings import Settings, kernel_settings, names_of_settings
from thunder_cg.compat.tensors import has_storage, is_zero_tensor
from thunder_cg.errors import SkipReason
from thunder_cg.runtime.guards import OverlapGuard
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.runtime.skip_reasons import WRITTEN_LEAF, WRITTEN_OUTSIDE
from thunder_cg.runtime.tensors import (
    Layout,
    address_if_any,
    is_leaf_with_grad,
    is_plain,
    layout,
    refuses_writes,
    same_tensors,
)

_MAX_MOVES = 3  # how often a parameter may move before it is copied like any other input
_MAX_CAPTURES_FOR_MOVES = 6  # past it, a parameter is copied once it has moved: not all move in the same step


class ProgramInputs:
    """The arguments of a program's trace that its regions read.

    Args:
        in_pool: names of what the forward of a backward leaves in the pool.
        attributes: names of what attributes of modules lead to. Most stay where they are, as masks do.
    """

    def __init__(
        self,
        ops: Ops,
        aliasing: Aliasing,
        regions: Sequence[RuntimeRegion],
        in_pool: Collection[str],
        attributes: Collection[str],
    ) -> None:
        self._describe = ops.described
        arguments = set(ops.args)
        inputs = [each for region in regions for each in region.io.inputs]
        self.names = tuple(dict.fromkeys(each.name for each in inputs if each.name in arguments))
        self._position = position = {name: i for i, name in enumerate(self.names)}
        self.written = frozenset(position[each.name] for each in inputs if each.written and each.name in position)
        # What is written is mostly a cache that stays where it is. What only may be written is mostly something else.
        certain = (op.index for region in regions for op in region.ops if op.rule is not None or op.subs)
        caches = {memory for index in certain for memory in aliasing.writes[index]}
        self._static = [ops.values[name].static or aliasing.sets.get(name) in caches for name in self.names]
        self._attributes = [position[name] for name in attributes if name in position]
        self._last: list[int] = []  # addresses of these in the last call that was warmed up or captured
        self._stay: dict[int, bool] = {}  # of these, whether they stayed from the first such call to the second
        # What the forward left in the pool follows from the forward's own layout.
        self._keyed = [i for i, name in enumerate(self.names) if name not in in_pool]
        with_grad = {memory for op in ops.ops if _writes_with_grad(op) for memory in aliasing.writes[op.index]}
        # What PyTorch refuses to write where it is a leaf that requires grad, of all values of the trace.
        self.not_leaves = frozenset(name for name, memory in aliasing.sets.items() if memory in with_grad)
        # By which kernels of the regions may be chosen.
        self.settings = reduce(or_, (op.settings for region in regions for op in region.ops), Settings.NONE)
        self._keyed_settings = self.settings | Settings.GUARDED  # a fusion is not to be compiled anew in a capture
        self._read_settings = kernel_settings(self._keyed_settings)

    def __contains__(self, name: str) -> bool:
        return name in self._position

    def may_be_static(self, name: str) -> bool:
        """Whether it is an input that is expected to stay at its address."""
        position = self._position.get(name)
        return position is not None and (self._static[position] or self._stay.get(position, False))

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Notes where attributes are, before a call is warmed up or captured."""
        now = [address_if_any(tensors[i]) for i in self._attributes]
        for i, at, before in zip(self._attributes, now, self._last):
            self._stay.setdefault(i, at == before != 0)
        self._last = now

    def key(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What two calls have in common if one may be the warm-up of the other: settings, layouts, equal tensors."""
        keyed = [tensors[i] for i in self._keyed]
        return (*self._read_settings(),), tuple(map(layout, keyed)), (*same_tensors(keyed).items(),)

    def layouts(self, key: Any) -> Mapping[str, Layout]:
        """The layouts in a key, by name."""
        return dict(zip([self.names[i] for i in self._keyed], key[1]))

    def settings_in(self, key: Any) -> Mapping[str, Any]:
        """The settings in a key, by name."""
        return dict(zip(names_of_settings(self._keyed_settings), key[0]))

    def unsupported(self, tensors: Sequence[Any]) -> SkipReason | None:
        """Why no graph can ever be right for these inputs."""
        for name, tensor in zip(self.names, tensors):
            if not is_plain(tensor):
                kind = type(tensor).__name__
                fix = "what its wait() returns" if kind == "AsyncCollectiveTensor" else "a plain one"
                return SkipReason(f"{self._describe(name)} is a {kind}, not a plain tensor", f"pass {fix}")
            if tensor is not None and (is_zero_tensor(tensor) or not has_storage(tensor)):
                return SkipReason(f"{self._describe(name)} is a {tensor.layout} tensor without memory of its own")
        if self.written:
            static = {i for i, is_static in enumerate(self._static) if is_static}
            if not OverlapGuard(tensors, static, self.written).admits(tensors):
                names = ", ".join(self._describe(self.names[i]) for i in sorted(self.written)[:3])
                problem = f"{names}, written in place, shares memory with another"
                return SkipReason(problem, "pass separate tensors")
            leaves = (i for i in self.written if self.names[i] in self.not_leaves)
            if any(is_leaf_with_grad(tensors[i]) for i in leaves):
                return WRITTEN_LEAF
            if any(refuses_writes(tensors[i]) for i in self.written):
                return WRITTEN_OUTSIDE
        return None


class Moves:
    """How often static inputs of a pair were at another address than in a capture shortly before."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._captures = 0  # that were made because of moves

    def add(self, names: Collection[str]) -> None:
        """Counts what has moved before one capture."""
        self._counts.update(names)
        self._captures += bool(names)

    def are_few(self, name: str) -> bool:
        """Whether an input stays at its address, as far as captures have shown."""
        return self._counts[name] < (_MAX_MOVES if self._captures < _MAX_CAPTURES_FOR_MOVES else 1)


def _writes_with_grad(op: Op) -> bool:
    """Whether it writes in place while gradients are recorded, which a leaf that requires grad does not admit."""
    copies = op.id in ("COPY_", "copy_") and bool(op.symbol.kwargs.get("grad_enabled"))  # the first is in a fusion
    return copies or any(map(_writes_with_grad, op.subs))
