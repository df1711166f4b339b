"""Operators of PyTorch: names, tags, schemas, and how they are dispatched. Checked with torch 2.9, 2.10 and 2.11."""

from __future__ import annotations

import difflib
import inspect
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch._library.custom_ops import CustomOpDef

SIMILAR = 0.7  # of two names, from 0 to 1, that one may be a misspelling of the other

# Whether an operator's schema says that it writes to an argument.
is_mutable: Callable[[Any], bool] = attrgetter("_schema.is_mutable")

weight_norm: Callable[..., torch.Tensor] = torch._weight_norm
pad: Callable[..., torch.Tensor] = torch._C._nn.pad  # F.pad, as Dynamo calls it
int_mm: Callable[..., torch.Tensor] = torch._int_mm  # of 8 bits, as quantized layers have it
transformer_encoder_layer: Callable[..., torch.Tensor] = torch._transformer_encoder_layer_fwd

# Matrix products of groups of rows, each with its own matrix, under all names that this version has.
grouped_mm: tuple[Callable[..., torch.Tensor], ...] = tuple(
    getattr(module, name)
    for module, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(module, name)
)


def is_tensor_of_sizes(function: Any) -> bool:
    """Whether it is what Dynamo writes ``torch.tensor`` as where it gets sizes that vary."""
    return function is getattr(sys.modules.get("torch._refs"), "tensor", ())


def _overloads(function: Any) -> list[Any]:
    """Those of an operator of ``torch.ops``, or the one that it is; none of anything else."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        return [getattr(function, name) for name in function.overloads()]
    return [function] if isinstance(function, torch._ops.OpOverload) else []


def is_cudagraph_unsafe(function: Any) -> bool:
    """Whether an operator of ``torch.library`` has the tag ``torch.Tag.cudagraph_unsafe``, or what a partial calls."""
    if isinstance(function, partial):
        return any(map(is_cudagraph_unsafe, (function.func, *function.args)))
    return any(torch.Tag.cudagraph_unsafe in each.tags for each in _overloads(function))


@cache
def draws(function: Any) -> bool:
    """Whether an operator of ``torch.ops``, or PyTorch's of a name, in place or not, draws from a generator."""
    if isinstance(function, str):
        names = (function, f"{function}_") if function else ()
        return any(draws(getattr(torch.ops.aten, name)) for name in names if hasattr(torch.ops.aten, name))
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in _overloads(function))


def parameters_of(function: Any, name: str) -> list[list[str]]:
    """The names of the arguments that an operator of PyTorch's takes by position, for each of its overloads.

    Args:
        function: a function, or the name of a method.
        name: the name of the function or method.
    """
    if isinstance(function, types.FunctionType):
        return [[each for each, parameter in inspect.signature(function).parameters.items() if parameter.kind < 2]]
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return [
        ["input" if each.name == "self" else each.name for each in schema.arguments if not each.kwarg_only]
        for schema in schemas
    ]


