"""`python -m thunder_cg demo`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from thunder_cg.tools.arguments import Parser, add_device, device_of, positive

if TYPE_CHECKING:
    import torch

PARALLEL = ("ddp", "fsdp")


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Returns the exit status: 1 if results differ."""
    parser = Parser(
        prog="python -m thunder_cg demo",
        description="Trains a character-level GPT on this package's source and lets it write, with and without "
        "cudagraph_transform(), from one seed. Exits with 1 if a loss, a parameter or a character differs in one bit. "
        "With --gpus, or under torchrun, it trains on several ranks and does not write.",
    )
    add_device(parser)
    parser.add_argument(
        "--gpus", type=positive, metavar="N", help="ranks: one for each GPU; gloo on the CPU where there are fewer"
    )
    parser.add_argument("--parallel", choices=PARALLEL, help="on several ranks; default: ddp")
    arguments = parser.parse_args(argv)
    return _run(arguments, device_of(arguments, parser), parser)


def _run(arguments: argparse.Namespace, device: torch.device, parser: Parser) -> int:
    import torch

    from thunder_cg.tools import demo, demo_ranks
    from thunder_cg.tools.ranks import Rank

    here = Rank.of_torchrun()
    if here is None and arguments.gpus is None:
        if arguments.parallel is not None:
            parser.error(f"--parallel {arguments.parallel} is for several ranks; give --gpus N, too")
        return demo.run(demo.settings_for(device))
    if here is not None and arguments.gpus is not None:
        parser.error("--gpus: torchrun has started the ranks; leave it out")
    ranks = arguments.gpus if here is None else int(os.environ["LOCAL_WORLD_SIZE"])
    settings = demo.settings_for(torch.device(device.type if ranks <= torch.cuda.device_count() else "cpu"))
    parallel = arguments.parallel or PARALLEL[0]
    if here is None:
        return demo_ranks.run(settings, parallel, arguments.gpus)
    return demo_ranks.run_here(settings, parallel, replace(here, device_type=settings.device.type))
