"""What code names: global variables, those of closures, imports and attributes of them, found in its bytecode."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

_OF_TWO = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
_LOCALS = {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"}
_ONE_VALUE = {"LOAD_CONST", *_LOCALS}
_VARIABLES = {"LOAD_GLOBAL", "LOAD_DEREF", *_LOCALS}
_LOADS = {"LOAD_ATTR", "LOAD_CONST", *_VARIABLES}
_STORES = {"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR"}
ADDED_TO = "+="  # in the place of an attribute: the code only adds to what the names before it lead to
_GROUPS = "param_groups"
PARAMETERS = f"{_GROUPS}[...]['params']"  # in the place of an attribute: the code takes nothing else of the groups
_ADDS = {"+=", "-=", "+", "-", "INPLACE_ADD", "INPLACE_SUBTRACT", "BINARY_ADD", "BINARY_SUBTRACT"}
GROWS = {"append", "extend"}
_LOOKUPS = {"LOAD_ATTR", "LOAD_METHOD"}
_ATTRIBUTES = {*_LOOKUPS, "STORE_ATTR"}
_ITEM = ["LOAD_CONST", "BINARY_SUBSCR"]
# By how many values these make the stack deeper. What is called, and a method with its object, count as one.
_EFFECTS = {**dict.fromkeys(_VARIABLES | {"LOAD_CONST"}, 1), **dict.fromkeys(_LOOKUPS, 0), "BINARY_SUBSCR": -1}
_DEEPEST = 1000  # no stack is that deep
_COPIES = {"COPY", "DUP_TOP", "DUP_TOP_TWO"}
_BEGIN_OF_LIST = {"LOAD_FAST_AND_CLEAR", "SWAP", "BUILD_LIST", "BUILD_SET", "BUILD_MAP"}  # of a comprehension
_READ_VARIABLES = {"dir", "eval", "exec", "locals", "vars"}
_NEUTRAL = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", *_COPIES}  # what was loaded last stays on top of the stack


@dataclass(frozen=True, slots=True)
class Item:
    """In the place of an attribute: what a dictionary has by a key that is written in the code."""

    key: Any
    method: str = ""  # by which it is looked up


@dataclass(frozen=True, slots=True)
class Chain:
    """A name in a code object, and attributes of its value: ``self.cfg.scale``."""

    scope: str  # "global", "cell", "local" or "import"
    name: str
    attributes: tuple[Any, ...] = ()  # names, or an `Item`

    def attribute(self, name: Any) -> Chain:
        return replace(self, attributes=(*self.attributes, name))


@cache
def chains(code: types.CodeType) -> Mapping[Chain, int]:
    """What the code and the functions in it load or store, in the order of the code, each with a line.

    It is the first one that names it and stores an attribute, an item or a variable, if one does, else the first one.
    Of ``cfg = self.cfg; return cfg.scale * a.b`` it is ``self.cfg``, ``self.cfg.scale`` and the attribute ``b`` of the
    global ``a``; of ``from a.b import c`` the attribute ``c`` of the module ``a.b``.
    """
    lines: dict[Chain, list[int]] = {}
    for chain, line in _own_chains(code):
        lines.setdefault(chain, []).append(line)
    for chain, line in _chains_of_inner(code):
        lines.setdefault(chain, [line])
    stores = {line for name, _, line, _ in instructions(code) if name in _STORES}
    return {chain: next((line for line in each if line in stores), each[0]) for chain, each in lines.items()}


def _own_chains(code: types.CodeType) -> Iterator[tuple[Chain, int]]:
    """The chains of a code without the functions in it, each time with the line of the last name."""
    aliases: dict[str, Chain | None] = {}  # variables of the function that stand for a chain; None: for several
    chain: Chain | None = None  # what the last instructions have named
    imported: Chain | None = None  # what the names after IMPORT_FROM are attributes of
    line, is_dotted, each_of = code.co_firstlineno, False, [*instructions(code)]
    takes_params = taking_parameters(code)
    for i, (name, value, now, at) in enumerate(each_of):
        if name in _ATTRIBUTES and chain is not None:
            chain, line = chain.attribute(PARAMETERS if at in takes_params else value), now
            if name != "STORE_ATTR":
                continue
        names_module = chain is not None and chain.scope == "import" and not chain.attributes
        if chain is not None and not (names_module and name in ("IMPORT_FROM", "STORE_FAST")):
            yield chain, line  # a name for a whole module reads nothing of it
        if name == "STORE_FAST":
            aliases[value] = None if value in aliases else chain
        if value == "super" and "__class__" in code.co_freevars and code.co_argcount:  # it finds the first argument
            yield Chain("local", code.co_varnames[0]), now
        line = now
        if name == "IMPORT_NAME":
            level, names = (each.value for each in each_of[i - 2 : i])
            chain = imported = Chain("import", "." * level + value if names else value.partition(".")[0])
            is_dotted = not names
        elif name == "IMPORT_FROM" and imported is not None:
            chain = imported.attribute(value)
            imported = chain if is_dotted else imported  # of ``import a.b as c``
        else:
            chain = _begun(name, value, aliases)
        if chain is not None and name in ("STORE_GLOBAL", "STORE_DEREF"):
            yield chain, line
            chain = None
    if chain is not None:
        yield chain, line


def _chains_of_inner(code: types.CodeType) -> Iterator[tuple[Chain, int]]:
    """The chains of functions in a code that begin outside of that, or with its first argument."""
    for inner in code.co_consts:
        for chain, line in chains(inner).items() if isinstance(inner, types.CodeType) else ():
            if chain.scope in ("global", "import") or (chain.scope == "cell" and chain.name in code.co_freevars):
                yield chain, line
            elif chain.scope == "cell" and chain.name in code.co_varnames[:1]:
                yield replace(chain, scope="local"), line


def _begun(name: str, value: Any, aliases: dict[str, Chain | None]) -> Chain | None:
    """The chain that an instruction begins, if it loads or stores a variable."""
    if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL"):
        return Chain("global", value)
    if name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "STORE_DEREF"):
        return Chain("cell", value)
    if name in _LOCALS:
        return aliases.get(value) or Chain("local", value)
    return None


@cache
def growing(code: types.CodeType) -> Set[int]:
    """Where the code looks an attribute up, or stores it, only to add to it: see Note [What only grows]."""
    offsets: set[int] = set()
    each_of = [*instructions(code)]
    for before, each in pairwise(each_of):
        if each.value == ADDED_TO and before.name == "LOAD_ATTR" and not isinstance(before.value, Item):
            rest = each_of[each_of.index(before) :]
            offsets.update([before.offset, next(x.offset for x in rest if x.name == "STORE_ATTR")])
        elif each.name in _LOOKUPS and each.value in GROWS and before.name == "LOAD_ATTR":
            offsets.add(before.offset)
    return offsets


@cache
def taking_parameters(code: types.CodeType) -> Set[int]:
    """Where the code looks ``param_groups`` up, and takes nothing but ``["params"]`` of each group."""
    each_of = [*instructions(code)]
    if any(each.name in ("LOAD_GLOBAL", "LOAD_NAME") and each.value in _READ_VARIABLES for each in each_of):
        return frozenset()
    found = (i for i, each in enumerate(each_of) if each.name == "LOAD_ATTR" and each.value == _GROUPS)
    return {each_of[i].offset for i in found if _takes_parameters(each_of, i + 1)}


def _takes_parameters(each_of: list[_Instruction], i: int) -> bool:
    """Whether the code at a position, which has found groups, takes only these, of one group or in a loop."""
    if each_of[i].name != "GET_ITER":
        return _names(each_of[i : i + 2]) == _ITEM and _is_parameters(each_of, i + 2)
    if each_of[i + 1].name.startswith("CALL"):  # of a comprehension, whose first loop is over ``.0``
        before = each_of[:i]
        while before and before[-1].name in _LOADS:
            before.pop()
        made = next((each.value for each in reversed(before) if isinstance(each.value, types.CodeType)), None)
        if made is None or not before[-1].name.endswith(("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE")):
            return False
        each_of = [*instructions(made)]
        i = next(n for n, each in enumerate(each_of) if each.value == ".0")
    i = next(n for n in range(i + 1, len(each_of)) if each_of[n].name not in _BEGIN_OF_LIST)
    if _names(each_of[i : i + 2]) != ["FOR_ITER", "STORE_FAST"]:
        return False
    group = each_of[i + 1].value
    uses = (n for n, each in enumerate(each_of) if each.name in _LOCALS and each.value == group)
    return all(_is_parameters(each_of, n + 1) for n in uses)


def _is_parameters(each_of: list[_Instruction], i: int) -> bool:
    return _names(each_of[i : i + 2]) == _ITEM and each_of[i].value == "params"


@cache
def variable_passed(code: types.CodeType, call: int) -> str:
    """The variable of a function that is the last argument of the call at an offset; "" if that is something else."""
    last = [each for each in _decoded(code)[0] if each.offset < call][-1]
    return str(last.value) if last.name in _LOCALS else ""


@cache
def sets_variables(code: types.CodeType) -> bool:
    """Whether the code, or a function in it, sets a variable of the function around it."""
    inner = any(isinstance(each, types.CodeType) and sets_variables(each) for each in code.co_consts)
    stores = (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF")
    return inner or not {*code.co_freevars}.isdisjoint(stores)


class _Instruction(NamedTuple):
    name: str
    value: Any
    line: int
    offset: int


def instructions(code: types.CodeType) -> Iterator[_Instruction]:
    """The names and arguments of the instructions, with their lines.

    Those that only append or add to something are lookups of an `Item` or `ADDED_TO`: see Note [What only grows].
    """
    listing, copied = _decoded(code)
    i = 0
    while i < len(listing):
        rewritten = (rewrite(listing, i, copied) for rewrite in _REWRITES.get(listing[i].name, ()))
        new, i = next(filter(None, rewritten), ([listing[i]], i + 1))
        yield from new


def _decoded(code: types.CodeType) -> tuple[list[_Instruction], set[int]]:
    """The instructions, without what moves only the stack, and which of them follow a copy of what is on top of it.

    Python 3.13 has one instruction for two variables, which are two here.
    """
    starts, line = dict(dis.findlinestarts(code)), code.co_firstlineno
    listing: list[_Instruction] = []
    copied: set[int] = set()
    before = ""
    for each in dis.get_instructions(code):
        line = starts.get(each.offset) or line
        names = _OF_TWO.get(each.opname)
        if before in _COPIES:
            copied.add(len(listing))
            if listing and listing[-1].name == "INPLACE_ADD":  # the sum is read, too, as i is in ``x.n = i = x.n + 1``
                listing[-1] = listing[-1]._replace(name=before)
        before = each.opname if each.opname not in ("CACHE", "EXTENDED_ARG") else before
        for name, value in ((each.opname, each.argval),) if names is None else zip(names, each.argval):
            if name not in _NEUTRAL:
                name = "INPLACE_ADD" if not _ADDS.isdisjoint((name, each.argrepr)) else name
                listing.append(_Instruction(name, value, line, each.offset))
    return listing, copied


_Rewritten = tuple[list[_Instruction], int] | None  # what stands for some instructions, and where the next ones begin


def _names(listing: list[_Instruction]) -> list[str]:
    return [each.name for each in listing]


def _is_lookup(instruction: _Instruction, names: Set[str]) -> bool:
    return instruction.name in _LOOKUPS and instruction.value in names


def _grown_item(listing: list[_Instruction], i: int, _: Set[int]) -> _Rewritten:
    """``["loss"].append``."""
    if _names(listing[i : i + 2]) != _ITEM or not _is_lookup(listing[i + 2], GROWS):
        return None
    return [listing[i]._replace(name="LOAD_ATTR", value=Item(listing[i].value))], i + 2


def _made_list(listing: list[_Instruction], i: int, _: Set[int]) -> _Rewritten:
    """``.setdefault("loss", []).append``."""
    if not _is_lookup(listing[i], {"setdefault"}) or _names(listing[i + 1 : i + 3]) != ["LOAD_CONST", "BUILD_LIST"]:
        return None
    key, items, call, grows = listing[i + 1 : i + 5]
    if items.value or not call.name.startswith("CALL") or not _is_lookup(grows, GROWS):
        return None
    return [listing[i]._replace(name="LOAD_ATTR", value=Item(key.value, "setdefault"))], i + 4


def _added_to_variable(listing: list[_Instruction], i: int, _: Set[int]) -> _Rewritten:
    """``n += 1``, ``n = n + size`` or ``n += x.size(0)``."""
    load, store = listing[i], listing[i].name.replace("LOAD_", "STORE_")
    added = next((n for n in range(i + 1, len(listing)) if listing[n].name in ("INPLACE_ADD", *_STORES)), len(listing))
    ends = [(each.name, each.value) for each in listing[added + 1 : added + 2]]
    if ends != [(store, load.value)] or not _is_one_value(value := listing[i + 1 : added]):
        return None
    return [load, load._replace(name="LOAD_ATTR", value=ADDED_TO), *value], added + 2


def _is_one_value(listing: list[_Instruction]) -> bool:
    """Whether these leave one value on the stack, and reach for nothing below it."""
    depth = 0
    for name, value, *_ in listing:
        depth += -value if name.startswith("CALL") and isinstance(value, int) else _EFFECTS.get(name, -_DEEPEST)
        if depth < 1:
            return False
    return depth == 1


def _added_to(listing: list[_Instruction], i: int, copied: Set[int]) -> _Rewritten:
    """``.n += 1``; or ``.n + 1`` in ``x.n = x.n + 1``, where the second ``x`` tells nothing more; so with ``["n"]``."""
    is_item = _names(listing[i : i + 2]) == _ITEM
    if not is_item and listing[i].name == "LOAD_CONST":
        return None
    load = listing[i]._replace(name="LOAD_ATTR", value=Item(listing[i].value)) if is_item else listing[i]
    added = load._replace(value=ADDED_TO)
    at, kind = i + is_item, "STORE_SUBSCR" if is_item else "STORE_ATTR"
    store = next((n for n in range(at, len(listing)) if listing[n].name == kind), None)
    if store is None or not (is_item or listing[store].value == load.value):
        return None
    if at in copied:  # of what has the attribute, for ``+=``
        last = next((each for each in reversed(listing[at:store]) if not each.name.startswith(("SWAP", "ROT_"))), load)
        return ([load, added], at + 1) if last.name == "INPLACE_ADD" else None
    value, add = listing[at + 1 : at + 3]
    again, start = [each[:2] for each in listing[at + 3 : store]], 2 * at + 3 - store
    before = [each[:2] for each in listing[max(0, start) : at]]
    if not again or again != before or value.name not in _ONE_VALUE or add.name != "INPLACE_ADD":
        return None
    # A property among the attributes might give two objects, which `_read` sees for items alone.
    is_known = again[0][0] in _VARIABLES and (is_item or len(again) == 1) and _LOADS.issuperset(dict(again))
    return ([load, added, value, add], store) if is_known else None


_REWRITES: Mapping[str, Sequence[Callable[[list[_Instruction], int, Set[int]], _Rewritten]]] = {  # by the first name
    "LOAD_CONST": (_grown_item, _added_to),
    "LOAD_ATTR": (_made_list, _added_to),
    "LOAD_METHOD": (_made_list,),
    "LOAD_GLOBAL": (_added_to_variable,),
    "LOAD_DEREF": (_added_to_variable,),
}
