"""Private names of PyTorch. Checked with torch 2.9, 2.10 and 2.11.

Functions that a steady call uses are PyTorch's own objects under another name: a wrapper would cost host time.
"""

from __future__ import annotations

import enum
import gc
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar
from weakref import ref

import torch
from torch._C._dynamo import guards as _guards
from torch._C._dynamo.guards import TensorGuards
from torch._dynamo.guards import GuardManagerType
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes as disable_dispatch_modes,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves as _tree_leaves,
    tree_map,
    tree_map_only as _tree_map_only,
    tree_unflatten,
)
from torch.utils.hooks import RemovableHandle

_Result = TypeVar("_Result")

# A context: no `__torch_function__` is called inside, neither of a subclass nor of a mode such as a default device.
without_torch_functions = torch._C.DisableTorchFunction


# Tensors

# Whether the tensor is zeros without memory, as the derivative of ``torch.sgn`` is.
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
# Whether autograd knows the tensor for a view of another one, and that other one; None if there is none.
is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
autograd_base: Callable[[Any], torch.Tensor | None] = attrgetter("_base")


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor has one storage: sparse and MKL-DNN tensors have none, nor what a lazy module has to make."""
    return torch._C._has_storage(tensor) and not is_lazy(tensor)


# What ``torch.ops`` has: operators, which look up their overloads, and keep them, when they are first called.
OPERATORS = torch._ops.OpOverloadPacket, torch._ops.OpOverload

# Whether the tensor holds others, which have the memory, such as a DTensor, also if it is a parameter.
is_wrapper: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass
is_wrapper_type: Callable[[type], bool] = is_traceable_wrapper_subclass_type

# As ``__torch_function__`` of a subclass of Tensor: PyTorch's functions take it for a plain tensor.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl


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


def deterministic_fill() -> bool:
    """Whether PyTorch fills new memory, because algorithms are to be deterministic."""
    return torch._C._get_deterministic_algorithms() and torch._C._get_deterministic_fill_uninitialized_memory()


# Guards in C++

# ``addresses_equal(tensors, addresses, indices)``: whether the tensors at the indices have the addresses there.
addresses_equal: Callable[..., bool] = torch._C._tensors_data_ptrs_at_indices_equal


def tensor_guards(tensors: Sequence[torch.Tensor], *, strides: bool = True) -> TensorGuards:
    """A check of type, dtype, device, shape, strides, dispatch keys and ``requires_grad``: ``.check(*tensors)``.

    No tensor may occur twice.
    """
    shapes: list[Any] = [list(t.size()) for t in tensors]
    dim_strides: list[Any] = [list(t.stride()) if strides else [None] * t.dim() for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=dim_strides)


def dictionary_guard(watched: Sequence[Any]) -> Callable[[], bool]:
    """A check that objects have their types and their dictionaries, that nothing was written to a dictionary, and that
    lists have their lengths.

    The check owns what it watches, except for objects that ``watched`` has weak references to. Where CPython does not
    report writes to attributes, the check is always False unless only dictionaries are watched.
    """
    if any(isinstance(item, ref) and item() is None for item in watched):  # a copy of the module lives longer
        return lambda: False
    if attribute_writes_are_reported() or all(isinstance(item, (dict, list)) for item in watched):
        return _dictionary_guard(watched)
    return lambda: False


def _dictionary_guard(watched: Sequence[Any]) -> Callable[[], bool]:
    scope = tuple(watched)
    manager = _guards.RootGuardManager()
    kind = GuardManagerType.GUARD_MANAGER
    for i, item in enumerate(scope):
        guard: Any = manager.tuple_getitem_manager(i, str(i), item, kind)
        if isinstance(item, ref):
            item = item()
            guard = guard.weakref_call_manager(f"{i}()", item, kind)
        if isinstance(item, list):
            _add_guard(guard.add_length_check_guard, len(item))
            continue
        if not isinstance(item, dict):
            _add_guard(guard.add_type_match_guard, id(type(item)))
            guard, item = guard.get_generic_dict_manager(f"{i}.__dict__", vars(item), kind), vars(item)
        _add_guard(guard.add_dict_version_guard, item)
    return partial(manager.check, scope)


def attribute_guard(values: Sequence[tuple[Any, Mapping[str, Any]]], missing: object) -> Callable[[], bool]:
    """A check that objects have their types, and these very values as attributes of their own or as items.

    The values have to be kept alive. Classes with a lookup of their own are not supported. Where CPython does not
    report writes to attributes, the check is always False unless there are only dictionaries: guards skip those that no
    write was reported of.

    Args:
        values: objects, each with the attributes in its dictionary and its slots; dictionaries, each with items.
        missing: stands for an attribute that an object does not have.
    """
    scope = tuple(value for value, _ in values)
    if not (attribute_writes_are_reported() or all(type(value) is dict for value in scope)):
        return lambda: False
    manager = _guards.RootGuardManager()
    kind = GuardManagerType.GUARD_MANAGER
    for i, (value, attributes) in enumerate(values):
        guard: Any = manager.tuple_getitem_manager(i, str(i), value, kind)
        is_dictionary = type(value) is dict
        if not is_dictionary:
            _add_guard(guard.add_type_match_guard, id(type(value)))
        dictionary = names_of(value) if type(value).__dictoffset__ else None
        inner = guard if is_dictionary else None
        for name, attribute in attributes.items():
            source = f"{i}.{name}"
            if not is_dictionary and inspect.ismemberdescriptor(inspect.getattr_static(type(value), name, None)):
                if attribute is missing:
                    _add_guard(guard.add_no_hasattr_guard, name)
                else:
                    _add_guard(guard.getattr_manager(name, source, attribute, kind).add_id_match_guard, id(attribute))
            elif is_dictionary or dictionary is not None:
                inner = inner or guard.get_generic_dict_manager(f"{i}.__dict__", dictionary, kind)
                if attribute is missing:
                    _add_guard(inner.add_dict_contains_guard, False, name)
                else:
                    item = inner.dict_getitem_manager(name, source, attribute, kind)
                    _add_guard(item.add_id_match_guard, id(attribute))
    return partial(manager.check, scope)


def _add_guard(add: Callable[..., None], *values: Any) -> None:
    try:
        add(*values, [], None)
    except TypeError:  # torch before 2.11
        add(*values, [])


def dictionary_of(value: type | types.ModuleType) -> dict[str, Any]:
    """The dictionary of a class, which Python shows as a proxy, or of a module."""
    names = vars(value)
    return names if isinstance(names, dict) else gc.get_referents(names)[0]


def names_of(value: object) -> dict[str, Any]:
    """The dictionary of an object, whatever its class does when somebody asks for it; an empty one if it has none."""
    try:
        names = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return names if isinstance(names, dict) else {}


def variables_of(environ: Any) -> dict[Any, Any]:
    """The dictionary behind `os.environ`."""
    variables: dict[Any, Any] = environ._data
    return variables


def module_dictionaries(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The dictionaries with a module's attributes, parameters, buffers and children."""
    return vars(module), module._parameters, module._buffers, module._modules


