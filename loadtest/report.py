"""Report of a replay: figures, records, files, and the terminal table."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest import figures
from loadtest.cluster_metrics import ClusterHistory
from loadtest.errors import OutputUnwritable
from loadtest.objectives import ReplayObjectives
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord

JSON_FILE = "report.json"
HTML_FILE = "report.html"
RECORDS_FILE = "requests.jsonl"
_BAD_IF_ANY = {"failed", "unloaded failed", "wrong tokens"}


@dataclass(frozen=True)
class Report:
    """Results of a replay. `figures`: the keys of report.json. `interrupted`: the user ended it early."""

    out: Path
    figures: dict[str, Any]
    records: Sequence[RequestRecord] = field(repr=False)
    requests: Mapping[int, PlannedRequest] = field(repr=False)
    history: ClusterHistory = field(repr=False)
    objectives: ReplayObjectives = field(repr=False)
    interrupted: bool = False

    @property
    def json_path(self) -> Path:
        """Path of report.json."""
        return self.out / JSON_FILE

    @property
    def html_path(self) -> Path:
        """Path of report.html."""
        return self.out / HTML_FILE

    @property
    def ok(self) -> bool:
        """True if requests were completed, nothing failed, and no wrong token was found."""
        failed = ("failed", "unloaded_failed", "verification_failed", "wrong_tokens")
        return bool(self.figures["completed"]) and not any(self.figures[key] for key in failed)

    def write(self) -> None:
        """Write report.json, requests.jsonl and report.html into `out`. Raises OutputUnwritable."""
        try:
            self._write()
        except OSError as error:
            raise OutputUnwritable(f"cannot write the report to {self.out}: {error}") from error

    def _write(self) -> None:
        # Imported late: matplotlib takes a second to import.
        from loadtest.page import write_page

        self.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(self.figures), indent=2, ensure_ascii=False, allow_nan=False)
        self.json_path.write_text(text + "\n", encoding="utf-8")
        with (self.out / RECORDS_FILE).open("w", encoding="utf-8") as file:
            for record in self.records:
                file.write(json.dumps(finite(record.as_json()), allow_nan=False) + "\n")
        write_page(
            self.html_path, self.figures, self.records, self.requests, history=self.history, objectives=self.objectives
        )


def check_writable(out: Path) -> None:
    """Check that the report's folder can be created and written, before the load. Raises OutputUnwritable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OutputUnwritable(f"cannot write to the folder {out} ({error}); give another with --out") from error


def write_text(path: Path, text: str) -> None:
    """Write a file of a report. Raises OutputUnwritable."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputUnwritable(f"cannot write {path}: {error}") from error


def finite(value: Any) -> Any:
    """Return the value with NaN and infinities, which JSON cannot represent, replaced by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def figures_table(title: Text) -> Table:
    """Return an empty table of names and figures."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def print_report(report: Report, console: Console) -> None:
    """Print the table, the most frequent reasons of failures, notices, and the paths of the files."""
    title = "Replay (interrupted)" if report.interrupted else "Replay"
    if report.figures["invalid_reasons"]:
        title += ": INVALID, do not use these figures"
    for reason in report.figures["invalid_reasons"]:
        console.print(Text(f"INVALID: {reason}", style="bold red"))
    style = "bold red" if report.figures["invalid_reasons"] else "table.title"
    table = figures_table(Text(title, style))
    for section, entries in figures.rows(report.figures):
        table.add_row(Text(section, style="bold"), "")
        for name, value in entries:
            bad = name in _BAD_IF_ANY and value not in ("0", "–")
            table.add_row(f"  {name}", Text(value, style="bold red" if bad else ""))
    console.print(table)
    for entry in report.figures["reasons"][:5]:
        console.print(Text(f"{entry['count']} × {entry['outcome']}: {entry['reason']}", style="yellow"))
    for notice in report.figures["notices"]:
        console.print(Text(f"note: {notice}", style="dim"))
    console.print(Text(f"Objectives: {report.figures['slo_rule']}", style="dim"))
    console.print(Text(f"Pictures: {report.html_path}\nFigures:  {report.json_path}"), soft_wrap=True)
