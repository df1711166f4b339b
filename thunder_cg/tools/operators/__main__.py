"""`python -m thunder_cg.tools.operators`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from thunder_cg.tools.arguments import Parser, add_device, device_of, interruptible, positive


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Returns 1 if the rules disagree with a complete measurement, else 0."""
    parser = Parser(
        prog="python -m thunder_cg.tools.operators",
        description="Runs PyTorch's table of operators and handwritten calls through Thunder: captured and replayed "
        "with fresh values, forward and backward, and compared bit for bit with uncaptured Thunder. Symbols that the "
        "rules deny are captured by force.",
    )
    add_device(parser)
    add = parser.add_argument
    add("--jobs", type=positive, default=os.cpu_count() or 1, metavar="N", help="worker processes")
    add("--only", nargs="+", default=(), metavar="NAME", help='measure the cases of such names: add "linalg_*"')
    add("--first", type=positive, metavar="N", help="measure at most so many samples of a case")
    add("--list", action="store_true", help="print the names of all cases, and stop")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args(argv)
    from thunder_cg.tools.operators.run import OperatorSettings, run  # slow, and --help needs nothing of it

    device = device_of(arguments, parser)
    settings = OperatorSettings(device, arguments.jobs, arguments.only, arguments.first, arguments.json)
    if arguments.list:
        print(*settings.chosen, sep="\n")
        return 0
    try:
        return run(settings)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