@cache
def attribute_writes_are_reported() -> bool:
    """Whether a write to an attribute shows as a write to the object's dictionary. CPython 3.13.0 has a bug there."""

    class Probe:
        attribute: int

    probe = Probe()
    unchanged = _dictionary_guard([probe])
    probe.attribute = 0
    return not unchanged()


# What ``fully_shard`` and the like were applied to: an application of any of them is a write to this dictionary.
composable_states: dict[Any, Any] = vars(_module_state_mapping)["data"]


def fully_sharded_modules() -> Iterator[torch.nn.Module]:
    """The modules whose own parameters ``fully_shard`` shards. Its package takes long to import, so it is not imported.

    In a forward, such parameters are plain ones, so only ``fully_shard`` knows them.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in [*_module_state_mapping]:
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            yield from (each._module_info.module for each in (group.fsdp_params if group is not None else ()))


# State of the thread and of the process

dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
is_traced: Callable[[], bool] = torch._C._is_tracing  # by ``torch.jit.trace``, on this thread
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # such as vmap or grad
# The innermost saved-tensor hooks of this thread; None if there are none.
saved_tensors_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
# Whether operators do not reach autograd, as below ``torch._C._AutoDispatchBelowAutograd()``.
is_below_autograd: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.AutogradFunctionality
)
_fp32_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter


def only_device_modes() -> bool:
    """Whether all active function modes only set a default device."""
    return all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


forward_ad_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)
"""The level of forward-mode AD on this thread; -1 if it is not active. (A Python function would cost more to call.)"""


def default_device_is_set() -> bool:
    """Whether ``torch.set_default_device`` or ``with torch.device(...)`` is in force on this thread."""
    default = torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context")  # None after set_default_device(None)
    return default is not None or bool(function_mode_count())


class Settings(enum.Flag):
    """Groups of the process-wide settings by which PyTorch chooses a GPU's kernels."""

    NONE = 0  # only those that any kernel may depend on
    MATMUL = enum.auto()
    ATTENTION = enum.auto()
    CUDNN = enum.auto()
    LINALG = enum.auto()
    ALL = MATMUL | ATTENTION | CUDNN | LINALG


