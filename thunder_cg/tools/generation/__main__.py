"""`python -m thunder_cg.tools.generation`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from thunder_cg.tools.arguments import Parser, add_device, add_rows, device_of, interruptible, positive


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Returns 1 if tokens differ from those of uncaptured Thunder, else 0."""
    parser = _parser()
    given = parser.parse_args(argv)
    from thunder_cg.tools.generation.measure import VARIANTS  # slow, and --help needs neither
    from thunder_cg.tools.generation.run import GenerationSettings, run

    given.variants = given.variants or VARIANTS
    if unknown := [name for name in given.variants if name not in VARIANTS]:
        parser.error(f"--variants {', '.join(unknown)}: give some of {', '.join(map(repr, VARIANTS))}")
    given.device = device_of(given, parser)
    try:
        return run(GenerationSettings(**vars(given)))
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
    add = parser.add_argument
    add("--variants", nargs="+", metavar="NAME", help="the variants of these names (default: all; an error lists them)")
    add("--tokens", type=positive, metavar="N", help="new tokens after the prompt (default: 128, on a CPU 8)")
    return parser


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
