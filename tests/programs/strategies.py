"""Hypothesis strategies: examples by genes, which all mean something, so that hardly any is thrown away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from language import (
    BACKWARDS,
    DENIED,
    FLIPS,
    LAYOUTS,
    LINES,
    MOVES,
    ROWS,
    WRITTEN,
    Backward,
    Call,
    Draw,
    Drop,
    Example,
    Flip,
    Gene,
    Move,
    Optimize,
    Pattern,
    Program,
    Step,
    Threads,
    Variant,
    Write,
    program,
)

_small = st.integers(0, 7)
_three = lambda values: st.tuples(values, values, values)  # noqa: E731


def programs(scope: dict[str, Any]) -> st.SearchStrategy[Program]:
    genes = st.builds(Gene, st.sampled_from(LINES), _small, _small, _small)
    return st.builds(
        lambda inputs, body, picks: program(inputs, body, picks, scope),
        st.integers(1, 3),
        st.lists(genes, min_size=3, max_size=14),
        st.lists(_small, min_size=1, max_size=4),
    )


_first = st.builds(Variant, grad=st.sampled_from(("grad", "no_grad")), training=st.booleans())
_variants = st.builds(
    Variant,
    rows=st.sampled_from(ROWS),
    grad=st.sampled_from(("grad", "grad", "grad", "no_grad", "inference")),
    training=st.booleans(),
    autocast=st.sampled_from((False,) * 6 + (True,)),
    leaves=_three(st.booleans()),
    shares=_three(st.sampled_from(("", "", "", "", "same", "overlap"))),
)

_layouts = _three(st.sampled_from(("dense", "dense", *LAYOUTS)))
_variant = st.integers(0, 2)
_plain = st.builds(Call, seed=st.integers(0, 3))  # most calls are alike, so that they replay, and take the fast path
_calls = st.builds(Call, _variant, _layouts, st.integers(0, 3), st.sampled_from((False,) * 9 + (True,)))
_backwards = st.builds(
    Backward,
    st.integers(0, 3),
    st.sampled_from(("sum", "sum", *BACKWARDS)),
    st.sampled_from((False,) * 5 + (True,)),
    st.sampled_from((False,) * 9 + (True,)),
)
_others = st.one_of(
    st.builds(Drop, st.integers(0, 3)),
    st.builds(Write, st.sampled_from(WRITTEN), _small, st.integers(0, 3)),
    st.builds(Move, st.sampled_from(MOVES), _small),
    st.builds(Optimize, st.sampled_from(("dropped", "held", "zeroed", "kept"))),
    st.builds(Flip, st.sampled_from(FLIPS)),
    st.builds(Draw),
    st.builds(Threads, _variant, _layouts, st.integers(0, 3)),
)
steps: st.SearchStrategy[Step] = st.one_of(_plain, _plain, _calls, _backwards, _backwards, _others)
patterns: st.SearchStrategy[Pattern] = st.lists(steps, min_size=3, max_size=15).map(lambda found: (Call(), *found))


def examples(scope: dict[str, Any], least: int, most: int) -> st.SearchStrategy[Example]:
    """Examples with so many patterns for each program."""
    return st.builds(
        Example,
        programs(scope),
        st.tuples(_first, st.lists(_variants, max_size=2)).map(lambda found: (found[0], *found[1])),
        st.lists(patterns, min_size=least, max_size=most).map(tuple),
        st.one_of(st.just(()), st.lists(st.sampled_from(DENIED), max_size=3, unique=True).map(tuple)),
    )


def run(found: st.SearchStrategy[Any], check: Callable[[Any], None], wanted: int, start: int, *, shrinks: bool) -> None:
    """Checks as many examples as are wanted, the same ones for the same start.

    Args:
        found: what makes them.
        shrinks: whether one that fails is made smaller first.
    """
    given(found)(
        settings(
            max_examples=wanted,
            phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )(seed(start)(check))
    )()
