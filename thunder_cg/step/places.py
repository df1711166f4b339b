"""Where a step finds values and puts them: variables, attributes, items of dictionaries and lists.

Note [Carried tensors]
    A step may put a tensor that it makes where it has found one, as in ``self.last_loss = loss.detach()``, and may read
    what the last step has put there, as in ``self.mean = 0.9 * self.mean + 0.1 * x.mean()``. Once a call in Python has
    done so, what is at the place is carried: it is copied in as the batch is, and what the step puts there is copied
    out as its results are. Only its layout is a fact. A value is carried whole: a tensor, or a tuple, a list or a
    dictionary of tensors. One with a history is not: the step may differentiate that, and in a capture autograd would
    join the stream of the last step.

    What the loop replaces between steps is carried, too, if it is small: a total that is a new zero in each epoch. The
    step may write to it in place. So what is carried and stays where it was is copied back after the step, into the
    tensor that was there, which others may hold. It must share memory with nothing else that the step uses.

    The step finds a copy of what is carried. What a copy does not show is refused in the capture: an address or an
    identity that the step asks for, and a gradient, attributes or other memory that it gives the tensor.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from thunder_cg.compat.guards import dictionary_of, module_dictionaries, names_of
from thunder_cg.compat.tensors import has_storage, tree_flatten, tree_unflatten
from thunder_cg.runtime.tensors import layout
from thunder_cg.step.bytecode import Item
from thunder_cg.step.lookups import MISSING, Path, content_of_cell, of_class, own, value_of
from thunder_cg.step.packages import may_change
from thunder_cg.step.reads import Read
from thunder_cg.step.structure import Structure

_CONTAINERS = (tuple, list, dict)
_LEAF = Structure(tree_flatten(0)[1])


class Place:
    """A cell, a namespace, a dictionary, a list, a class or an object, and a name or position there ("" in a cell)."""

    __slots__ = ("holder", "name", "owner")

    def __init__(self, holder: Any, name: Any, owner: Any = None) -> None:
        self.holder, self.name = holder, name
        self.owner = holder if owner is None else owner  # of the namespace

    @property
    def key(self) -> tuple[int, Any]:
        """Equal for the same place, as long as there is one of these."""
        return id(self.holder), self.name

    @classmethod
    def of(cls, value: Any, name: str | Item) -> Place:
        """Where a value has what is its own by the name. A dictionary of a class may have attributes besides items."""
        if isinstance(name, Item):
            return cls(value, name.key)
        if isinstance(value, nn.Module):
            return cls(next((each for each in module_dictionaries(value) if name in each), value.__dict__), name, value)
        is_bare = isinstance(value, (types.CellType, type, types.ModuleType)) or type(value) is dict
        if is_bare or _is_slot(value, name):
            return cls(value, name)
        return cls(names_of(value), name, value)

    def is_there(self) -> bool:
        """Whether the owner still has this namespace: ``value.__dict__ = {}`` gives an object another one."""
        owner = self.owner
        own_ones = module_dictionaries(owner) if isinstance(owner, nn.Module) else (owner, names_of(owner))
        return any(each is self.holder for each in own_ones)

    def get(self) -> Any:
        """The value, or `MISSING`."""
        holder = self.holder
        if isinstance(holder, types.CellType):
            return content_of_cell(holder)
        if isinstance(holder, dict):
            return dict.get(holder, self.name, MISSING)
        if isinstance(holder, list):
            return list.__getitem__(holder, self.name) if self.name < len(holder) else MISSING
        if isinstance(holder, (type, types.ModuleType)):
            return dictionary_of(holder).get(self.name, MISSING)
        return own(holder, self.name)

    def put(self, value: Any) -> None:
        """Sets it, whatever a class does when somebody sets it, or removes it if it is `MISSING`."""
        holder, name = self.holder, self.name
        if self.get() is value:
            return
        if isinstance(holder, list):  # which has something there
            list.__setitem__(holder, name, value)
            return
        if isinstance(holder, dict):
            plain = OrderedDict if isinstance(holder, OrderedDict) else dict
            if value is MISSING:
                plain.__delitem__(holder, name)
            else:
                plain.__setitem__(holder, name, value)
            return
        kind: Any = type if isinstance(holder, type) else object
        if isinstance(holder, types.CellType):
            kind, name = types.CellType, "cell_contents"
        if value is MISSING:
            kind.__delattr__(holder, name)
        else:
            kind.__setattr__(holder, name, value)


def plain_copy(value: Any) -> Any:
    """A copy of a dictionary, a list, a set or a deque, whatever its class does when somebody copies it."""
    plain: Any = next((kind for kind in (dict, list, set) if isinstance(value, kind)), type(value))
    return plain.copy(value)


def _is_slot(holder: Any, name: str) -> bool:
    is_member = isinstance(of_class(holder, name), types.MemberDescriptorType)
    return is_member and may_change(type(holder))  # others may be read-only


def places_of(path: Path) -> Iterator[Place]:
    """Those that a path leads through."""
    value, names = path
    if isinstance(value, types.CellType):
        yield Place(value, "")
        value = Place(value, "").get()
    for i, name in enumerate(names):
        if value is MISSING or (isinstance(value, Tensor) and name not in vars(value)):
            return
        yield Place.of(value, name)
        if i < len(names) - 1:  # the last one may be a property
            value = value.get(name, MISSING) if type(value) is dict else value_of(value, (name,))


def place_of_read(read: Read) -> tuple[Place, ...]:
    """Where the value is that a name leads to now; none if that is not known."""
    *_, last = (None,) if read.path is None else (None, *places_of(read.path))
    return (last,) if last is not None and last.get() is read.get() else ()


class CarriedPlace(NamedTuple):
    """Where a value is carried."""

    label: str
    place: Place
    fact: Layout


@dataclass(frozen=True)
class Layout:
    """The fact of what is carried."""

    structure: Structure
    layouts: tuple[Any, ...]  # of each tensor

    def __repr__(self) -> str:
        shape, _, dtype, *_ = self.layouts[0]
        one = f"a tensor {shape} of {str(dtype).removeprefix('torch.')}"
        return one if len(self.layouts) == 1 else f"{len(self.layouts)} tensors, the first of which is {one}"


class Carried:
    """A value that is carried: see Note [Carried tensors].

    Attributes:
        tensors: in it.
        tree: how they are nested, as PyTorch has it.
        fact: equal for values that can stand for each other.
    """

    __slots__ = ("fact", "tensors", "tree")

    def __init__(self, tensors: list[Tensor], structure: Structure) -> None:
        self.tensors, self.tree = tensors, structure.tree
        self.fact = Layout(structure, tuple(map(layout, tensors)))

    @classmethod
    def of(cls, value: Any, device_type: str) -> Carried | None:
        """None if it is something else than plain tensors on the device, without a history and a gradient."""
        if type(value) is not Tensor and not isinstance(value, _CONTAINERS):
            return None
        if type(value) is Tensor:
            leaves, structure = [value], _LEAF
        else:
            leaves, tree = tree_flatten(value)
            structure = Structure(tree)
        if not leaves or any(type(leaf) is not Tensor or leaf.device.type != device_type for leaf in leaves):
            return None
        return cls(leaves, structure) if all(map(_is_copied_whole, leaves)) else None

    def is_like(self, other: Carried) -> bool:
        """Whether the tensors are laid out as the others are, wherever they are."""
        pairs = zip(self.tensors, other.tensors)
        are_alike = all(a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype for a, b in pairs)
        return self.fact.structure == other.fact.structure and are_alike

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """The same with other tensors."""
        return tree_unflatten(tensors, self.tree)


def _is_copied_whole(tensor: Tensor) -> bool:
    """Whether a tensor has nothing that a copy of its elements has not."""
    has_more = vars(tensor) or tensor.requires_grad or tensor.grad is not None or tensor.has_names()
    return has_storage(tensor) and not (has_more or tensor.is_nested or tensor.is_quantized)
