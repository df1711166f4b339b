"""The result file, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thunder_cg.report.markdown import table
from thunder_cg.tools.bench.variants import OURS, THUNDER
from thunder_cg.tools.generation.measure import VARIANTS, GenerationRow
from thunder_cg.tools.results import RowResults, origin

PACKAGES = ("transformers", "litgpt")


@dataclass(slots=True)
class GenerationResults(RowResults):
    """All rows of one machine."""

    make_row = GenerationRow
    identity = ("model", "variant")


def markdown(rows: Sequence[GenerationRow], environment: Mapping[str, str]) -> str:
    """Tokens per second of each model in each variant, and the machine and versions."""
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        found = {row.variant: row for row in rows if row.model == model}
        rates = [_rate(found.get(variant)) for variant in VARIANTS]
        lines.append([model, *rates, _launches(found), _same(found)])
    said = table(["tokens/s", *VARIANTS, "its launches a token", "same tokens"], lines)
    failures = [f"\n{row.model}, {row.variant}: {row.failure}" for row in rows if row.failure]
    eager = [f"\n{row.model}, {row.variant}, without graphs: {row.eager}" for row in rows if row.eager]
    return "\n".join([said, *failures, *eager, f"\n{origin(environment)}; greedy, random weights."])


def differ(rows: Sequence[GenerationRow]) -> list[str]:
    """The models whose tokens are not those of uncaptured Thunder."""
    tokens = {(row.model, row.variant): row.digest for row in rows if not row.failure}
    models = dict.fromkeys(row.model for row in rows)
    both = [model for model in models if {(model, OURS), (model, THUNDER)} <= tokens.keys()]
    return [model for model in both if tokens[model, OURS] != tokens[model, THUNDER]]


def _rate(row: GenerationRow | None) -> str:
    if row is None or row.failure:
        return "--" if row is None else "fails"
    return f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "ran"


def _launches(found: Mapping[str, GenerationRow]) -> str:
    row = found.get(OURS)
    return f"{row.launches:,.0f}" if row is not None and row.launches else "--"


def _same(found: Mapping[str, GenerationRow]) -> str:
    rows = [found[name] for name in (THUNDER, OURS) if name in found and not found[name].failure]
    return ("no" if differ(rows) else "yes") if len(rows) == 2 else "--"
