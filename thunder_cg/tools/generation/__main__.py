"""`python -m thunder_cg.tools.generation`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from thunder_cg.tools.arguments import Parser, add_device, add_rows, device_of, interruptible


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Returns 1 if tokens differ from those of uncaptured Thunder, else 0."""
    parser = _parser()
    given = parser.parse_args(argv)
    from thunder_cg.tools.generation.measure import VARIANTS
    from thunder_cg.tools.generation.run import CATALOGUE, run
    from thunder_cg.tools.suite.catalogue import CatalogueSettings  # slow, and --help needs nothing of it

    variants = given.variants or VARIANTS
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"--variants {', '.join(unknown)}: give some of {', '.join(map(repr, VARIANTS))}")
    device = device_of(given, parser)
    try:
        return run(CatalogueSettings(device, CATALOGUE, given.only, given.jobs, given.timeout, given.json), variants)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m thunder_cg.tools.generation",
        description="Generates tokens with models of transformers and LitGPT, with random weights and a static cache, "
        "in six variants: tokens per second, launches per token, and whether the tokens are those of uncaptured "
        "Thunder. On a CPU: tiny models, the tape backend, no times. Exits with 1 if tokens differ.",
    )
    add_device(parser)
    add_rows(parser)
    said = "the variants of these names (default: all; an error lists them)"
    parser.add_argument("--variants", nargs="+", metavar="NAME", help=said)
    return parser


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
