"""Modules and functions that Thunder has compiled, and what it keeps of them. Checked with lightning-thunder 0.2.6."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import thunder
import torch
import torch.nn.utils.stateless as stateless
from thunder import CacheEntry
from thunder.core.module import ThunderModule
from thunder.extend import TemporaryExecutor

from thunder_cg.compat.thunder import is_ours
from thunder_cg.errors import FunctionalCallError

# The module that was given to ``thunder.jit``.
original_module: Callable[[ThunderModule], torch.nn.Module] = attrgetter("_model")
# The dictionaries in which a compiled module looks parameters and buffers up.
module_parameters: Callable[[ThunderModule], dict[str, torch.nn.Parameter]] = attrgetter("_overrides_parameters")
module_buffers: Callable[[ThunderModule], dict[str, torch.Tensor]] = attrgetter("_overrides_buffers")
# The submodules that a compiled module has looked up, by name.
module_cache: Callable[[ThunderModule], dict[str, torch.nn.Module]] = attrgetter("_module_cache")
# Counts and cache entries of a compiled module: ``calls``, ``cache_hits``, ``interpreter_cache``, ``last_*``.
compile_stats: Callable[[ThunderModule], Any] = attrgetter("_lc_cs")
# The options that a module was compiled with: ``cache_option``, ``compile_options``.
compile_data: Callable[[ThunderModule], Any] = attrgetter("_lc_cd")
# The function that a compiled module calls in its forward: Thunder's dispatch, or what was put in its place.
dispatch_of: Callable[[ThunderModule], Callable[..., Any]] = attrgetter("_forward_fn")


def changed_since_compiled(module: ThunderModule) -> dict[str, list[str]]:
    """What was set after Thunder compiled a module, and calls do not see.

    Returns:
        Two lists of names: attributes of the model that the compiled module has besides; and parts of the model that
        are others now: submodules, buffers, hooks, and parameters if no other transform has a say in these.
    """
    model = original_module(module)
    mine, its = ({*vars(each), *each._modules, *each._parameters, *each._buffers} for each in (module, model))
    now = dict(model.named_modules())
    before: ModelParts = getattr(dispatch_of(module), "parts", None) or ModelParts.of(model)
    others = [name for name in {**before.modules, **now} if before.modules.get(name) is not now.get(name)]
    others += [name for name, each in model.named_buffers() if before.buffers.get(name) is not each]
    hooks = before.hooks
    hooked = [name for name, each in now.items() if _hooks_of(each) != hooks.get(name, _hooks_of(each))]
    others += [f"{name}._forward_hooks".lstrip(".") for name in hooked]
    if has_parameters_of(module, model):
        known = module_parameters(module)
        others += [name for name, p in model.named_parameters() if name in known and known[name] is not p]
    outer = [name for name in others if not any(name.startswith(f"{other}.") for other in others)]
    attributes = set() if isinstance(model, ThunderModule) else (mine & its) - vars(torch.nn.Module()).keys()
    return {"attributes": sorted(attributes), "parts": outer}


class ModelParts(NamedTuple):
    """What a model has besides parameters, by name: hooks by numbers, of each submodule. It keeps nothing alive."""

    modules: WeakValueDictionary[str, torch.nn.Module]
    buffers: WeakValueDictionary[str, torch.Tensor]
    hooks: dict[str, list[int]]

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelParts:
        """Those that there are now."""
        hooks = {name: _hooks_of(each) for name, each in model.named_modules()}
        return cls(WeakValueDictionary(model.named_modules()), WeakValueDictionary(model.named_buffers()), hooks)


def _hooks_of(module: torch.nn.Module) -> list[int]:
    """Those around its forward, which Thunder traces."""
    return [*module._forward_hooks, *module._forward_pre_hooks]


def hooks_on_gradients(fn: Any) -> list[str]:
    """The submodules of a module with hooks on their gradients, which Thunder does not call."""
    modules = fn.named_modules() if isinstance(fn, torch.nn.Module) else ()
    return [name for name, each in modules if each._backward_hooks or each._backward_pre_hooks]


def has_parameters_of(module: ThunderModule, model: torch.nn.Module) -> bool:
    """Whether a compiled module's parameters are those that its model had then, as no other transform changes them."""
    return len(compile_data(module).transforms) == 1 and not is_data_parallel(model)


