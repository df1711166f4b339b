"""Whether the ranks have compiled a function with the same options, on which the order of its collectives depends.

Note [Same options]
    The order of the collectives of Thunder's parallelism, and which of them one launch makes, follow from the trace,
    from the executors and from options. Ranks that differ there would mix up their tensors, and NCCL may not notice. So
    when a function first has such collectives in a group, each rank puts its options into the group's store, and
    compares those of all others. The functions of a group are numbered in the order in which they first do so, which is
    that of all ranks. A rank waits for the others as long as a collective does: they may be late, and one that has
    compiled without the transform, and has Thunder's order, never answers. But a rank may compile anew what the others
    go on with. If all functions up to then have had its options on all ranks, so has what they run. So it waits for
    `GroupState.longest_wait` only, says that it is alone, and does not count the function, as the others do not. Later
    versions of a function, for other shapes, ask nothing. The user's own collectives keep their order and have launches
    of their own, with any options.
    A rank that captures no collectives has Thunder's order, as one without the transform. So it waits for
    `GroupState.longest_wait` only, and goes on beside a rank that says nothing.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial

from thunder_cg.compat import distributed
from thunder_cg.compat.distributed import ProcessGroup, Store
from thunder_cg.errors import OptionsDiffer
from thunder_cg.runtime.ranks.groups import GroupState, get, poll, with_other_ranks

_ALONE = "alone: "  # begins the options of a function that only this rank has compiled

_functions: weakref.WeakKeyDictionary[object, weakref.WeakKeyDictionary[ProcessGroup, str]]
_functions = weakref.WeakKeyDictionary()  # for each group of Thunder's collectives, how the options of ranks differ


class SameOptions:
    """Whether all ranks have compiled a function with the same options. See Note [Same options].

    Args:
        groups: of Thunder's collectives in a version of the function.
        function: stands for it, for all its versions.
        options: those that count, by name.
        needs_answers: whether a rank that says nothing has another order.
    """

    def __init__(
        self, groups: Sequence[ProcessGroup], function: object, options: Mapping[str, str], *, needs_answers: bool
    ) -> None:
        self._groups, self._options, self._needs_answers = list(groups), dict(options), needs_answers
        self._checked = _functions.setdefault(function, weakref.WeakKeyDictionary())

    def check(self, label: str) -> None:
        """To be called before the version communicates.

        Raises:
            OptionsDiffer: those of another rank are other ones, or it has said nothing until the group's time-out.
        """
        for state in with_other_ranks(filter(distributed.is_alive, self._groups)):
            if state.group not in self._checked:
                self._checked[state.group] = self._compare(state, label)
            if self._checked[state.group]:
                raise OptionsDiffer(label, self._checked[state.group])

    def _compare(self, state: GroupState, label: str) -> str:
        """Tells the other ranks the options; in which rank's they differ, and how, "" if in none."""
        group, said = state.group, json.dumps(self._options)
        store, key = distributed.store(group), f"thunder_cg/{state.generation}/options/{state.functions + 1}"
        store.set(f"{key}/{group.rank()}", said)
        are_usual, is_alone, problems = state.options == said, False, []
        limit = state.longest_wait() if are_usual or not self._needs_answers else distributed.timeout(group)
        deadline = time.monotonic() + limit
        for index, rank in state.other_ranks():
            what = f"{label}: waits for rank {rank}, which has to run it, compiled with the same options,"
            put = poll(partial(_options_of, store, f"{key}/{index}", said), deadline, what)
            if put is None and not are_usual:
                if not self._needs_answers:
                    continue
                problem = "has run no function that was compiled with the transform and communicates"
                problems.append(f"rank {rank} {problem}, in {limit:g} s")
            elif put is None or put.startswith(_ALONE):
                is_alone = True
            else:
                theirs = json.loads(put)
                differ = [name for name, value in self._options.items() if theirs.get(name) != value]
                problems += [f"rank {rank} has {name}={theirs.get(name)}, not {self._options[name]}" for name in differ]
        if is_alone and not problems:
            store.set(f"{key}/{group.rank()}", _ALONE + said)
        else:
            state.options = said if not problems and (are_usual or not state.functions) else None
            state.functions += 1
        return "; ".join(problems)


def _options_of(store: Store, key: str, mine: str) -> str | None:
    """What another rank has said; None if it has said nothing, or has other options in a function of its own."""
    put = get(store, key)
    return None if put is not None and put.startswith(_ALONE) and put != _ALONE + mine else put
