"""`python -m thunder_cg <command>`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from thunder_cg import bench, demo


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words after `python -m thunder_cg`; those of this process if None.

    Returns:
        the exit status: 0, or 1 if the demo's two runs disagree. Wrong arguments leave by `SystemExit(2)`.
    """
    parser = argparse.ArgumentParser(prog="python -m thunder_cg", description="CUDA graphs for Lightning Thunder.")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda if there is one, else cpu")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser(
        "demo",
        parents=[where],
        help="train and sample a small GPT with and without CUDA graphs, compare bit for bit, show the plan",
        description="Trains a character-level GPT on this package's source and lets it write, with and without "
        "cudagraph_transform(), from one seed. Exits with 1 if a loss, a parameter or a character differs in one bit.",
    )
    measure = commands.add_parser(
        "bench",
        parents=[where],
        help="measure host time, end-to-end time and memory beside eager, Thunder and a hand-made graph",
        description="Measures small models under eager PyTorch, Thunder, Thunder's own CUDAGraphTransform, thunder_cg "
        "and a hand-made CUDA graph, in turns. On a CPU: eager, Thunder and the tape backend.",
    )
    measure.add_argument("--calls", type=int, default=100, help="calls per turn (default: 100)")
    measure.add_argument("--only", default="", help="measure only the cases whose name holds this")
    measure.add_argument("--json", type=Path, help="write the numbers there, too")
    arguments = parser.parse_args(argv)

    try:
        device = demo.pick_device(arguments.device)
    except ValueError as error:
        parser.error(str(error))
    if arguments.command == "bench":
        return bench.run(device, arguments.calls, arguments.json, arguments.only)
    return demo.run(demo.settings_for(device))


if __name__ == "__main__":
    sys.exit(main())
