"""Has Thunder check the containers that a function reads, where something of ours is compiled.

Thunder (0.2.6) traces what the Python code does with a list or a dict, and then checks only the items that are read.
With other items, such as one more in a list, or a key that was missing, it would run the trace of the first call.
What is added to the prologue is one check for each container that the code looks at as a whole: of its length, of the
keys of a dict, of the items of what Python itself looks into, such as a set of names. Then other items compile anew.
So do another dtype, function or number of NumPy, and a value in the place of None. So do another process group, device
mesh or reduction, wherever the code finds it: Thunder would communicate in the group of the first call.

A container that the code changes gets no check: Thunder changes it while it traces, and in no call.
"""

from __future__ import annotations

import datetime
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, EllipsisType, FunctionType, MappingProxyType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from thunder.core import interpreter, jit_ext
from thunder.core.compile_data import _compile_data
from thunder.core.interpreter import (
    INTERPRETER_CALLBACKS,
    InterpreterCompileCtx,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
)
from thunder.core.jit_ext import EXT_FLAG_IS_MODULE, general_jit_callbacks, get_jit_ctx, should_register_for_prologue
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy
from thunder.extend import OperatorExecutor, register_executor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from thunder_cg.compat.compilation import note_call, note_lost
from thunder_cg.compat.distributed import is_alive
from thunder_cg.compat.thunder import is_ours

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_LITERALS = (str, int, float, bool, NoneType)
# Values that a program may depend on, and that it does not change.
_OF_COLLECTIVES = (ProcessGroup, DeviceMesh, ReduceOp.RedOpType)
CONSTANTS = (
    *(NoneType, FunctionType, BuiltinFunctionType, type, Enum, EllipsisType, np.generic),
    *(bytes, range, Decimal, Fraction, PurePath),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *_OF_COLLECTIVES,
)
_OF_MODULES = frozenset(dir(torch.nn.Module()))  # which Thunder reads and writes in ways of its own
_OF_TORCH = {id(each) for each in vars(torch.nn.modules.module).values() if isinstance(each, _CONTAINERS)}  # hooks
_OF_TORCH.add(id(torch.types.py_sym_types))  # which Thunder looks through in each reshape
_CLOCKS = frozenset({"now", "today", "utcnow", *(name for name in vars(time) if "time" in name or "counter" in name)})
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "warn": 30, "error": 40, "exception": 40, "critical": 50, "log": 0}
_LOGS = {vars(logging.Logger)[name]: level for name, level in _LEVELS.items()}  # methods that log, and their levels
_READING = {"__copy__", "fromkeys"}.union(*map(dir, (tuple, frozenset, MappingProxyType))) - {"__ior__"}
_CHANGING = frozenset().union(*map(dir, (list, dict, set, deque))) - _READING  # names of methods
_is_built = torch.distributed.is_available  # which Thunder asks itself in each reshape: it says nothing of any group
_populate: Callable[[WrappedValue], None] = interpreter.populate_item_wrappers
_look_aside = InterpreterCompileCtx.lookaside
_compare = interpreter._default_opcode_handler_map["COMPARE_OP"]
_update = interpreter._default_opcode_handler_map["DICT_UPDATE"]
_wrap = interpreter.wrap
_propagate = jit_ext.propagate_constraints
_wrapped = general_jit_callbacks[INTERPRETER_CALLBACKS.WRAP_CALLBACK]


_executor = register_executor(OperatorExecutor("cudagraph_containers"))  # traces are pickled by its name


def _registered(check: Callable[..., None]) -> Any:
    """The symbol of a check in prologues."""
    return _executor.register_operator(check.__name__, meta=lambda *args: None, fn=check, tags=(OpTags.DONT_DCE,))


@_registered
def check_length(container: Any, length: int) -> None:
    if len(container) != length:
        raise RuntimeError(f"Expected {length} items, got {len(container)}")


@_registered
def check_keys(container: Any, keys: tuple[str, ...]) -> None:
    if (*container,) != keys:
        raise RuntimeError(f"Expected the keys {keys}, got {(*container,)}")


@_registered
def check_items(container: Any, items: tuple[Any, ...]) -> None:
    found = _items(container)
    if found != items or [*map(type, found)] != [*map(type, items)]:  # 1 is True
        raise RuntimeError(f"Expected the items {items}, got {found}")


def _items(container: Any) -> tuple[Any, ...]:
    """Its items, or the keys of a dict; those of a set in one order."""
    return tuple(sorted(container, key=repr)) if isinstance(container, (set, frozenset)) else (*container,)


