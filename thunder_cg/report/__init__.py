"""What was decided for a compiled function, and what came of it. Reads, never decides."""

from thunder_cg.report.programs import Outside
from thunder_cg.report.report import OpReport, RegionReport, Report, TraceReport, explain

__all__ = ["OpReport", "Outside", "RegionReport", "Report", "TraceReport", "explain"]