def mutated(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operator of ``torch.ops`` writes in place, by its schemas."""
    for arguments in (each._schema.arguments for each in _overloads(function)):
        values = {argument.name: value for argument, value in zip(arguments, args)} | dict(kwargs)
        writes = (each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write)
        yield from (values[name] for name in writes if name in values)


def library_names(function: Any) -> tuple[str, ...]:
    """The names of an operator of ``torch.library``: "ns::op", "torch.ops.ns.op" and "ns.op", then these with each
    overload; () for anything else.

    Also of one that a partial calls, as the derivative does that Thunder makes of an operator.
    """
    if isinstance(function, partial):
        return next(filter(None, map(library_names, (function.func, *function.args))), ())
    if isinstance(function, CustomOpDef):
        function = function._opoverload
    overloads = _overloads(function)
    if not overloads:
        return ()
    name = overloads[0].overloadpacket._qualified_op_name
    dotted = name.replace("::", ".")
    forms = (name, f"torch.ops.{dotted}", dotted)
    return (*forms, *(f"{form}.{each._overloadname}" for each in overloads for form in forms))


def names_in_namespace(namespace: str) -> list[str]:
    """The operators of ``torch.library`` in a namespace that have been looked up, without the namespace."""
    found = vars(getattr(torch.ops, namespace)).items()
    return [name for name, each in found if isinstance(each, torch._ops.OpOverloadPacket)]


def name_in_library(name: str) -> str:
    """A name as ``torch.library`` has it: "ns::op" for "ns.op", "torch.ops.ns.op" and "ns.op.default"."""
    return "::".join(name.removeprefix("torch.ops.").replace("::", ".").split(".")[:2])


def is_in_library(name: str) -> bool:
    """Whether ``torch.library`` has an operator of this name, in one of the forms of `library_names`."""
    namespace, _, operator = name_in_library(name).partition("::")
    return namespace.isidentifier() and operator.isidentifier() and hasattr(getattr(torch.ops, namespace), operator)


def nearest_in_library(name: str) -> str | None:
    """The operator of ``torch.library`` that ``name`` may be a misspelling of."""
    known = {each.partition(".")[0] for each in torch._C._dispatch_get_all_op_names()}
    return next(iter(difflib.get_close_matches(name_in_library(name), sorted(known), 1, SIMILAR)), None)


def is_function(name: str) -> bool:
    """Whether PyTorch has a function of this name: "torch.sigmoid"."""
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return name.startswith("torch.") and callable(value) and not isinstance(value, type)


def nearest_function(name: str) -> str | None:
    """PyTorch's function that ``name`` may be a misspelling of, as "torch.nn.functionl.gelu" is of gelu."""
    value: Any = torch
    found = "torch"
    for part in name.split(".")[1:]:
        part = next(iter(difflib.get_close_matches(part, dir(value), 1, SIMILAR)), "")
        value, found = getattr(value, part, None), f"{found}.{part}"
    return found if is_function(found) else None


# Namespaces of PyTorch's own operators: those of the distributed ones communicate.
_NAMESPACES = frozenset({
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "aten", "c10d", "fsdp", "inductor", "prims",
    "quantized", "symm_mem",
})  # fmt: skip


def library_name(function: Any) -> str | None:
    """The name of an operator of ``torch.library``, such as "my_ops.my_op"; None for anything else.

    None also for an operator of PyTorch's own, of which there are several, or that draws, writes an argument or returns
    one, as its tags and its schema say.
    """
    overloads = _overloads(function)
    if len(overloads) != 1 or overloads[0].namespace in _NAMESPACES:
        return None
    (function,) = overloads
    if torch.Tag.nondeterministic_seeded in function.tags:
        return None
    if is_mutable(function) or any(value.alias_info is not None for value in function._schema.returns):
        return None
    return f"{function.namespace}.{function._opname}"


@contextmanager
def composite_sees_views(function: Any) -> Iterator[None]:
    """Inside, the parts of a composite operator make views in inference mode as they do outside of it.

    Unless it makes views of what they return itself, as ``narrow`` and ``chunk`` do.
    """
    views = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._PreserveDispatchKeyGuard():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), views):
            torch._C._dispatch_tls_set_dispatch_key_excluded(views, False)
        yield


def is_higher_order(function: Any) -> bool:
    """Whether an operator takes functions, as that of `torch.cond` does."""
    return isinstance(function, torch._ops.HigherOrderOperator)


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


# A context: inside, operators make no history, whatever the grad mode is.
below_autograd: Callable[[], AbstractContextManager[None]] = torch._C._AutoDispatchBelowAutograd


def below_autocast() -> AbstractContextManager[None]:
    """Inside, operators run with the dtypes that they are given, whether autocast is enabled or not."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


@cache
def operator_table() -> tuple[Any, ...]:
    """``op_db``, the table of operators with sample inputs that PyTorch's tests use.

    PyTorch's tests import `expecttest`, which the table does not need: a stand-in replaces it. They also forbid the
    process to set any flag of ``torch.backends``, which is ignored.
    """
    if "expecttest" not in sys.modules and find_spec("expecttest") is None:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with patch.object(torch.backends, "disable_global_flags", lambda: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it imports where they are installed
        from torch.testing._internal import common_methods_invocations as source

    # The table's function seeds before each call, which Thunder cannot trace.
    source.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # type: ignore[attr-defined]
    return tuple(source.op_db)