class _Held:
    """A constant that Thunder's printer would take apart."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def expected_constant(arg: Any) -> Any:
    """What a check of a constant expects, given its argument."""
    return arg.value if isinstance(arg, _Held) else arg


@_registered
def check_constant(value: Any, arg: Any) -> None:
    expected = expected_constant(arg)
    if value is not expected and (type(value) is not type(expected) or essence(value) != essence(expected)):
        raise RuntimeError(f"Expected {expected}, got {value}")


@_registered
def check_group(group: ProcessGroup) -> None:
    if not is_alive(group):
        raise RuntimeError("The process group has been destroyed")


def essence(constant: Any) -> Any:
    """What is compared. A function may be made anew for each call, and what it closes over, Thunder checks."""
    if isinstance(constant, np.generic):
        return constant.tobytes()  # NaN is NaN
    if not isinstance(constant, FunctionType):
        return constant
    defaults = (*(constant.__defaults__ or ()), *(constant.__kwdefaults__ or {}).values())
    kept = tuple((type(d), d if isinstance(d, (*_LITERALS, *CONSTANTS)) else id(d)) for d in defaults)
    return constant.__code__, kept


@_registered
def check_kind(value: Any, kind: str | _Held) -> None:
    if _kind(value) != kind:
        raise RuntimeError(f"Expected another type than {type(value)}")


def _kind(value: Any) -> str | _Held:
    """Its type: by name, if that is one of Python's own."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else _Held(kind)


@_registered
def check_has(value: Any, name: str, has: bool) -> None:
    if _has(value, name) is not has:
        raise RuntimeError(f"Expected {name} to be {'an' if has else 'no'} attribute")


def _has(value: Any, name: str) -> bool:
    """Whether it has the attribute, without running any code of the user's."""
    return name in getattr(value, "__dict__", ()) or hasattr(type(value), name)


_CHECKS = (check_length, check_keys, check_items)
CHECKS_OF_CONTAINERS = frozenset(each.name for each in _CHECKS)


def _is_callers(value: WrappedValue) -> bool:
    """Whether it is a container from outside of what is traced, and something of ours is compiled."""
    provenance = value.provenance
    if not isinstance(value.value, _CONTAINERS) or id(value.value) in _OF_TORCH:
        return False
    if not _is_looked_up_by_prologue(provenance) or _is_pythons_or_modules(provenance):
        return False
    return is_ours(_compile_data.get()[0])


def _is_looked_up_by_prologue(provenance: ProvenanceRecord) -> bool:
    """Whether a prologue can find it: Thunder raises for an item of a key such as None, and for its own constants."""
    return should_register_for_prologue(provenance) and _keys_are_simple(provenance)


def _keys_are_simple(provenance: ProvenanceRecord) -> bool:
    if provenance.inst is PseudoInst.CONSTANT:
        return isinstance(provenance.value, (int, str))
    return all(map(_keys_are_simple, provenance.inputs))


def _is_pythons_or_modules(provenance: Any) -> bool:
    """Whether it is an attribute that each module or function has, such as a module's hooks or a function's globals."""
    if provenance.inst is not PseudoInst.LOAD_ATTR:
        return False
    owner, name = provenance.inputs
    is_module = bool(owner.ext_flag & EXT_FLAG_IS_MODULE)
    return name.value in _OF_MODULES if is_module else str(name.value).startswith("__")


def _path(provenance: Any) -> tuple[Any, ...]:
    """The look-ups that lead to a value: that of the same value is the same."""
    return provenance.inst, provenance.value, *map(_path, provenance.inputs)


def _is_of_call(provenance: Any) -> bool:
    """Whether it is an argument, an item of one, or an attribute of one or of a module, or of such an attribute."""
    if provenance.inst is PseudoInst.LOAD_ATTR:
        owner, name = provenance.inputs
        if owner.ext_flag & EXT_FLAG_IS_MODULE:
            return not _is_pythons_or_modules(provenance)
        return not str(name.value).startswith("__") and _is_of_call(owner)
    return _is_in_arguments(provenance)


def _is_in_arguments(provenance: Any) -> bool:
    """Whether it is an argument, or an item of one."""
    while provenance.inst is PseudoInst.BINARY_SUBSCR:
        provenance = provenance.inputs[0]
    return provenance.inst in (PseudoInst.INPUT_ARGS, PseudoInst.INPUT_KWARGS)


def _is_variable(provenance: Any) -> bool:
    """Whether it is a global, a variable of a closure, or an attribute that not every module or function has."""
    if provenance.inst is PseudoInst.LOAD_ATTR:
        return not _is_pythons_or_modules(provenance)
    owner = provenance.inputs[0] if provenance.inputs else provenance
    return owner.inst is PseudoInst.LOAD_ATTR and owner.inputs[1].value == "__globals__"


