"""One self-contained HTML page about a run."""

from its2clr.report.page import reported, write_report

__all__ = ["reported", "write_report"]
