"""Runs the benchmark on several ranks: for each case that was chosen, one process for each rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch

from thunder_cg.progress import Progress
from thunder_cg.report.markdown import table
from thunder_cg.tools.bench.distributed import RankRow, measure_case, under_way
from thunder_cg.tools.bench.measure import EVERY_VARIANT, ticks
from thunder_cg.tools.bench.parallel import variants
from thunder_cg.tools.bench.rank_cases import RankCase, rank_cases
from thunder_cg.tools.bench.variants import (
    COMPILE,
    FLOOR,
    FLOOR_OF_THUNDER,
    GRAPHED_STEP_FUSED,
    OURS,
    OURS_FUSED,
    THUNDER,
    THUNDER_FUSED,
    CaseSettings,
)
from thunder_cg.tools.ranks import Rank, RankFailed, run_on_ranks
from thunder_cg.tools.results import RowResults, environment
from thunder_cg.tools.turns import Turns
from thunder_cg.tools.workers import Supervisor

TIMEOUT = 900.0  # seconds for a case


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings(CaseSettings):
    """What to measure on how many ranks. First calls take longer with more jobs."""

    ranks: int

    @property
    def chosen(self) -> list[RankCase]:
        return [case for case in rank_cases(self.device, self.quick) if self.has(case.name)]

    def chosen_variants(self, case: RankCase) -> list[str]:
        return self.meant(variants(self.device, self.quick and not self.variants, case.case.trains))


@dataclass(slots=True)
class RankResults(RowResults):
    """All rows of one machine."""

    make_row = RankRow
    identity = ("case", "variant")
    note = "Of all ranks the largest. RankRow in thunder_cg/tools/bench/distributed.py says what each number is."


def run_ranks(settings: RankSettings) -> int:
    """Measures, and prints a table and writes the numbers after each case. Returns 1 if ranks failed, else 0.

    Raises:
        ValueError: nothing is chosen, or `json` has numbers from elsewhere.
    """
    chosen = settings.chosen
    if not chosen or not any(map(settings.chosen_variants, chosen)):
        raise ValueError("no case or variant has such a name; --list shows the cases")
    here = environment(settings.device) | {"ranks": str(settings.ranks)}
    if settings.device.type == "cuda":
        here["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    results = RankResults.read_or_new(settings.json, here)
    progress = Progress(sum(ticks(settings.chosen_variants(case)) for case in chosen))
    with tempfile.TemporaryDirectory() as folder, ThreadPool(settings.jobs) as threads:
        measure = partial(_measure_on_ranks, settings, Path(folder), progress)
        failed = False
        for rows, failure in threads.imap_unordered(measure, [case.name for case in chosen]):
            failed = failed or failure
            results.add(rows)
            if settings.json is not None:
                results.write(settings.json)
            progress.clear()
            print(rank_table(rows), flush=True)
    print(f"\n{overview(results.rows)}")
    return int(failed)


def _measure_on_ranks(
    settings: RankSettings, turns: Path, progress: Progress, name: str
) -> tuple[Sequence[RankRow], bool]:
    """The rows of one case, which is measured in processes of its own, and whether they failed.

    If a variant ends or hangs them, the others are measured in new ones.
    """
    settings = replace(settings, names=(name,))
    (case,) = settings.chosen
    names = settings.chosen_variants(case)
    rows: list[RankRow] = []
    failed: list[RankRow] = []
    while names:
        try:
            run_on_ranks(
                _send_rows,
                (settings, turns, names),
                settings.ranks,
                settings.device.type,
                TIMEOUT * settings.jobs,
                progress.tick,
                lambda found: rows.extend(found or ()),
            )
        except RankFailed as failure:
            if rows or (culprit := under_way(failure.stage, names)) is None:
                return [*rows, *failed] or [RankRow(name, EVERY_VARIANT, failure=str(failure))], True
            failed.append(RankRow(name, culprit, failure=str(failure)))
            names = [each for each in names if each != culprit]
        else:
            return [*rows, *failed], bool(failed)
    return failed, True


def _send_rows(here: Rank, supervisor: Supervisor, settings: RankSettings, turns: Path, names: Sequence[str]) -> None:
    """What each rank does: measures these variants of the one case, and sends its rows."""
    settings = replace(settings, device=here.device)
    (case,) = settings.chosen
    calls = settings.calls or (10 if settings.quick else 30)
    supervisor.send_result(measure_case(case, names, calls, supervisor, Turns(turns)))


_HEADER = ("variant", "back to back ms", "host ms", "skew p99 ms", "reserved MB", "first calls s", "bits")


def rank_table(rows: Sequence[RankRow]) -> str:
    """The rows of one case as Markdown."""
    return "\n".join(["", f"**{rows[0].case}**", "", table(_HEADER, map(_cells, rows)), *_notes(rows)])


def _cells(row: RankRow) -> tuple[str, ...]:
    if row.failure:
        return row.variant, row.failure.replace("|", "/"), *("",) * (len(_HEADER) - 2)
    times = (f"{row.back_to_back_ms:.2f}", f"{row.host_ms:.2f}", f"{row.skew_p99_ms:.3f}")
    return row.variant, *times, f"{row.reserved_mb:,.0f}", f"{row.first_calls_s:.1f}", row.bits


def _notes(rows: Sequence[RankRow]) -> Iterator[str]:
    """What is captured, and the ratios that count."""
    found = {row.variant: row for row in rows if not row.failure}
    for row in (row for row in rows if row.captured):
        agreed = f"ranks agreed in {row.agreement_s * 1e3:.0f} ms of its first calls"
        yield f"\n{row.variant}: {row.captured}; {agreed}"
    ours = found.get(OURS)
    others = [found[name] for name in (THUNDER, COMPILE, FLOOR_OF_THUNDER, FLOOR) if name in found]
    if ours is not None and others:
        ratios = ", ".join(f"{ours.back_to_back_ms / other.back_to_back_ms:.2f} x {other.variant}" for other in others)
        yield f"\n{OURS}, back to back: {ratios}"


def overview(rows: Sequence[RankRow]) -> str:
    """All cases as two Markdown tables: times, and how far ranks are apart with the memory that is reserved."""
    order = [*variants(torch.device("cuda"), quick=False, trains=True), EVERY_VARIANT]
    measured = sorted({row.variant for row in rows}, key=order.index)
    times = _overview(rows, "ms, back to back", measured, lambda row: f"{row.back_to_back_ms:.2f}")
    compared = (THUNDER, OURS, THUNDER_FUSED, OURS_FUSED, GRAPHED_STEP_FUSED, FLOOR)
    title = "p99 of ms between the ranks; MB reserved"
    others = _overview(rows, title, compared, lambda row: f"{row.skew_p99_ms:.2f}; {row.reserved_mb:,.0f}")
    return f"{times}\n\n{others}"


def _overview(rows: Sequence[RankRow], title: str, variants: Sequence[str], cell: Callable[[RankRow], str]) -> str:
    """A row for each case; a dash for what was not measured."""
    found = {(row.case, row.variant): "fails" if row.failure else cell(row) for row in rows}
    cases = dict.fromkeys(row.case for row in rows)
    return table((title, *variants), ((case, *(found.get((case, name), "-") for name in variants)) for case in cases))