def _is_in_variable(provenance: Any) -> bool:
    """Whether it is a variable, or an item of one."""
    is_item = provenance.inst is PseudoInst.BINARY_SUBSCR
    return _is_variable(provenance) or (is_item and _is_in_variable(provenance.inputs[0]))


def _proxy(value: Any, provenance: ProvenanceRecord) -> AnyProxy:
    """Of what is checked. Thunder would take ``any0`` for what the function returns of its arguments as it is."""
    return AnyProxy(value, prefix="checked", history=provenance)


def _check_constant_at(value: Any, provenance: ProvenanceRecord) -> None:
    """Has the prologue check None, a dtype, a function and the like, as an argument or an attribute of a module.

    Thunder takes them for what they were when it traced. None is checked in any variable and item of one, and others
    if the code communicates after it has found them.
    """
    if not isinstance(value, CONSTANTS) or not _is_looked_up_by_prologue(provenance):
        return
    if not isinstance(getattr(value, "__self__", None), (NoneType, ModuleType, type)):
        return  # a method, which each look-up makes anew
    is_checked = isinstance(value, _OF_COLLECTIVES) or _is_of_call(provenance)
    if not is_checked and not _is_in_variable(provenance):
        return
    is_checked = is_checked or value is None
    if is_ours(_compile_data.get()[0]) and not _is_known(_path(provenance)):
        arg = _Held(value) if isinstance(value, (bytes, range, type)) else value
        _add_check(is_checked, check_constant, value, provenance, arg)


def _check_argument_of_many(value: Any, provenance: ProvenanceRecord) -> None:
    """Has the prologue check the type of a number, and a bool, string or slice, if ``cache="symbolic values"``.

    Thunder checks nothing of them then, and a branch is that of the first call. It has symbols for numbers alone.
    """
    if type(value) not in (bool, str, slice, int, float, complex) or not _is_in_arguments(provenance):
        return
    data = _compile_data.get()[0]
    is_symbolic = is_ours(data) and data.cache_option is CACHE_OPTIONS.SYMBOLIC_VALUES
    if not is_symbolic or not _is_looked_up_by_prologue(provenance) or _is_known((_path(provenance), "symbolic")):
        return
    if type(value) in (int, float, complex):
        _add_check(True, check_kind, value, provenance, _kind(value))
    else:
        _add_check(True, check_constant, value, provenance, _Held(value) if type(value) is slice else value)


def _add_check(is_sure: bool, check: Any, value: Any, provenance: ProvenanceRecord, *expected: Any) -> None:
    """Has the prologue make a check; if not ``is_sure``, only if the code communicates: see `_check_constant_at`."""
    if is_sure:
        get_jit_ctx().add_constraint((check, _proxy(value, provenance), *expected))
    else:  # a proxy would take a name
        _of_groups().append(partial(_add_check, True, check, value, provenance, *expected))


def _of_groups() -> list[Callable[[], None]]:
    """What adds the checks that a group may depend on."""
    checks: list[Callable[[], None]] = vars(get_jit_ctx()).setdefault("cudagraph_of_groups", [])
    return checks


def _propagate_and_drop(context: Any, *args: Any) -> Any:
    """Drops checks of what the code itself has changed, as it makes a global once: no call would pass them."""
    function = context.prologue_trace.fn

    def holds(check: Any, value: Any, *expected: Any) -> bool:
        if check is not check_constant:
            return True
        try:
            now = _value_at(value.history, function)
        except Exception:  # it is an argument, or code of the user's looks it up
            return True
        return essence(now) == essence(expected_constant(*expected))

    context._constraints = [each for each in context._constraints if holds(*each)]
    return _propagate(context, *args)


def _value_at(provenance: Any, function: Any) -> Any:
    """What the look-ups find now that began with the function."""
    if provenance.inst is PseudoInst.INPUT_FN:
        return function
    if provenance.inst is PseudoInst.CONSTANT:
        return provenance.value
    owner, key = (_value_at(each, function) for each in provenance.inputs)
    return getattr(owner, key) if provenance.inst is PseudoInst.LOAD_ATTR else owner[key]


def _is_known(check: Any) -> bool:
    """Whether the prologue has this check; the next time, it has."""
    known: set[Any] = vars(get_jit_ctx()).setdefault("cudagraph_known", set())
    if check in known:
        return True
    known.add(check)
    return False


