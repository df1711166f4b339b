"""Has Thunder compile in a third of the time, and trace in a ninth, while something of ours is compiled.

Thunder (0.2.6) interprets the model's Python. A third of the time that it takes to compile a language model, it
disassembles functions, each time anew that one is called. Most of the rest goes to Python that it interprets for what
is one method of a builtin type, such as to look up ``len``, to bind a method to its object, to find the next item of a
loop, or to ask eight times in each call of a module whether a dict of hooks is empty. All find the same every time, and
no guard comes of any. With ``sharp_edges="warn"``, fewer warnings come: none about values of Python that is no longer
interpreted. For each exception, such as the one at the end of a loop, it waits busily for a thread of its own, which
keeps that thread from running. Its passes over traces look for dataclasses in the arguments of each operator, inspect
the signatures of its operators anew for each call, and make a set of types anew for each list that they flatten. They
copy each operator in each pass, and forget what they have found out about it. What they do for a fusion grows with the
square of its length: they gather its tags anew for each operator in it, and search it for each value.
"""

from __future__ import annotations

import _thread
import builtins
import dataclasses
import dis
import functools
import inspect
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, NoneType, SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import optree
import thunder
import torch
from thunder.core import (
    codeutils,
    interpreter,
    prims,
    proxies,
    pytree,
    symbol,
    trace_interpreter,
    transform_common,
    utils,
)
from thunder.executors.utils import Region
from torch import nn

from thunder_cg.compat.containers import check_container

_THUNDERS = interpreter._default_opcode_handler_map
_wrap_arguments = interpreter.wrap_args_from_list
_look_up = interpreter.globals_lookup
_truth = interpreter._default_lookaside_map[bool]
_interpret_instruction = interpreter.InterpreterCompileCtx.interpret
_call_unwrapped = interpreter._interpret_call_with_unwrapping
_append = interpreter.InterpreterStack.append
_call_something = interpreter._call_dispatch
_lock = threading.Lock()
_inside = 0  # how many are inside of `faster_tracing`, of all threads
_patches = ExitStack()


@contextmanager
def faster_tracing() -> Iterator[None]:
    """Inside, on any thread, Thunder keeps what it disassembles and inspects, and calls methods of builtins itself."""
    global _inside
    with _lock:
        if not _inside:
            _patch()
        _inside += 1  # only now: what an interrupt leaves patched, the end of the next compilation takes back
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _patches.close()


def _patch() -> None:
    disassembled = functools.cache(lambda code: (*dis.get_instructions(code),))
    changed: dict[Any, dict[str, Any]] = {
        interpreter: {
            "dis": SimpleNamespace(**{**vars(dis), "get_instructions": disassembled}),
            "globals_lookup": _look_up_global,
            "wrap_args_from_list": _arguments,
            "_interpret_call_with_unwrapping": _call,
            "_default_opcode_handler_map": {**_THUNDERS, **_HANDLERS},
            "_call_dispatch": _dispatch,
            "_default_lookaside_map": {**interpreter._default_lookaside_map, **_LOOKASIDES},
        },
        interpreter.InterpreterFrame: {"get_or_make_python_frame": _get_frame},
        interpreter.InterpreterCompileCtx: {"interpret": _interpret},
        interpreter.InterpreterStack: {"append": _push},
        interpreter.ProvenanceRecord: {"__post_init__": _join_flags},
        symbol.Symbol: {"normalize": _normalize},
        symbol.BoundSymbol: {"gather_ctxs": _gather},
        symbol: {"tree_flatten_with_dataclass": _flatten, "tree_flatten": _flatten_known},
        codeutils: {"tree_flatten": _flatten_known, "to_printable": _printable},
        utils: {"tree_flatten": _flatten_known},
        thunder.torch: {"tree_flatten": _flatten_known},
        trace_interpreter: {"safe_map_flat": _map_flat},
        transform_common: {
            "_remove_noop_subsymbols": _drop_empty,
            "remove_duplicate_number_proxies": _without_duplicate_numbers,
        },
        Region: {"__init__": _make_region},
    }
    for of, names in changed.items():
        _patches.enter_context(patch.multiple(of, **names))