_c: Any = torch._C
_MATMUL = "torch.backends.cuda.matmul"
# By the names by which users set them, with the functions that read them.
_SETTINGS: Mapping[Settings, dict[str, Callable[[], Any]]] = {
    Settings.NONE: {
        "torch.inference_mode": torch.is_inference_mode_enabled,
        "torch.use_deterministic_algorithms()": _c._get_deterministic_algorithms,
        "warn_only of torch.use_deterministic_algorithms()": _c._get_deterministic_algorithms_warn_only,
    },
    Settings.MATMUL: {
        f"{_MATMUL}.fp32_precision": partial(_fp32_precision, "cuda", "matmul"),
        f"{_MATMUL}.allow_fp16_reduced_precision_reduction": _c._get_cublas_allow_fp16_reduced_precision_reduction,
        f"{_MATMUL}.allow_bf16_reduced_precision_reduction": _c._get_cublas_allow_bf16_reduced_precision_reduction,
        f"{_MATMUL}.allow_fp16_accumulation": _c._get_cublas_allow_fp16_accumulation,
        "torch.backends.cuda.preferred_blas_library()": lambda: int(_c._get_blas_preferred_backend()),
    },
    Settings.ATTENTION: {
        "torch.backends.cuda.enable_flash_sdp()": _c._get_flash_sdp_enabled,
        "torch.backends.cuda.enable_mem_efficient_sdp()": _c._get_mem_efficient_sdp_enabled,
        "torch.backends.cuda.enable_math_sdp()": _c._get_math_sdp_enabled,
        "torch.backends.cuda.enable_cudnn_sdp()": _c._get_cudnn_sdp_enabled,
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp()": _c._get_math_sdp_allow_fp16_bf16_reduction,
        "the priorities of torch.nn.attention.sdpa_kernel()": lambda: str(_c._get_sdp_priority_order()),
    },
    Settings.CUDNN: {
        "torch.backends.cudnn.enabled": _c._get_cudnn_enabled,
        "torch.backends.cudnn.benchmark": _c._get_cudnn_benchmark,
        "torch.backends.cudnn.deterministic": _c._get_cudnn_deterministic,
        "torch.backends.cudnn.conv.fp32_precision": partial(_fp32_precision, "cuda", "conv"),
        "torch.backends.cudnn.rnn.fp32_precision": partial(_fp32_precision, "cuda", "rnn"),
    },
    Settings.LINALG: {
        "torch.backends.cuda.preferred_linalg_library()": lambda: int(_c._get_linalg_preferred_backend())
    },
}
if hasattr(_c, "_get_fa3_sdp_enabled"):  # torch 2.11
    _SETTINGS[Settings.ATTENTION]["torch.nn.attention.activate_flash_attention_impl()"] = _c._get_fa3_sdp_enabled


def kernel_settings(groups: Settings | None) -> Callable[[], list[Any]]:
    """A function that reads the settings of these groups. A graph has the kernels that they choose baked in.

    Args:
        groups: None for no settings at all, not even those that any kernel may depend on.
    """
    getters = [*_getters(groups).values()]
    return lambda: [get() for get in getters]


def names_of_settings(groups: Settings | None) -> list[str]:
    """What `kernel_settings` reads, in its order, by the names by which users set it."""
    return [*_getters(groups)]


def _getters(groups: Settings | None) -> dict[str, Callable[[], Any]]:
    chosen = [getters for group, getters in _SETTINGS.items() if groups is not None and group in groups]
    return {name: get for getters in chosen for name, get in getters.items()}


