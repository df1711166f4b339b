"""`python -m thunder_cg.tools.suite`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from thunder_cg.tools.arguments import Parser, add_device, add_rows, device_of, interruptible


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Returns 1 if the results of a model differ, else 0."""
    parser = _parser()
    given = parser.parse_args(argv)
    from thunder_cg.tools.suite.catalogue import CatalogueSettings  # slow, and --help needs nothing of it
    from thunder_cg.tools.suite.run import CATALOGUE, run

    device = device_of(given, parser)
    settings = CatalogueSettings(device, CATALOGUE, given.only, given.jobs, given.timeout, given.json)
    try:
        if given.list:
            print(*(model.name for model in settings.chosen()), sep="\n")
            return 0
        return run(settings)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m thunder_cg.tools.suite",
        description="Runs models of transformers, torchvision and timm, with random weights, through Thunder without "
        "and with cudagraph_transform(): a forward, training steps, and one new token with a static cache. Counts what "
        "is captured, says what is not and why, compares results bit for bit, and on a GPU times a step. On a CPU: "
        "tiny models, the tape backend, no times. Exits with 1 if the results of a model differ.",
    )
    add_device(parser)
    add_rows(parser)
    parser.add_argument("--list", action="store_true", help="print the names of all models, and stop")
    return parser


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