def is_data_parallel(model: torch.nn.Module) -> bool:
    """Whether Thunder's ddp or fsdp has the model's parameters."""
    return bool(getattr(model, "use_ddp", False) or getattr(model, "use_fsdp", False))


def set_dispatch(module: ThunderModule, forward: Callable[..., Any]) -> None:
    """Puts another function in the place of the one that a compiled module calls."""
    module._forward_fn = forward


def computation_and_inputs(function: Any, args: Any, kwargs: Any) -> tuple[CacheEntry, Sequence[Any]]:
    """The cache entry that a compiled function has for a call, compiled if need be, and what its computation gets.

    Only the prologue runs.
    """
    entry, inputs, _ = function._lc_cd.get_computation_and_inputs(*args, **kwargs)
    return entry, inputs


def drop_self_reference(function: Callable[..., Any]) -> None:
    """Takes a function that Thunder built out of its own globals: the cycle would keep all that it names alive."""
    inner = inspect.unwrap(function)
    inner.__globals__.pop(inner.__name__, None)


def drop_self_references(entry: CacheEntry) -> None:
    """`drop_self_reference` for all functions of a cache entry, so that the entry is freed by reference counting."""
    for function in (entry.prologue_fn, entry.computation_fn, entry.backward_fn, entry.epilogue_fn):
        if function is not None:
            drop_self_reference(function)


OPTIONS = frozenset(inspect.signature(thunder.jit).parameters) - {"fn", "compile_options"} | {
    *("auto_recompute_intermediates", "cudnn_sdpa_bwd_may_cat_grad_qkv", "disable_inplace_copy_check"),
    *("disable_replace_uniform", "early_transforms", "executors_list", "fusion_type", "is_differentiable_outputs"),
    *("nv_disable_options", "nv_enable_embedding", "nv_enable_linear", "nv_enable_matmul", "nv_enable_options"),
    *("nv_enable_scatter", "nv_enable_sdpa", "nv_enable_shape_only_fusion", "nv_save_fake_inputs", "nv_skip_cache"),
    *("nv_store_fusion_inputs", "sdpa_debug", "skip_inplace_alias_updates", "thunderfx_disable_split_autograd"),
    *("torch_compile_fullgraph", "use_apex_cross_entropy", "use_cudagraphs"),
}  # names of the options of ``thunder.jit``, and of those that Thunder and its executors ask for


def options_of(jitted: Any) -> dict[str, Any]:
    """The options that ``thunder.jit`` had been given, but for ``transforms``."""
    data = compile_data(jitted)
    return {
        "executors": [each for each in data.executors_list if not isinstance(each, TemporaryExecutor)],
        "cache": data.cache_option,
        "sharp_edges": data.sharp_edges,
        "disable_torch_autograd": data.disable_torch_autograd_support,
        "debug_options": data.debug_options,
        **data.compile_options,
    }


_functional_call = stateless._functional_call


@wraps(_functional_call)
def _refuse_functional_call(module: torch.nn.Module, parameters_and_buffers: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses to give other parameters to a module that something of ours is compiled in."""
    for name, each in module.named_modules():
        if not isinstance(each, ThunderModule) or not is_ours(compile_data(each)):
            continue
        if any(key == name or key.startswith(f"{name}." if name else "") for key in parameters_and_buffers):
            raise FunctionalCallError(original_module(each))
    return _functional_call(module, parameters_and_buffers, *args, **kwargs)


stateless._functional_call = _refuse_functional_call


NAME = "thunder_cg.name"  # in the `meta` of a graph of Dynamo's that our `thunderfx` compiles: what the report calls it


def has_pytorchs_numbers(data: Any) -> bool:
    """Whether what is compiled has to compute what PyTorch does where uncaptured Thunder does not: in `thunderfx`."""
    return is_ours(data) and isinstance(data.fn, torch.fx.GraphModule) and NAME in data.fn.meta
