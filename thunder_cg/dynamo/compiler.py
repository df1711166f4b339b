"""What `thunderfx` gives Dynamo as a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from thunder_cg.compat.dynamo import CompiledFunction, ThunderCompiler, get_torch_compile_kwargs, keeping_fallbacks
from thunder_cg.dynamo.fallbacks import objections
from thunder_cg.dynamo.rewrites import rewrite
from thunder_cg.options import Options
from thunder_cg.transform import cudagraph_transform


class Compiler(ThunderCompiler):
    """Gives Inductor less of a graph of Dynamo's than Thunder's own compiler does."""

    def __call__(self, module: torch.fx.GraphModule, *inputs: Any) -> Any:
        rewrite(module, self.thunder_options)
        with keeping_fallbacks(objections(module.graph)):
            return super().__call__(module, *inputs)


def thunderfx(fn: Callable[..., Any], **options: Any) -> CompiledFunction:
    """See :func:`thunder_cg.thunderfx`."""
    ours = {field.name: options.pop(field.name) for field in fields(Options) if field.name in options}
    transforms = [*(options.pop("transforms", None) or ()), cudagraph_transform(**ours)]
    return compile_with(fn, transforms=transforms, **options)


def compile_with(fn: Callable[..., Any], **options: Any) -> CompiledFunction:
    """Compiles with the options of Thunder's own ``thunderfx``, and with fewer cuts. Graphs are up to a transform."""
    for_dynamo = get_torch_compile_kwargs(**options)
    backend = Compiler(**{name: value for name, value in options.items() if name not in for_dynamo})
    return CompiledFunction(backend, torch.compile(fn, backend=backend, **for_dynamo))
