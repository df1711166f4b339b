"""`python -m thunder_cg bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_cg.tools.arguments import Parser, add_device, device_of, positive

if TYPE_CHECKING:
    import torch


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Returns the exit status; wrong arguments leave by `SystemExit(2)`."""
    parser = _parser()
    given = parser.parse_args(argv)
    device = device_of(given, parser)
    common = {name: getattr(given, name) for name in ("quick", "names", "variants", "calls", "jobs", "json")}
    settings: Any
    measure: Callable[[Any], int]
    if given.gpus is None:
        from thunder_cg.tools.bench.run import BenchmarkSettings, run as measure

        settings = BenchmarkSettings(device=device, plots=given.plots, **common)
    else:
        from thunder_cg.tools.bench.rank_run import RankSettings, run_ranks as measure

        device = _device_of_ranks(device, given, parser)
        settings = RankSettings(device=device, ranks=given.gpus, **common)
    if given.list:
        print(*(each.name for each in settings.chosen), sep="\n")
        return 0
    try:
        return measure(settings)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))


def _device_of_ranks(device: torch.device, given: argparse.Namespace, parser: Parser) -> torch.device:
    import torch

    found = torch.cuda.device_count()
    if given.gpus > found and given.device != "cpu":
        problem = f"--gpus {given.gpus}: this machine has {found} GPUs"
        parser.error(f"{problem}; --device cpu tries small cases with gloo and the tape")
    return torch.device(device.type)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m thunder_cg bench",
        description="Measures models under eager PyTorch, Thunder, Thunder's own CUDAGraphTransform, thunder_cg, "
        "torch.compile, make_graphed_callables and a hand-made CUDA graph, in turns, and how host time grows with "
        "layers, parameters and inputs. On a CPU: small models under eager, Thunder and the tape backend.",
    )
    add_device(parser)
    add = parser.add_argument
    add("--quick", action="store_true", help="a few small cases and calls: less than a minute")
    said = "measure the cases that have one of these in their names"
    add("--only", dest="names", nargs="+", default=("",), metavar="TEXT", help=said)
    add("--variants", nargs="+", default=[], metavar="TEXT", help="the variants that have one of these in their names")
    add("--list", action="store_true", help="print the names of all cases and scaling series, and stop")
    add("--calls", type=positive, metavar="N", help="calls per turn (default: 100, with --quick 10)")
    add("--jobs", type=positive, default=1, metavar="N", help="cases to prepare at once, in processes of their own")
    add("--json", type=Path, metavar="FILE", help="write the numbers there; those of other cases stay")
    add("--plots", type=Path, metavar="DIR", help="draw all that FILE holds, as SVG (needs matplotlib)")
    add("--gpus", type=positive, metavar="N", help="measure steps under ddp, fsdp and tensor parallelism on N ranks")
    return parser
