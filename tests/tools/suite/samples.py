"""Rows that no run measured."""

from __future__ import annotations

from thunder_cg.tools.suite.results import EAGER, FORWARD, FX, INDUCTOR, JIT, TRAINING, NotCaptured, SuiteRow

SAMPLE = [
    SuiteRow("A", "p", FORWARD, JIT, "", 100, 100, 1, 1, 1, [], "yes", 2000.0, 500.0),
    SuiteRow(
        "A", "p", TRAINING, JIT, "", 1300, 1299, 1, 3, 3, [NotCaptured(EAGER, "Tensor.item", 1, "it reads")], "yes"
    ),
    SuiteRow(
        *("B", "p", FORWARD, FX, "no", 20, 10, 2, 2, 1),
        [NotCaptured(INDUCTOR, "torch.addmm", 8, "a | b"), NotCaptured(INDUCTOR, "diff", 1, "c")],
        "Thunder varies: loss of step 1",
    ),
    SuiteRow("B", "p", TRAINING, failure="TypeError: no"),
]
ENVIRONMENT = {"device": "a GPU", "driver": "1.2", "backend": "cuda", "torch": "2.11.0", "date": "2026-11-21"}
