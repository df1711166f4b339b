"""`python -m thunder_cg.tools.generation`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from thunder_cg.tools.arguments import add_device, device_of, positive
from thunder_cg.tools.generation.measure import VARIANTS
from thunder_cg.tools.generation.run import GenerationSettings, run


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Returns 1 if tokens differ from those of uncaptured Thunder, else 0."""
    parser = _parser()
    given = parser.parse_args(argv)
    settings = GenerationSettings(
        device_of(given, parser), given.only, given.variants, given.tokens, given.jobs, given.timeout, given.json
    )
    try:
        return run(settings)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m thunder_cg.tools.generation",
        description="Generates tokens with models of transformers and LitGPT, with random weights and a static cache, "
        "in six variants: tokens per second, launches per token, and whether the tokens are those of uncaptured "
        "Thunder. On a CPU: tiny models, the tape backend, no times. Exits with 1 if tokens differ.",
    )
    add_device(parser)
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="the models that have this in their names")
    add("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="NAME", help=f"of: {', '.join(VARIANTS)}")
    add("--tokens", type=positive, metavar="N", help="new tokens after the prompt (default: 128, on a CPU 8)")
    add("--jobs", type=positive, metavar="N", help="rows that are prepared at once (default: CPUs / 2)")
    add("--timeout", type=positive, default=600, metavar="S", help="seconds to prepare a row (default: 600)")
    add("--json", type=Path, metavar="FILE", help="write the rows there; those of other models stay")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
