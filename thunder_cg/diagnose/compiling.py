"""Compiles a function or module once more, with a transform of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import thunder

from thunder_cg.compat import thunder as compat
from thunder_cg.compat.compiled import module_parameters, options_of
from thunder_cg.compat.distributed import is_distributed
from thunder_cg.errors import NotCompiledError
from thunder_cg.transform import CudagraphTransform


def transform_of(fn: Any) -> CudagraphTransform | None:
    """The transform that ``thunder.jit`` was given when it made ``fn``; None if there is none."""
    data = thunder.compile_data(fn)
    transforms = data.transforms if data is not None else ()
    return next((each for each in transforms if isinstance(each, CudagraphTransform)), None)


def refuse_sharded(fn: Any, source: Any, function: str) -> None:
    """Raises `NotCompiledError` if ranks have shards of the parameters of ``source``: compiled anew, it has others."""
    if not (is_distributed() and isinstance(fn, compat.ThunderModule)):
        return
    whole = dict(source.named_parameters())
    if any(name in whole and whole[name].shape != p.shape for name, p in module_parameters(fn).items()):
        problem = f"its parameters have been sharded, and {function} would shard them again: call it before that"
        raise NotCompiledError(fn, problem, function)


def compiled_as(
    fn: Any, source: Any, transform: CudagraphTransform | None, options: Mapping[str, Any] | None = None
) -> Any:
    """``source``, compiled as ``fn`` was, if it was, but with ``transform`` in the place of its own.

    Args:
        transform: None for no graphs.
        options: of ``thunder.jit``; they come before those of ``fn``.
    """
    data, options = thunder.compile_data(fn), dict(options or {})
    before = options_of(fn) if data is not None else {}
    transforms = options.pop("transforms", None) or (data.transforms if data is not None else ())
    others = [each for each in transforms if not isinstance(each, CudagraphTransform)]
    return thunder.jit(source, **{**before, **options, "transforms": [*others, *([transform] if transform else [])]})