# Whether a profiler of PyTorch is active: ``profiler_state[IS_PROFILING]``. To read it costs a steady call 10 ns.
profiler_state: dict[str, Any] = vars(torch.autograd.profiler)
IS_PROFILING = "_is_profiler_enabled"


def in_profile(name: str, function: Callable[..., _Result], *args: Any) -> _Result:
    """Calls a function, in a range of that name while a profiler is active."""
    if not profiler_state[IS_PROFILING]:
        return function(*args)
    with torch.profiler.record_function(name):
        return function(*args)


# A range of a profile, by its name, that no dispatch mode sees, unlike `torch.profiler.record_function`.
ProfilerRange: Any = torch._C._profiler._RecordFunctionFast


# Autograd

# Whether the backward under way runs this node. RuntimeError for a leaf among the inputs of `torch.autograd.grad`.
engine_will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


def in_backward() -> bool:
    """Whether a backward is under way on this thread."""
    return torch._C._current_graph_task_id() != -1


# The inputs of a backward that runs nothing.
_nothing = torch.zeros((), device="cpu", requires_grad=True), torch.zeros((), device="cpu")


def drop_failed_backwards() -> None:
    """Frees what backwards of this thread that raised have left in its queue: nodes, and the gradients for them.

    Autograd does so when the next backward begins, which is after the next forward.
    """
    if not in_backward():
        leaf, gradient = _nothing
        with without_torch_functions():
            torch.autograd.grad(leaf, leaf, gradient)


def backward_keeps_graph() -> bool:
    """Whether a backward is under way on this thread that keeps its graph for another one."""
    return in_backward() and torch._C._autograd._get_current_graph_task_keep_graph()


