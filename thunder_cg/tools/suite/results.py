"""The result file of the model suite: a row for each model and mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunder_cg.tools.results import RowResults

PACKAGES = ("transformers", "torchvision", "timm", "litgpt", "diffusers")

FORWARD, TRAINING, DECODE = "forward", "training", "decode"
MODES = (FORWARD, TRAINING, DECODE)
JIT, FX = "thunder.jit", "thunderfx"

EAGER = "eager in Thunder's trace"
INDUCTOR = "left to Inductor by thunderfx"
BREAK = "graph break of Dynamo"
NOT_REPLAYED = "region that did not replay"


@dataclass(frozen=True, slots=True)
class NotCaptured:
    """Something that is in no graph: what, how often, and why.

    Attributes:
        kind: `EAGER`, `INDUCTOR`, `BREAK` or `NOT_REPLAYED`.
    """

    kind: str
    what: str
    count: int
    why: str


@dataclass(slots=True)
class SuiteRow:
    """The results of one model in one mode.

    Attributes:
        mode: `FORWARD`, `TRAINING`, or `DECODE`: one new token, with a static cache.
        path: how Thunder compiles the model: `JIT`, or `FX` where that fails or has wrong gradients: see `not_jit`.
        ops: all ops of the last step, forward and backward; `captured` of them are in graphs.
        graphs: how many functions Thunder compiled: graph breaks and thunderfx's splits cut the model.
        regions: of these functions; `replayed` of them replayed in the last step. The fewest are one in the forward and
            one in the backward.
        outside: everything that is in no graph.
        agrees: "yes", or "yes: " and the settings that it needed; "no: " and the first difference from uncaptured
            Thunder; "Thunder varies: " and the first difference between two runs of uncaptured Thunder, where nothing
            can be compared.
        thunder_us, captured_us: medians of a synchronized step, uncaptured and captured, microseconds; 0 where not
            measured.
        failure: why there are no results, "" if there are.
    """

    model: str
    package: str
    mode: str
    path: str = ""
    not_jit: str = ""
    ops: int = 0
    captured: int = 0
    graphs: int = 0
    regions: int = 0
    replayed: int = 0
    outside: list[NotCaptured] = field(default_factory=list)
    agrees: str = ""
    thunder_us: float = 0.0
    captured_us: float = 0.0
    failure: str = ""

    @classmethod
    def of(cls, *, outside: Sequence[Mapping[str, Any]], **content: Any) -> SuiteRow:
        """A row as `dataclasses.asdict` made it. TypeError if it is something else."""
        return cls(outside=[NotCaptured(**part) for part in outside], **content)


@dataclass(slots=True)
class SuiteResults(RowResults):
    """All rows of one machine."""

    make_row = SuiteRow.of
    identity = ("model", "mode")
    note = (
        "Times in microseconds: medians of synchronised steps, uncaptured Thunder and captured in turns in one "
        "process; 0 where not measured. SuiteRow in thunder_cg/tools/suite/results.py says the rest."
    )