def check_group_of_collective(group: ProcessGroup) -> None:
    """Has the prologue check that a group, which a collective takes by default or by its name, has not been destroyed.

    Another group that is made then may be the default one, or have the name.
    """
    with suppress(LookupError):  # thunderfx asks first what Thunder would trace, and there is no prologue
        if is_alive(group):
            get_jit_ctx().add_constraint((check_group, group))


def _check_if_constant(value: WrappedValue) -> Any:
    _check_argument_of_many(value.value, value.provenance)
    wrapped = _wrapped(value)  # which has an attribute of a module looked up as such
    _check_constant_at(value.value, value.provenance)
    return wrapped


def _wrap_and_check(value: Any, /, *, provenance: ProvenanceRecord) -> WrappedValue:
    """Thunder knows an object by its first look-up alone. The next one may find another object in a later call."""
    wrapped = _wrap(value, provenance=provenance)
    if wrapped is not value and getattr(wrapped, "provenance", provenance) is not provenance:
        _check_constant_at(value, _as_attribute(provenance))
    return wrapped


def _as_attribute(provenance: ProvenanceRecord) -> ProvenanceRecord:
    """Of ``module.__dict__["name"]`` that of ``module.name``, as Thunder has it."""
    if provenance.inst is PseudoInst.BINARY_SUBSCR and provenance.inputs[0].inst is PseudoInst.LOAD_ATTR:
        (module, attribute), name = provenance.inputs[0].inputs, provenance.inputs[1]
        if module.ext_flag & EXT_FLAG_IS_MODULE and attribute.value == "__dict__":
            return ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[module, name], ext_flag=provenance.ext_flag)
    return provenance


def check_container(value: WrappedValue, *, of_python: bool = False) -> None:
    """Has the prologue check a container of the caller's as it is now.

    Args:
        of_python: Python itself looks at the items, so Thunder sees none of them.
    """
    if getattr(value, "is_settled", False) or not _is_callers(value):
        return
    value.is_settled = True  # Thunder wraps, and so checks, each literal in what it tracks the items of
    container, items = value.value, _items(value.value)
    proxy = _proxy(container, value.provenance)
    is_dict = isinstance(container, dict)
    if is_dict and all(type(item) is str for item in items):
        constraint: tuple[Any, ...] = check_keys, proxy, items
    elif (of_python or is_dict) and all(type(item) in _LITERALS for item in items):
        constraint = check_items, proxy, items
    else:
        constraint = check_length, proxy, len(items)
    get_jit_ctx().add_constraint(constraint)


def _forget_check(value: WrappedValue) -> None:
    """No prologue can check what the code changes."""
    value.is_settled = True
    context = get_jit_ctx()
    context._constraints = [
        each for each in context._constraints if each[0] not in _CHECKS or each[1].history is not value.provenance
    ]


def _populate_and_check(value: WrappedValue) -> None:
    if not value.has_item_tracking:
        check_container(value)
    _populate(value)


def _check_looks(fn: Any, value: WrappedValue, *names: Any) -> None:
    """Has the prologue check what ``isinstance``, ``hasattr`` and ``getattr`` with a default say of an argument.

    Thunder takes a container or an object of the user's for what it was when it traced. The type of what a module owns
    is checked only where the code asks for it. The interpreter looks for ``__dict__`` and the like by itself.
    """
    provenance, is_container = value.provenance, isinstance(value.value, _CONTAINERS)
    if isinstance(value.value, TensorProxy) and fn is not isinstance and _is_hidden(value, names[0].value):
        note_lost("absent", f"{fn.__name__}(tensor, {names[0].value!r})")
    if isinstance(value.value, (*_LITERALS, *CONSTANTS, Proxy, torch.Tensor, torch.nn.Module)):
        return
    name = None if fn is isinstance or is_container else names[0].value
    is_asked = not is_container and not str(name).startswith("__")
    if not is_asked and provenance.inst is not PseudoInst.BINARY_SUBSCR:  # no argument, and no item of one
        return
    is_of_call = _is_of_call(provenance)
    if not (is_of_call or _is_in_variable(provenance)) or not _is_looked_up_by_prologue(provenance):
        return
    if is_ours(_compile_data.get()[0]):
        if not _is_known((_path(provenance), "kind")):
            _add_check(is_of_call, check_kind, value.value, provenance, _kind(value.value))
        if is_asked and isinstance(name, str) and not _is_known((_path(provenance), "has", name)):
            _add_check(is_of_call, check_has, value.value, provenance, name, _has(value.value, name))


def _is_hidden(value: WrappedValue, name: Any) -> bool:
    """Whether the tensor has the attribute, and what Thunder has in its place has none."""
    if str(name).startswith("__") or not is_ours(_compile_data.get()[0]) or hasattr(value.value, name):
        return False
    return _has(value.original_value, name) or hasattr(torch.Tensor, name)


