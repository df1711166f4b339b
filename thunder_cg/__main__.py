"""`python -m thunder_cg <command>`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from thunder_cg.tools import bench, demo
from thunder_cg.tools import operators as sweep
from thunder_cg.tools import suite as zoo


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words after `python -m thunder_cg`; those of this process if None.

    Returns:
        the exit status: 0, or 1 if results with and without graphs disagree. Wrong arguments leave by `SystemExit(2)`.
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
        description="Measures models under eager PyTorch, Thunder, Thunder's own CUDAGraphTransform, thunder_cg, "
        "torch.compile, make_graphed_callables and a hand-made CUDA graph, in turns, and how host time grows with "
        "layers, parameters and inputs. On a CPU: small models under eager, Thunder and the tape backend.",
    )
    measure.add_argument("--quick", action="store_true", help="a few small cases and calls: less than a minute")
    measure.add_argument("--only", default="", metavar="TEXT", help="measure what has this in its name")
    measure.add_argument("--list", action="store_true", help="print the names of all cases and sweeps, and stop")
    measure.add_argument("--calls", type=_positive, metavar="N", help="calls per turn (default: 100, with --quick 10)")
    measure.add_argument(
        "--jobs", type=_positive, default=1, metavar="N", help="cases to prepare at once, each in its own process"
    )
    measure.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there; those of other cases stay")
    measure.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw all that FILE holds, as SVG (needs matplotlib)"
    )
    rules = commands.add_parser(
        "rules",
        parents=[where],
        help="capture every operator that Thunder can trace, and compare: what the rule tables rest on",
        description="Drives PyTorch's table of operators, and calls written by hand, through Thunder: captured and "
        "replayed with fresh values, forward and backward, and compared bit for bit with uncaptured Thunder. What the "
        "rules deny is captured by force. Interrupted, it goes on where it was when it is started again with the same "
        "--json.",
    )
    rules.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, metavar="N", help="worker processes")
    rules.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help='measure what has such a name: add "linalg_*"'
    )
    rules.add_argument("--first", type=_positive, metavar="N", help="measure so many samples of a case, at most")
    rules.add_argument("--list", action="store_true", help="print the names of all cases, and stop")
    rules.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    models = commands.add_parser(
        "zoo",
        parents=[where],
        help="what is captured of models of transformers, torchvision and timm, and whether it agrees",
        description="Runs models of transformers, torchvision and timm, with random weights, through Thunder without "
        "and with cudagraph_transform(): a forward, and training steps. Counts what is captured, says what is not and "
        "why, compares results bit for bit, and on a GPU times a step. On a CPU: tiny models, the tape backend, no "
        "times. Exits with 1 if a model's numbers differ.",
    )
    models.add_argument("--only", default="", metavar="TEXT", help="the models that have this in their names")
    models.add_argument("--list", action="store_true", help="print the names of all models, and stop")
    models.add_argument("--jobs", type=_positive, metavar="N", help="rows in the making at once (default: CPUs / 2)")
    models.add_argument("--timeout", type=_positive, default=300, metavar="S", help="seconds for a row (default: 300)")
    models.add_argument("--json", type=Path, metavar="FILE", help="write the rows there; those of other models stay")
    models.add_argument(
        "--table", type=Path, metavar="FILE", help="measure nothing; put the table of --json into this Markdown file"
    )
    arguments = parser.parse_args(argv)

    try:
        device = demo.pick_device(arguments.device)
    except ValueError as error:
        parser.error(str(error))
    if arguments.command == "bench":
        return _bench(arguments, device, measure)
    if arguments.command == "rules":
        return _rules(arguments, device, rules)
    if arguments.command == "zoo":
        return _zoo(arguments, device, models)
    return demo.run(demo.settings_for(device))


def _bench(arguments: argparse.Namespace, device: torch.device, parser: argparse.ArgumentParser) -> int:
    settings = bench.Settings(
        device,
        arguments.quick,
        arguments.only,
        arguments.calls,
        arguments.jobs,
        json=arguments.json,
        plots=arguments.plots,
    )
    if arguments.list:
        print(*(each.name for each in settings.chosen), sep="\n")
        return 0
    try:
        return bench.run(settings)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))


def _rules(arguments: argparse.Namespace, device: torch.device, parser: argparse.ArgumentParser) -> int:
    settings = sweep.Settings(device, arguments.jobs, arguments.only, arguments.first, arguments.json)
    if arguments.list:
        print(*settings.chosen, sep="\n")
        return 0
    try:
        return sweep.run(settings)
    except ValueError as error:
        parser.error(str(error))


def _zoo(arguments: argparse.Namespace, device: torch.device, parser: argparse.ArgumentParser) -> int:
    settings = zoo.Settings(device, arguments.only, jobs=arguments.jobs, timeout=arguments.timeout, json=arguments.json)
    if arguments.list:
        print(*(entry.name for entry in settings.chosen), sep="\n")
        return 0
    try:
        if arguments.table is None:
            return zoo.run(settings)
        if arguments.json is None:
            raise ValueError("--table needs --json FILE, the rows that it is to show")
        zoo.rewrite_table(arguments.json, arguments.table)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
