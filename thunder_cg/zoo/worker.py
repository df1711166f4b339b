"""`python -m thunder_cg.zoo.worker CATALOGUE MODEL MODE DEVICE CALLS`: one row, in a process that may crash or hang.

Writes the row as a line of JSON; on a GPU once before the timing, which waits for a line on standard input, and again
after it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict

import torch

from thunder_cg.zoo.row import Row, measure

STAGE = "zoo, next: "  # before what is begun, on standard error


def main() -> None:
    """Measures what the words of the command line say."""
    catalogue, name, mode, device, calls = sys.argv[1:]
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model's package prints is no row

    def write(row: Row) -> None:
        lines.write(json.dumps(asdict(row)) + "\n")
        lines.flush()

    def tell(stage: str) -> None:
        print(f"{STAGE}{stage}", file=sys.stderr, flush=True)

    def wait(row: Row) -> None:
        write(row)
        sys.stdin.readline()

    torch.set_num_threads(1)
    entry = importlib.import_module(catalogue).MODELS[name]
    with torch._dynamo.config.patch(recompile_limit=64):  # several compiled copies share the model's code
        write(measure(entry, mode, torch.device(device), int(calls), wait, tell))


if __name__ == "__main__":
    main()
