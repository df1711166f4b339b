"""Runs Thunder's own benchmarks with CUDA graphs: ``python -m thunder_cg.tools.thunder_benchmarks litgpt ...``.

Thunder 0.2.6 has no option for it. So the module ``thunder.benchmarks.benchmark_litgpt`` or ``benchmark_inference`` of
the installed Thunder runs as ``python -m`` would run it, with its own arguments, and each function that it compiles
gets one more transform.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from thunder_cg.tools.arguments import Parser

BENCHMARKS = {name: f"thunder.benchmarks.benchmark_{name}" for name in ("litgpt", "inference")}
GRAPHS = ("none", "thunder", "thunder_cg")


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    parser = Parser(
        prog="python -m thunder_cg.tools.thunder_benchmarks",
        description="Runs a benchmark of Thunder's with CUDA graphs. All other arguments are those of the benchmark.",
        epilog="example: ... litgpt --graphs thunder_cg --model_name pythia-160m --compile thunder",
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument(
        "--graphs", choices=GRAPHS, default="thunder_cg", help="whose transform makes them (default: thunder_cg)"
    )
    arguments, others = parser.parse_known_args(argv)
    module = BENCHMARKS[arguments.benchmark]
    with compiling_with(arguments.graphs), patch.object(sys, "argv", [module, *others]):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@contextmanager
def compiling_with(graphs: str) -> Iterator[None]:
    """Inside, ``thunder.jit``, ``thunderfx`` and Thunder's backend of Dynamo get one more transform, of `GRAPHS`."""
    import thunder  # slow, as the others are, and --help needs none of them
    from thunder.transforms.cudagraph import CUDAGraphTransform

    from thunder_cg.dynamo.compiler import Compiler, compile_with
    from thunder_cg.transform import CudagraphTransform, cudagraph_transform

    transform: Callable[[], Any] = CUDAGraphTransform if graphs == "thunder" else cudagraph_transform
    if graphs == "none":
        yield
        return

    def added(options: dict[str, Any]) -> dict[str, Any]:
        before = [*(options.get("transforms") or ())]
        has_one = any(isinstance(each, (CudagraphTransform, CUDAGraphTransform)) for each in before)
        return options if has_one else {**options, "transforms": [*before, transform()]}  # backends call thunder.jit

    jit = thunder.jit
    with (
        patch("thunder.jit", lambda fn, /, **options: jit(fn, **added(options))),
        patch("thunder.dynamo.ThunderCompiler", lambda **options: Compiler(**added(options))),
        patch("thunder.dynamo.compiler.thunderfx", lambda fn, /, **options: compile_with(fn, **added(options))),
    ):
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
