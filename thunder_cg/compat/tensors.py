"""Private names of PyTorch about tensors: storages, memory, views, and trees of them."""

from __future__ import annotations

import sys
import types
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch._C._dynamo import guards as _guards
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves as _tree_leaves,
    tree_map,
    tree_map_only as _tree_map_only,
    tree_unflatten,
)

from thunder_cg.compat.autograd import is_leaf
from thunder_cg.compat.objects import counting, objects_of, with_subclasses

# Whether the tensor is zeros without memory, as the derivative of ``torch.sgn`` is.
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
# Whether autograd knows the tensor for a view of another one, and that other one; None if there is none.
is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
autograd_base: Callable[[Any], torch.Tensor | None] = attrgetter("_base")


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor has one storage: sparse and MKL-DNN tensors have none, nor what a lazy module has to make."""
    return torch._C._has_storage(tensor) and not is_lazy(tensor)


# Whether the tensor holds others, which have the memory, such as a DTensor, also if it is a parameter.
is_wrapper: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass
is_wrapper_type: Callable[[type], bool] = is_traceable_wrapper_subclass_type


def read_as(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """A view that is conjugated, and negated, only when it is read. The same once more undoes it."""
    tensor = tensor.conj() if conj else tensor
    return tensor._neg_view() if neg else tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory: fake tensors, wrappers and zeros without memory have a stand-in for a storage."""
    if not has_storage(tensor) or isinstance(tensor, FakeTensor) or is_wrapper(tensor) or is_zero_tensor(tensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # what PyTorch's tracers make may be a stand-in that looks like any other tensor
        return False
    return True


# How often the tensor's memory was written in place. RuntimeError for an inference tensor.
version: Callable[[torch.Tensor], int] = attrgetter("_version")


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory. True also where PyTorch cannot tell."""
    return bool(torch._debug_has_internal_overlap(tensor) != 0)


def empty_strided(device_type: str) -> Callable[..., torch.Tensor]:
    """`torch.empty_strided` on the current device of that type, without the dispatch that takes half of its time."""
    return getattr(_guards, f"_empty_strided_{device_type}")


# ``copy_all_(targets, sources)``, two lists or tuples: copies each source to its target in as few kernels as it can.
copy_all_: Any = torch._foreach_copy_


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors have in common if they share their storage."""
    return tensor.untyped_storage()._cdata


class WeakStorage(StorageWeakRef):
    """A weak reference to a storage."""

    def is_at(self, address: int) -> bool:
        """Whether somebody has the storage, and with its memory there: ``resize_`` gives it other memory."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.cdata)
        return storage is not None and storage.data_ptr() == address


def keep_with_storage(tensor: torch.Tensor, kept: Any) -> None:
    """Keeps an object until the last tensor of the storage has gone, in the place of what was kept so before.

    The storage's object of Python is freed with the storage, and never taken for garbage before: the garbage collector
    does not know who refers to a storage.
    """
    storage: Any = tensor.untyped_storage()
    storage.kept = kept


_LEAVES = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, types.NoneType, torch.dtype, torch.device}


def is_size(value: Any) -> bool:
    """Whether it is a `torch.Size`, of which PyTorch's trees make a tuple."""
    return type(value) is torch.Size


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves as PyTorch's function of the name finds them, which is slow for what operators get."""
    kind = type(tree)
    if kind in _LEAVES:
        return [tree]
    if kind is tuple or kind is list or kind is dict:
        return [leaf for each in (tree.values() if kind is dict else tree) for leaf in tree_leaves(each)]
    return _tree_leaves(tree)


def path_of_leaf(spec: Any, position: int) -> str:
    """``"[0]['x']"``: where a leaf is in a tree. No container is made for that: its class may check what it gets."""
    path = ""
    while spec.type is not None:
        kind, context = spec.type, spec.context[1] if spec.type is defaultdict else spec.context
        i, children = 0, spec.children()
        while position >= children[i].num_leaves:
            position -= children[i].num_leaves
            i += 1
        if kind is namedtuple:
            path += f".{context._fields[i]}"
        else:
            path += f"[{context[i]!r}]" if kind in (dict, OrderedDict, defaultdict) else f"[{i}]"
        spec = children[i]
    return path


def tree_map_only(of: Any, fn: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with ``fn`` of its leaves of a type, as from PyTorch's function of the name."""
    kind = type(tree)
    if kind in _LEAVES:
        return fn(tree) if isinstance(tree, of) else tree
    if kind is tuple or kind is list:
        return kind([tree_map_only(of, fn, each) for each in tree])
    if kind is dict:
        return {name: tree_map_only(of, fn, each) for name, each in tree.items()}
    return _tree_map_only(of, fn, tree)


def is_cpu_scalar(value: Any) -> bool:
    """Whether it is a 0-dim tensor on the CPU, which PyTorch combines with tensors of any device."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"


def is_inexact(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor of floating-point or complex numbers, the only ones that autograd differentiates."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# How many hold a tensor from C++, its object of Python included; 1 where PyTorch does not tell (before 2.11).
tensor_use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda tensor: 1)


# How many tensors have the storage with this `storage_id`, its object of Python included.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count


def holders_of_storage(get: Callable[[], torch.UntypedStorage]) -> int:
    """How many tensors have a storage, and how many refer to its object of Python.

    Nobody passes the storage on: on Python 3.10, and while Dynamo watches frames, a call has one to each argument.
    """
    storage = get()
    tensors = storage_use_count(storage._cdata) - 1
    return tensors + sys.getrefcount(storage) - _references[tensors > 0]


# Those that are always there, without tensors and with some, as of a call in Python; since torch 2.11 of C++, too.
_references, _storages, _tensor = {False: 0, True: 0}, [torch.UntypedStorage(0)], torch.empty(0, device="cpu")
_references[False] = holders_of_storage(partial(_storages.__getitem__, 0)) - 1
_references[True] = holders_of_storage(_tensor.untyped_storage) - 1
del _storages, _tensor


def are_held_unseen(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether somebody in C++ holds one of these, or another tensor of its memory, besides as a gradient.

    Another library does that got it through DLPack. Of what NumPy has, PyTorch notes that it must stay where it is.
    """
    if not all(tensor.untyped_storage().resizable() for tensor in tensors):
        return True
    homes = {*map(storage_id, tensors)}
    with counting:
        found = objects_of(with_subclasses(torch.Tensor))
        gradients = [gradient for t in found if is_leaf(t) and (gradient := t.grad) is not None]
        everything = {id(t): t for t in (*found, *gradients)}.values()  # some gradients had no object of Python
        known = [t for t in everything if has_memory(t) and storage_id(t) in homes]
        del found, everything
    uses = Counter(map(id, gradients))
    return any(tensor_use_count(t) > 1 + uses[id(t)] for t in known) or not has_no_other_tensors(homes, known)


def has_no_other_tensors(homes: Iterable[int], tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the storages with these `storage_id`s, which have objects of Python, have no tensors but these."""
    counts = Counter(map(storage_id, tensors))
    return all(storage_use_count(home) <= counts[home] + 1 for home in homes)  # with the object of Python


def shares_storage(values: Any, tensor: torch.Tensor) -> bool:
    """Whether any tensor in ``values`` shares its storage with ``tensor``."""
    tensors = tensors_in(values)
    return any(has_storage(other) and storage_id(other) == storage_id(tensor) for other in tensors)
