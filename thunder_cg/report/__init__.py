"""The report: what was decided for a compiled function, and what came of it. It reads and never decides.

What comes in: a compiled function (:mod:`programs` finds its programs, on the provenance of Thunder's traces), or the
name of an operator (:mod:`rules`). What goes out: a `Report` of frozen records (:mod:`report`), which is printed as
text (:mod:`text`, :mod:`terminal`), shown as HTML in a notebook (:mod:`html`, with a :mod:`picture`), saved to a file
(:mod:`files`, :mod:`markdown`, :mod:`schema`), compared with another one (:mod:`differences`), or taken as data with
`to_dict`. All forms begin alike (:mod:`opening`, with what is not in a graph by :mod:`lines` of source). Who owns what:
a report is a copy made at one moment. It keeps neither the function nor tensors, and later calls do not change it.
"""

from thunder_cg.report.breaks import GraphBreak
from thunder_cg.report.causes import CauseReport
from thunder_cg.report.collectives import CollectiveReport
from thunder_cg.report.crossings import CrossingReport
from thunder_cg.report.entries import ChangeReport, InputReport
from thunder_cg.report.memory import ArenaMemory, MemoryPreview, MemoryReport, RecordingMemory, RegionMemory
from thunder_cg.report.programs import Outside
from thunder_cg.report.report import OpReport, RegionReport, Report, TraceReport, explain
from thunder_cg.report.step import StepReport

__all__ = [
    "ArenaMemory",
    "CauseReport",
    "ChangeReport",
    "CollectiveReport",
    "CrossingReport",
    "GraphBreak",
    "InputReport",
    "MemoryPreview",
    "MemoryReport",
    "OpReport",
    "Outside",
    "RecordingMemory",
    "RegionMemory",
    "RegionReport",
    "Report",
    "StepReport",
    "TraceReport",
    "explain",
]
