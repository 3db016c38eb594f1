"""The report on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest import figures
from loadtest.report import Report

_BAD_IF_ANY = {"failed", "wrong tokens"}


def print_report(report: Report, console: Console) -> None:
    """Print the table, the most frequent reasons of failures, notices, and where the files are."""
    title = "Replay (interrupted)" if report.interrupted else "Replay"
    if report.figures["invalid_reasons"]:
        title += ": INVALID, do not use these figures"
    for reason in report.figures["invalid_reasons"]:
        console.print(Text(f"INVALID: {reason}", style="bold red"))
    style = "bold red" if report.figures["invalid_reasons"] else "table.title"
    table = Table(
        title=Text(title, style),
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, rows in figures.rows(report.figures):
        table.add_row(Text(section, style="bold"), "")
        for name, value in rows:
            bad = name in _BAD_IF_ANY and value not in ("0", "–")
            table.add_row(f"  {name}", Text(value, style="bold red" if bad else ""))
    console.print(table)
    for entry in report.figures["reasons"][:5]:
        console.print(Text(f"{entry['count']} × {entry['outcome']}: {entry['reason']}", style="yellow"))
    for notice in report.figures["notices"]:
        console.print(Text(f"note: {notice}", style="dim"))
    console.print(Text(f"Objectives: {report.figures['slo_rule']}", style="dim"))
    console.print(Text(f"Pictures: {report.html_path}\nFigures:  {report.json_path}"), soft_wrap=True)
