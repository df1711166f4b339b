"""Why calls replay nothing although earlier calls were captured: what they bring that nothing was made for yet.

Note [Why nothing replays]
    Thunder compiles a version of a function for each shape of its inputs and each Python number, string and so on that
    its prologue checks. A version warms up and captures for each layout of its inputs: strides, alignment, settings of
    kernels. And a layout is captured again if a parameter has moved, or if its graphs were dropped for others. Each of
    these is a `CallChange`, which has its cost and what to do about it. All versions of a function share one `Changes`.
    The report has a line for each change. If more than `FEW` in a row came without a replay, so that nothing may ever
    replay, the log warns once of each, and ``strict=True`` raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunder_cg.compat.dynamo_records import BEFORE_BREAK
from thunder_cg.runtime.tensors import ALIGNMENT, Layout

Layouts = tuple[Mapping[str, Any], Mapping[str, Layout]]  # settings of kernels, and layouts of inputs, by name

FEW = 6  # changes in a row
VERSIONS = ("shape", "number", "attribute", "constant", "items")  # Thunder compiles for each value
_MOST_VALUES = 1024  # of one input that are kept
_SHOWN = 3
_ITEM = re.compile(r"(.+)\[\d+\]")
AFTER_BREAK = "change what ends the graph before it"

_NEW_VERSION = "each new {} compiles anew in Thunder{{took}}, warms up and captures"
_NEW_LAYOUT = "each new layout warms up and captures"
IF_CACHE = (
    "if it is a cache that grows, write it in place, into a buffer of its final size (README, Inference with a KV "
    'cache), as cache_implementation="static" of Transformers does'
)
OF_STATIC_CACHE = ".max_cache_len"  # by which names end
CACHE_LENGTH = (
    "have generate make all caches as long: give it max_length= in the place of max_new_tokens=, or the longest prompt "
    "first"
)
_IF_DROPOUT = "if it is the p of a dropout, x * (torch.rand_like(x) >= p) / (1 - p) takes a tensor"
_IF_BOUND = (
    "if it bounds a slice, x[i + torch.arange(n, device=...)] is x[i : i + n] for fixed n; if the length changes, "
    "compute with all elements, and mask the rest, as LitGPT does without input_pos_maxp1; if it is a size, use few "
    "values"
)
_IF_LAYERS = (
    "if several modules run this code in turn, as layers do, change what ends the graph between them, so that one "
    "graph has all; else "
)
_PAD = (
    "pad to a few sizes, and mask the padding in the loss, and in layers that mix positions, such as convolution, "
    "attention and normalization; if there are few shapes in all, nothing has to change: each pays once, and later "
    "calls with it replay"
)
_DROP_LAST = "if only the last batch differs, drop_last=True"
SIZES = ("shape", "size")
NEW_TOO_OFTEN = "its sizes or numbers are new in too many calls"
FEWER_SIZES = "pad to a few sizes, since what comes often has a graph"

# Of each kind: what differs, what that costs, and what to do about it. "{names}" are the inputs, "{first}" is one.
_KINDS = {
    "shape": ("{count} shapes of {names} so far ({shown})", _NEW_VERSION.format("shape"), "{pad}"),
    "number": (
        "{count} values of the Python number{s} {names} so far ({shown})",
        _NEW_VERSION.format("value"),
        "pass {names} as {a}0-dim tensor{s} on the device of the other inputs, torch.tensor({first}, device=...)"
        "{if_number}",
    ),
    BEFORE_BREAK: (
        "{count} values so far ({shown}) of a number from before the graph break",
        _NEW_VERSION.format("value"),
        f"{AFTER_BREAK}, whose line explain(fn) names",
    ),
    OF_STATIC_CACHE: (
        "{count} lengths of a static cache, {first}, so far ({shown})",
        _NEW_VERSION.format("length"),
        CACHE_LENGTH,
    ),
    "attribute": (
        "{count} values of the Python number{s} {names} so far ({shown})",
        _NEW_VERSION.format("value"),
        "make {names} {a}0-dim tensor{s} with register_buffer, written in place, such as with fill_ or add_{if_number}",
    ),
    "constant": (
        "{count} values of {names} so far ({shown})",
        _NEW_VERSION.format("value"),
        "if no operator needs {first}, such as a name, leave it out of what is compiled; else keep it to a few values",
    ),
    "items": (
        "{count} lengths or keys of {names} so far ({shown})",
        "each new one compiles anew in Thunder{took}, warms up and captures",
        f"keep the length and the keys of {{first}} as they are; {IF_CACHE}",
    ),
    "size": ("{count} sizes of {names} so far ({shown})", _NEW_LAYOUT, "{pad}"),
    "strides": ("{count} strides of {names} so far ({shown})", _NEW_LAYOUT, "pass {first}.contiguous()"),
    "alignment": (
        f"{{count}} alignments of {{names}} so far ({{shown}} bytes past a multiple of {ALIGNMENT})",
        f"{_NEW_LAYOUT}, since kernels are chosen by it",
        f"pass {{first}}.clone(), or cut it from a larger tensor at multiples of {ALIGNMENT} bytes",
    ),
    "layout": (
        "{count} kinds of {names} so far ({shown})",
        _NEW_LAYOUT,
        "pass {first}.clone(), made outside of torch.inference_mode",
    ),
    "settings": (
        "{count} values of {names} so far ({shown}), by which PyTorch chooses kernels",
        "each new one warms up and captures",
        "set it once, before the first call",
    ),
    "moved": (
        "{names} moved to another address, {times}",
        "the layout is captured again; what has moved in three captures is copied in at each call",
        "{if_layers}write to its memory, such as with copy_, instead of giving it new memory",
    ),
    "dropped": (
        "graphs were captured again, {times}, because {names} had dropped them for others",
        "calls come with {last} layouts in turn, and each new capture takes the place of another",
        "pass inputs of fewer layouts, such as x.contiguous(), or raise max_recordings to {last}",
    ),
    "budget": (
        "graphs were captured again, {times}, because {names} had dropped them for others",
        "each new capture takes the place of another",
        "raise memory_budget, or pass inputs of fewer layouts",
    ),
}


@dataclass(slots=True)
class CallChange:
    """What differs from call to call: the kind, which inputs, and their values so far.

    Attributes:
        names: of the inputs, as the user calls them; of dropped graphs, the option that bounds them.
        values: shapes, numbers, strides and so on, of all these inputs.
        times: calls that brought another value.
        seconds: that Thunder took to compile the last version because of it; 0.0 if it compiles none.
    """

    kind: str
    names: tuple[str, ...]
    values: dict[Any, None] = field(default_factory=dict)
    times: int = 0
    seconds: float = 0.0

    @property
    def problem(self) -> str:
        """What differs, and some of the values."""
        return self._filled(0)

    @property
    def cost(self) -> str:
        """What each new value costs."""
        return self._filled(1)

    @property
    def fix(self) -> str:
        """What to do about it."""
        return self._filled(2)

    def _filled(self, part: int) -> str:
        first, *others = self.names or ("",)
        names = f"{first} and {len(others):,} more" if len(others) > 1 else " and ".join(self.names)
        shown = [*map(_shown, self.values)]
        named = (name for name in (BEFORE_BREAK, OF_STATIC_CACHE) if self.kind == "number" and first.endswith(name))
        kind = next(named, self.kind)
        return _KINDS[kind][part].format(
            names=names,
            first=first,
            a="" if others else "a ",
            s="s" if others else "",
            shown=", ".join([*shown[:_SHOWN], *(["..."] * (len(shown) > _SHOWN))]),
            count=f"{len(self.values):,}",
            last=next(reversed(self.values), None),
            times="once" if self.times == 1 else f"{self.times:,} times",
            took=f" ({self.seconds:.2f} s)" if self.seconds else "",
            if_layers=_IF_LAYERS if first.startswith("self.") else "",  # Dynamo passes parameters as arguments
            pad=for_shapes(*zip(*self.values)) if self.kind in SIZES else "",
            if_number=for_numbers(value for values in self.values for value in values)
            if self.kind in ("number", "attribute")
            else "",
        )


def for_numbers(values: Iterable[Any]) -> str:
    """What to do about Python numbers that change where operators do not take a tensor, to follow what else to do."""
    numbers = [*values]
    if all(isinstance(each, int) for each in numbers):
        return f"; {_IF_BOUND}"
    return f"; {_IF_DROPOUT}" if all(isinstance(each, float) and 0 <= each < 1 for each in numbers) else ""


def for_shapes(*tensors: Sequence[Sequence[int]]) -> str:
    """What to do about the shapes of tensors that change: those of each tensor, in the order in which they came."""
    varying = [[(dim, all_) for dim, all_ in enumerate(zip(*shapes)) if len({*all_}) > 1] for shapes in tensors]
    is_batch = all([dim for dim, _ in each] == [0] for each in varying)
    grows = all(len(each) == 1 and [*each[0][1][:FEW]] == sorted(each[0][1][:FEW]) for each in varying)
    if grows and not is_batch:
        return f"{IF_CACHE}; else {_PAD}"
    return "; ".join([_PAD, *[_DROP_LAST] * is_batch, *[IF_CACHE] * grows])


def _shown(value: Any) -> str:
    """The values of all inputs, or one if they are the same."""
    if not isinstance(value, tuple):
        return str(value)
    parts = [*map(str, value)] if len({*map(str, value)}) > 1 else [str(value[0])] if value else ["()"]
    return " and ".join([*parts[:_SHOWN], *(["..."] * (len(parts) > _SHOWN))])


class Changes:
    """All changes of one function, over all versions that Thunder has compiled of it."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, tuple[str, ...]], CallChange] = {}

    def __iter__(self) -> Iterator[CallChange]:
        return iter(self._found.values())

    def add(self, kind: str, names: Iterable[str], *values: Any) -> CallChange:
        """Counts a call that brought the last of the values where an earlier call had the first one."""
        key = kind, tuple(names)
        change = self._found.setdefault(key, CallChange(*key))
        change.times += 1
        if len(change.values) < _MOST_VALUES:
            change.values |= dict.fromkeys(values)
        return change

    def add_between(self, kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> CallChange | None:
        """Counts the inputs whose values differ, if any do. Of a list with numbers, all are one input."""
        after = {name: value for name, value in after.items() if name in before}  # each may read other items of a list
        names = [name for name, value in after.items() if before[name] != value]
        if kind == "number":
            lists = {each[1] for name in names if (each := _ITEM.fullmatch(name))}
            names = [n for n in after if n in names or ((each := _ITEM.fullmatch(n)) and each[1] in lists)]
        values = (tuple(each[name] for name in names) for each in (before, after))
        return self.add(kind, names, *values) if names else None


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """How many of the values differ."""
    return sum(value != other.get(name) for name, value in one.items())


# What a `Layout` has, in its order, and the kind of a change of it.
_PARTS = ("size", "strides", "layout", "layout", "alignment", "layout", "layout", "layout")


def of_layouts(changes: Changes, earlier: Sequence[Layouts], new: Layouts) -> CallChange | None:
    """Counts what a call's inputs, or the settings, have that no earlier ones had, compared with the nearest."""
    if not earlier:
        return None
    settings, layouts = new
    nearest = min(reversed(earlier), key=lambda each: differing(layouts, each[1]))
    change = None
    for kind in dict.fromkeys(_PARTS):
        before, after = ({n: _part(kind, each[n]) for n in layouts} for each in (nearest[1], layouts))
        change = change or changes.add_between(kind, before, after)
    return change or changes.add_between("settings", nearest[0], settings)


def _part(kind: str, layout: Layout) -> Any:
    found = tuple(value for part, value in zip(_PARTS, layout) if part == kind)
    return found[0] if len(found) == 1 else found
