"""How the arguments of a step, and the values that it carries, are nested in tuples, lists and dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from thunder_cg.step.facts import ATOMS, Same, fact_of
from thunder_cg.step.lookups import own_attributes
from thunder_cg.step.packages import may_change

_MAX_DEPTH = 8  # of what a key has
_PLAIN = {tuple, list, dict}


class Structure:
    """How values are nested. Equal for the same containers, with the same keys, of which 1 and True are two.

    Args:
        tree: as PyTorch has it; None for arguments that are all tensors.
        facts_of: what else counts of a container's class, if that is the user's, and of keys of such classes.
    """

    __slots__ = ("facts", "tree")

    def __init__(self, tree: Any, facts_of: Callable[[Any], Any] = lambda _: None) -> None:
        self.tree, self.facts = tree, None if tree is None else [*_facts_of_tree(tree, facts_of)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.facts == other.facts

    def __hash__(self) -> int:
        return hash(self.tree and self.tree.num_nodes)


def _facts_of_tree(tree: Any, facts_of: Callable[[Any], Any]) -> Iterator[Any]:
    """One of each node, before those of its children. Their number tells ``((a,), b)`` from ``((a, b),)``."""
    if tree.type is None:  # a leaf
        yield None
        return
    # Classes may have methods, which read what they define.
    classes = (tree.type, tree.context) if tree.type not in _PLAIN else ()
    open_classes = [facts_of(each) for each in classes if isinstance(each, type) and may_change(each)]
    yield tree.type, len(tree.children()), _facts_of_key(tree.context, facts_of), open_classes
    for each in tree.children():
        yield from _facts_of_tree(each, facts_of)


def _facts_of_key(key: Any, facts_of: Callable[[Any], Any], depth: int = 0) -> Any:
    if type(key) is str or key is None:
        return key
    if isinstance(key, (*ATOMS, type)):
        return fact_of(key), None if type(key) in ATOMS else facts_of(key)
    if depth == _MAX_DEPTH:
        return Same(key)
    items: tuple[Any, ...] = (*key,) if isinstance(key, (tuple, list, frozenset)) else ()
    own = own_attributes(key) if may_change(type(key)) else {}  # its class may say that others are equal
    facts = (_facts_of_key(each, facts_of, depth + 1) for each in (*items, *own, *own.values()))
    return type(key), len(items), *facts, *(() if items else (key, repr(key)))