def _look_aside_and_check(self: InterpreterCompileCtx, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What Thunder calls in the place of ``fn``; None if Python calls it, or Thunder follows it."""
    is_wrapped = bool(args) and isinstance(args[0], WrappedValue)
    if is_wrapped and (fn in (isinstance, hasattr) or (fn is getattr and len(args) == 3)):
        _check_looks(fn, *args)
    if is_wrapped and issubclass(getattr(fn, "__objclass__", NoneType), _CONTAINERS):
        _check_method(fn, *args)
    elif (name := _called_once(fn, *map(interpreter.unwrap, args[:1]))) is not None and is_ours(_compile_data.get()[0]):
        note_call(name)
    is_of_groups = str(getattr(fn, "__module__", None)).startswith("torch.distributed") and fn is not _is_built
    if is_of_groups and is_ours(_compile_data.get()[0]):
        while _of_groups():
            _of_groups().pop()()
    if isinstance(fn, FunctionType) and fn in _LOGS and is_ours(_compile_data.get()[0]):
        return partial(_log, fn)
    result = _look_aside(self, fn, *args, **kwargs)
    if result is None and interpreter.is_opaque(fn):
        for each in args:
            if isinstance(each, WrappedValue) and isinstance(each.value, _CONTAINERS):
                check_container(each, of_python=True)
    return result


def _check_method(method: Any, container: WrappedValue, *args: Any) -> None:
    """For a method of a container that changes it, or that looks up a key that a dict does not have."""
    name = method.__name__
    if name in _CHANGING and _is_callers(container):
        _forget_check(container)
        note_lost("changes", f"{method.__objclass__.__name__}.{name}")
    elif name == "__getitem__" and isinstance(container.value, dict) and args[0].value not in container.value:
        check_container(container)


def _log(method: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
    """Logs while Thunder traces, and in no call. Thunder would take what loggers keep for changes of the user's."""
    logger, *rest = map(interpreter.unwrap, args)
    if logger.isEnabledFor(rest[0] if method is logging.Logger.log else _LOGS[method]):
        note_call(f"logging.Logger.{method.__name__}")
        method(logger, *rest, **{name: interpreter.unwrap(value) for name, value in kwargs.items()})
    return interpreter.wrap_const(None)


def _called_once(fn: Any, owner: Any = None) -> str | None:
    """The name of a builtin function that should run in each call: a clock, a generator of Python's numbers, print.

    Args:
        owner: the first argument, as Thunder passes a method its object.
    """
    if fn is print:
        return "print"
    module = getattr(fn, "__self__", None)
    if module is time or module is datetime.date or module is datetime.datetime:
        return f"{module.__name__}.{fn.__name__}" if fn.__name__ in _CLOCKS else None
    if isinstance(owner, _GENERATORS) and not isinstance(fn, FunctionType):
        name = str(getattr(fn, "__name__", "__"))
        is_method = not name.startswith("__") and hasattr(owner, name)
        return f"{'random' if isinstance(owner, random.Random) else 'numpy.random'}.{name}" if is_method else None
    return None


def _compare_and_check(inst: Any, /, stack: Any, **state: Any) -> Any:
    """Python compares containers, and Thunder sees none of the items."""
    for operand in (stack.getitem_wrapped(-2), stack.getitem_wrapped(-1)):
        if isinstance(operand, WrappedValue) and _is_callers(operand):
            if isinstance(operand.value, (list, tuple, dict)):
                _populate_and_check(operand)
            else:
                check_container(operand, of_python=True)
    return _compare(inst, stack=stack, **state)


def _update_and_check(inst: Any, /, stack: Any, **state: Any) -> Any:
    """For ``{**other}``. Thunder takes the items without noting where they come from."""
    if not is_ours(_compile_data.get()[0]) or type(stack.getitem_wrapped(-1).value) is not dict:
        return _update(inst, stack=stack, **state)
    other = stack.pop_wrapped()
    check_container(other)
    return interpreter.check_signal(interpreter._interpret_call(dict.update, stack.getitem_wrapped(-inst.arg), other))


interpreter.populate_item_wrappers = _populate_and_check
interpreter._default_opcode_handler_map["COMPARE_OP"] = _compare_and_check
interpreter._default_opcode_handler_map["DICT_UPDATE"] = _update_and_check
interpreter.wrap = _wrap_and_check
general_jit_callbacks[INTERPRETER_CALLBACKS.WRAP_CALLBACK] = _check_if_constant
jit_ext.propagate_constraints = _propagate_and_drop
InterpreterCompileCtx.lookaside = _look_aside_and_check
