"""The state of the thread and of the process that PyTorch's operators depend on: modes, autocast, settings."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes as disable_dispatch_modes

# A context: no `__torch_function__` is called inside, neither of a subclass nor of a mode such as a default device.
without_torch_functions = torch._C.DisableTorchFunction


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
    """Groups of settings, most of which are the process's: PyTorch chooses a GPU's kernels by them."""

    NONE = 0  # only those that any kernel may depend on
    MATMUL = enum.auto()
    ATTENTION = enum.auto()
    CUDNN = enum.auto()
    LINALG = enum.auto()
    ALL = MATMUL | ATTENTION | CUDNN | LINALG
    COMPILED = enum.auto()  # on which no kernel depends, but what torch.compile guards
    GUARDED = MATMUL | COMPILED  # all that torch.compile guards besides tensors


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
    Settings.COMPILED: {
        "torch.set_default_dtype()": torch.get_default_dtype,
        "torch.set_default_device()": lambda: (str(_device.CURRENT_DEVICE), function_mode_count()),
        "torch.set_num_threads()": torch.get_num_threads,
        "cache_enabled of torch.autocast()": torch.is_autocast_cache_enabled,
        "__torch_function__": lambda: (_c._is_torch_function_enabled(), _c._is_torch_function_all_disabled()),
        "dispatch keys": lambda: f"{_c._dispatch_tls_local_include_set()} {_c._dispatch_tls_local_exclude_set()}",
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


def inside_autocast() -> bool:
    """Whether this thread is inside of a torch.autocast, enabled or not, which keeps what one inside of it has cast."""
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting())


def autocast_dtype(device_type: str) -> str | None:
    """The dtype that autocast uses on devices of this type on this thread, such as "bfloat16"; None if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