def _look_up_global(variables: Any, name: Any) -> Any:
    wanted, scope = interpreter.unwrap(name), variables
    if type(interpreter.unwrap(variables)) is dict and wanted not in interpreter.unwrap(variables):
        scope = interpreter._interpret_call(dict.__getitem__, variables, interpreter.wrap_const("__builtins__"))
    known = interpreter.unwrap(scope)
    if type(known) is dict and wanted in known:
        return interpreter._interpret_call(dict.__getitem__, scope, name)
    return _look_up(variables, name)


def _bool(x: Any) -> Any:
    """``bool`` of what is usual in a module's call: no value, and an empty dict of hooks."""
    value = interpreter.unwrap(x)
    if isinstance(x, interpreter.WrappedValue) and type(value) in (NoneType, OrderedDict) and not value:
        return interpreter.wrap_const(False)
    return _truth(x)


def _dispatch(context: Any, runtime: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A call, that of a bound method with its object as the first argument."""
    method = interpreter.unwrap(function)
    if method is _module_call and args and _is_plain(interpreter.unwrap(args[0])):
        forward = _attribute(args[0], "forward")
        if forward is interpreter.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return forward
        return interpreter._interpret_call(forward, *args[1:], **kwargs)
    if type(method) is not MethodType or hasattr(method, "__thunder_interpreter_orig_fn"):
        return _call_something(context, runtime, function, *args, **kwargs)
    function = function if isinstance(function, interpreter.WrappedValue) else interpreter.wrap_const(function)
    return interpreter._interpret_call(
        _attribute(function, "__func__"), _attribute(function, "__self__"), *args, **kwargs
    )


def _attribute(value: Any, name: str) -> Any:
    return interpreter._interpret_call(getattr, value, interpreter.wrap_const(name))


def _is_plain(own: Any) -> bool:
    """Whether the call of a module is that of its forward, since there are no hooks."""
    is_torchs = type(own)._call_impl is _call_impl and "_call_impl" not in vars(own)
    hooks = (*(getattr(own, name) for name in _HOOKS), *map(vars(nn.modules.module).get, _GLOBAL_HOOKS))
    is_other = any(hooks) or own._compiled_call_impl is not None or torch._C._get_tracing_state()
    return is_torchs and not is_other


_HOOKS = "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_call_impl = nn.Module._call_impl
_module_call = nn.Module._wrapped_call_impl


def _iterate(value: Any, *sentinel: Any) -> Any:
    if sentinel or not hasattr(interpreter.unwrap(value), "__iter__"):
        return _iter(value, *sentinel)
    interpreter._interpret_call(hasattr, value, interpreter.wrap_const("__iter__"))  # for its guard
    return interpreter._interpret_call(_attribute(value, "__iter__"))


def _advance(iterator: Any, *default: Any) -> Any:
    if default or not hasattr(interpreter.unwrap(iterator), "__next__"):
        return _next(iterator, *default)
    return interpreter._interpret_call(_attribute(iterator, "__next__"))


_iter, _next = interpreter._default_lookaside_map[iter], interpreter._default_lookaside_map[next]
_LOOKASIDES = {bool: _bool, iter: _iterate, next: _advance}


def _arguments(values: Any) -> list[Any]:
    """Those of a call with ``*values``."""
    if type(values.value) not in (tuple, list):
        return _wrap_arguments(values)
    values.track_items()
    for each in values.item_wrappers:
        if isinstance(each.value, tuple):  # on Thunder's stack, it is tracked as well
            each.track_items()
    return [*values.item_wrappers]


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    if function is getattr and len(args) == 3 and type(args[0]) is type:  # how Thunder looks for descriptors
        return getattr(*args)
    return _call_unwrapped(function, *args, **kwargs)


def _subscript(inst: Any, /, stack: Any, **state: Any) -> Any:
    container, key = stack._stack[-2:]
    of = type(interpreter.unwrap(container))
    if of not in (dict, OrderedDict, tuple, list) or type(interpreter.unwrap(key)) not in (str, int):
        return _THUNDERS["BINARY_SUBSCR"](inst, stack=stack, **state)
    del stack._stack[-2:]
    return interpreter.check_and_append(stack, interpreter._interpret_call(of.__getitem__, container, key))


def _contains(inst: Any, /, stack: Any, **state: Any) -> Any:
    key, container = stack._stack[-2:]
    of = type(interpreter.unwrap(container))
    if inst.arg or of not in (dict, OrderedDict) or type(interpreter.unwrap(key)) is not str:
        return _THUNDERS["CONTAINS_OP"](inst, stack=stack, **state)
    del stack._stack[-2:]
    return interpreter.check_and_append(stack, interpreter._interpret_call(of.__contains__, container, key))


def _merge(inst: Any, /, stack: Any, **state: Any) -> Any:
    merged, other = stack._stack[-2:]
    is_wrapped = type(merged) is type(other) is interpreter.WrappedValue
    if not is_wrapped or other.value or not type(other.value) is type(merged.value) is dict:
        return _THUNDERS["DICT_MERGE"](inst, stack=stack, **state)
    stack.pop_wrapped()
    check_container(other)
    merged.track_items()
    return None


def _extend(inst: Any, /, stack: Any, **state: Any) -> Any:
    extended, other = stack._stack[-1 - inst.arg], stack._stack[-1]
    if type(interpreter.unwrap(extended)) is not list:
        return _THUNDERS["LIST_EXTEND"](inst, stack=stack, **state)
    stack.pop_wrapped()
    return interpreter.check_signal(interpreter._interpret_call(list.extend, extended, other))


_HANDLERS = {"BINARY_SUBSCR": _subscript, "CONTAINS_OP": _contains, "DICT_MERGE": _merge, "LIST_EXTEND": _extend}


def _interpret(context: Any, inst: Any, /, **state: Any) -> Any:
    """Without a context manager around each instruction."""
    handler = interpreter._default_opcode_handler_map.get(inst.opname)
    if handler is None or context._opcode_interpreter is not interpreter.default_opcode_interpreter:
        return _interpret_instruction(context, inst, **state)
    stack = state["stack"]
    stack.provenance_inst, stack.provenance_inputs, stack.output_idx = inst, [], 0
    try:
        return handler(inst, **state)
    finally:
        stack.provenance_inst = stack.provenance_inputs = None


def _push(stack: Any, value: Any, /) -> None:
    """Where a value came from is known already if it is wrapped."""
    if type(value) is interpreter.WrappedValue and not isinstance(value.value, (tuple, list, dict)):
        stack._stack.append(value)
        stack.output_idx += 1
    else:
        _append(stack, value)


def _join_flags(record: Any) -> None:
    record.inputs = [*record.inputs]
    flags = [each.ext_flag for each in record.inputs]
    record.ext_flag = functools.reduce(operator.and_, flags) if flags else 0


def _in_a_thread(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Starts a thread, and returns when it has appended its result to its first argument."""
    done = _thread.allocate_lock()
    done.acquire()

    def append(result: Any) -> None:
        args[0].append(result)
        done.release()

    _thread.start_new_thread(function, (SimpleNamespace(append=append), *args[1:]))
    done.acquire()


def _import(name: str, *args: Any) -> Any:
    return SimpleNamespace(start_new_thread=_in_a_thread) if name == "_thread" else __import__(name, *args)


_get_frame = FunctionType(
    interpreter.InterpreterFrame.get_or_make_python_frame.__code__,
    {**vars(interpreter), "__builtins__": {**vars(builtins), "__import__": _import}},
)

_bind = symbol.Symbol.normalize
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def _normalize(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a symbol as its function has them, with defaults."""
    if type(self.meta) is symbol.Symbol:  # which takes any
        return args, kwargs
    if type(self.meta) is not FunctionType:
        return _bind(self, *args, **kwargs)
    signature = _signatures.get(self.meta)
    if signature is None:
        signature = _signatures[self.meta] = inspect.signature(self.meta)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


_flatten_checked = pytree.tree_flatten


def _flatten_known(tree: Any, namespace: str = pytree.OPTREE_NAMESPACE) -> Any:
    """Thunder checks the type of the whole by a set of types that it makes anew."""
    if type(tree) in (tuple, list, dict, proxies.TensorProxy, NoneType, int, float):
        return optree.tree_flatten(tree, none_is_leaf=True, namespace=namespace)
    return _flatten_checked(tree, namespace)


def _map_flat(function: Callable[..., Any], *trees: Any) -> Any:
    """``map`` over the leaves. Most are tensors in lists."""
    if all(type(tree) is list and {*map(type, tree)} <= {proxies.TensorProxy} for tree in trees):
        return tuple(utils.safe_map(function, *trees))
    return _map_trees(function, *trees)


_map_trees = utils.safe_map_flat
_no_dataclasses: set[type] = set()


def _flatten(tree: Any) -> Any:
    """Only where there may be a dataclass, Thunder looks for one to register."""
    leaves, spec = _flatten_known(tree)
    if _no_dataclasses.issuperset(map(type, leaves)):
        return leaves, spec
    _no_dataclasses.update(each for each in map(type, leaves) if not dataclasses.is_dataclass(each))
    return pytree.tree_flatten_with_dataclass(tree)


def _gather(of: Any) -> tuple[Any, Any, Any]:
    """What its line of code needs. Thunder makes the line's parts anew for each of these."""
    return of.import_ctx(), of._get_call_ctx(), of._object_ctx


_make_printable = codeutils.to_printable


def _printable(trace: Any, value: Any, **contexts: Any) -> Any:
    """Python's own constants, and no arguments, are printed as they are."""
    if type(value) in (NoneType, bool, int, float, str) or (type(value) is dict and not value):
        return value
    return _make_printable(trace, value, **contexts)


_drop_duplicates = transform_common.remove_duplicate_number_proxies


def _without_duplicate_numbers(symbols: Any) -> Any:
    """Copies of those with results, with what is known of the originals."""
    if any(
        isinstance(each, proxies.NumberProxy) or of.sym._bind_postprocess for of in symbols for each in of.flat_outs
    ):
        return _drop_duplicates(symbols)
    kept = []
    for of in symbols:
        if of.flat_outs:
            kept.append(copied := object.__new__(type(of)))
            vars(copied).update(vars(of), tags={*of.tags})
    return kept


def _drop_empty(of: Any) -> None:
    """Drops what a symbol has inside that does nothing. Thunder gathers the tags of the whole for each of them."""
    kept = []
    for inner in of.subsymbols:
        if not inner.subsymbols and not inner.sym.is_prim:
            continue
        if inner.flat_proxy_outs or symbol.has_tags(of, {prims.OpTags.DONT_DCE}):
            _drop_empty(inner)
            kept.append(inner)
    of.subsymbols = kept


class _Symbols(list[Any]):
    """Finds a symbol by what it is. Thunder compares it with one after the other."""

    def __init__(self, symbols: Any) -> None:
        super().__init__(symbols)
        self._ids = {*map(id, self)}

    def __contains__(self, each: object) -> bool:
        return id(each) in self._ids


_init_region = Region.__init__


def _make_region(self: Any, producers: Any, consumers: Any, bound_symbols: Any) -> None:
    _init_region(self, producers, consumers, _Symbols(bound_symbols))