def function_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` calls where no transform of torch.func is active, without the check whether one is."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def raising_if_differentiated(
    gradients: Sequence[torch.Tensor | None], message: str
) -> tuple[torch.Tensor | None, ...]:
    """The same gradients, with a node of autograd that raises RuntimeError in a backward through them."""
    leaves = [each if each is None else each.detach().requires_grad_() for each in gradients]
    found = torch._C._functions.DelayedError(message.encode(), len(leaves))(*leaves)  # type: ignore[arg-type]
    return found if isinstance(found, tuple) else (found,)


def has_accumulate_hooks(leaf: torch.Tensor) -> bool:
    """Whether hooks wait for the gradient of the leaf, or for its accumulation."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


# Hooks

_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip


_own_hooks = 0  # how many hooks of this package have been registered


def registered_hooks() -> int:
    """How many hooks others than this package have registered from Python so far, in this process."""
    return RemovableHandle.next_id - _own_hooks


def register_own(register: Callable[[Callable[..., Any]], RemovableHandle], hook: Callable[..., Any]) -> Any:
    """Registers a hook of this package, so that those of others are counted right."""
    global _own_hooks
    _own_hooks += 1
    return register(hook)


def hooks_of(value: Any) -> Iterator[Callable[..., Any]]:
    """The hooks of a module, an optimizer or a tensor that run when it is used, or when it gets its gradient."""
    for name in _HOOKS:
        yield from (getattr(value, name, None) or {}).values()
    if isinstance(value, torch.Tensor) and value.requires_grad and registered_hooks():
        yield from _hooks_of_gradient(value)


def _hooks_of_gradient(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    if not is_leaf(tensor) or is_lazy(tensor):
        return []
    with torch.inference_mode(False):  # which gives no tensor a node
        return hooks_of_node(gradient_node(tensor))


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether autograd accumulates a gradient of a tensor, if the tensor requires one."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view that autograd refuses to describe, as those of FSDP's flat parameters
        return False


def gradient_node(leaf: torch.Tensor) -> Any:
    """The node that accumulates the gradient of a leaf."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def hooks_of_node(node: Any) -> list[Callable[..., Any]]:
    """The hooks of a node of autograd. PyTorch does not say them: one of ours, which is removed again, shows others."""
    found: list[Callable[..., Any]] = []
    for register in (node.register_prehook, node.register_hook):
        handle = register_own(register, lambda *gradients: None)
        others = dict(handle.hooks_dict_ref() or ())
        handle.remove()
        others.pop(handle.id, None)
        found += others.values()
    return found


def global_hooks() -> list[tuple[str, Mapping[Any, Any]]]:
    """The hooks of all modules and all optimizers, by what they are for."""
    modules = torch.nn.modules.module
    return [
        ("forwards of modules", {**modules._global_forward_hooks, **modules._global_forward_pre_hooks}),
        ("backwards of modules", {**modules._global_backward_hooks, **modules._global_backward_pre_hooks}),
        ("steps of optimizers", {**_global_optimizer_pre_hooks, **_global_optimizer_post_hooks}),
    ]


def inside_autocast() -> bool:
    """Whether this thread is inside of a torch.autocast, enabled or not, which keeps what one inside of it has cast."""
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting())


def autocast_dtype(device_type: str) -> str | None:
    """The dtype that autocast uses on devices of this type on this thread, such as "bfloat16"; None if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


@contextmanager
def making_states_in(
    memory: Callable[[], AbstractContextManager[None]], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[None]:
    """Inside, PyTorch's own optimizers make what state they lack inside of ``memory``."""

    def make(init: Callable[..., Any], *args: Any) -> Any:
        with memory():
            return init(*args)

    own = [each for each in optimizers if type(each).__module__.startswith("torch.optim.")]
    makers = [each for each in own if hasattr(each, "_init_group") and "_init_group" not in vars(each)]
    for each in makers:
        vars(each)["_init_group"] = partial(make, each._init_group)
    try:
        yield
    finally:
        for each in makers:
            del vars(each)["_init_group"]


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors have in common if they share their storage."""
    return tensor.untyped_storage()._cdata


def keep_with_storage(tensor: torch.Tensor, kept: Any) -> None:
    """Keeps an object until the last tensor of the storage has gone, in the place of what was kept so before.

    The storage's object of Python is freed with the storage, and never taken for garbage before: the garbage collector
    does not know who refers to a storage.
    """
    storage: Any = tensor.untyped_storage()
    storage.kept = kept


_LEAVES = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, types.NoneType, torch.dtype, torch.device}


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves as PyTorch's function of the name finds them, which is slow for what operators get."""
    kind = type(tree)
    if kind in _LEAVES:
        return [tree]
    if kind is tuple or kind is list or kind is dict:
        return [leaf for each in (tree.values() if kind is dict else tree) for leaf in tree_leaves(each)]
    return _tree_leaves(tree)


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


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# How many hold a tensor from C++, its object of Python included; 1 where PyTorch does not tell (before 2.11).
tensor_use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda tensor: 1)


# How many tensors have the storage with this `storage_id`, its object of Python included.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count


def holders_of_storage(storage: torch.UntypedStorage) -> int:
    """How many tensors have a storage, and how many besides a variable of the caller refer to its object of Python."""
    tensors = storage_use_count(storage._cdata) - 1
    return tensors + sys.getrefcount(storage) - _references[tensors > 0]


# Those that are always there, without tensors and with some, as of a call in Python; since torch 2.11 of C++, too.
_references, _storage = {False: 0, True: 0}, torch.UntypedStorage(0)
_references[False] = holders_of_storage(_storage)
_tensor = torch.empty(0, device="cpu").set_(_storage)
_references[True] = holders_of_storage(_storage) - 1
del _storage, _tensor


def are_held_unseen(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether somebody in C++ holds one of these, or another tensor of its memory, besides as a gradient.

    Another library does that got it through DLPack. It looks at all objects that Python's garbage collector shows. Of
    what NumPy has, PyTorch notes that it must stay where it is.
    """
    if not all(tensor.untyped_storage().resizable() for tensor in tensors):
        return True
    homes = {*map(storage_id, tensors)}
    gradients = [t.grad for t in _known_tensors() if is_leaf(t)]  # of which some had no object of Python
    known = [t for t in _known_tensors() if has_memory(t) and storage_id(t) in homes]
    uses, counts = Counter(map(id, gradients)), Counter(map(storage_id, known))
    is_any = any(tensor_use_count(t) > 1 + uses[id(t)] for t in known)
    return is_any or any(storage_use_count(home) > counts[home] + 1 for home in homes)  # with one object of Python


def _known_tensors() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def shares_storage(values: Any, tensor: torch.Tensor) -> bool:
    """Whether any tensor in ``values`` shares its storage with ``tensor``."""
    tensors = tensors_in(values)
    return any(has_storage(other) and storage_id(other) == storage_id(tensor) for other in tensors)
