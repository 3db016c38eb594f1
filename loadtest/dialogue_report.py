"""The report of a run of dialogues: files, table, and the page with its pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest import figures as say
from loadtest.dialogue_record import TurnRecord
from loadtest.errors import OutputUnwritable
from loadtest.report import finite

JSON_FILE = "dialogues.json"
HTML_FILE = "dialogues.html"
TURNS_FILE = "turns.jsonl"
_ROWS = 12


@dataclass(frozen=True)
class DialogueReport:
    """What was found. `figures`: the keys of dialogues.json."""

    out: Path
    figures: dict[str, Any]
    turns: Sequence[TurnRecord] = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether turns were completed, none failed or was given up, and no wrong token was found."""
        f = self.figures
        return bool(f["completed"]) and not (f["failed"] or f["rejected"] or f["wrong_tokens"])

    def write(self) -> None:
        """Write the files into `out`. Raises OutputUnwritable."""
        # Only now: matplotlib takes a second, which the first turn need not wait for.
        from loadtest.dialogue_page import dialogue_page

        try:
            self.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(finite(self.figures), indent=2, ensure_ascii=False, allow_nan=False)
            (self.out / JSON_FILE).write_text(text + "\n", encoding="utf-8")
            with (self.out / TURNS_FILE).open("w", encoding="utf-8") as file:
                for turn in self.turns:
                    file.write(json.dumps(finite(turn.as_json()), ensure_ascii=False, allow_nan=False) + "\n")
            (self.out / HTML_FILE).write_text(dialogue_page(self.figures, self.turns), encoding="utf-8")
        except OSError as error:
            raise OutputUnwritable(f"cannot write the report to {self.out}: {error}") from error


def print_dialogues(report: DialogueReport, console: Console) -> None:
    """Print the totals, a row for some of the turns, and where the files are."""
    f = report.figures
    title = "Dialogues (interrupted)" if f["interrupted"] else "Dialogues"
    console.print(Text(title, style="bold"))
    for name, value in totals(f):
        console.print(f"  {name:<38}{value}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("turn", "prompt", "cached", "of prompt", "of history", "answer", "TTFT p50", "p90"):
        table.add_column(name, justify="right")
    for row in _some(f["by_turn"]):
        table.add_row(*cells(row))
    console.print(table)
    for entry in f["reasons"][:5]:
        console.print(Text(f"{entry['count']} × {entry['outcome']}: {entry['reason']}", style="yellow"))
    for notice in f["notices"]:
        console.print(Text(f"note: {notice}", style="dim"))
    console.print(Text(f"Pictures: {report.out / HTML_FILE}\nFigures:  {report.out / JSON_FILE}"), soft_wrap=True)


def totals(f: Mapping[str, Any]) -> list[say.Row]:
    """The run as a whole, in words."""
    checked = "none (--verify)" if f["wrong_tokens"] is None else say.count(f["verified_turns"])
    return [
        (
            "dialogues, turns",
            f"{say.count(f['dialogues'])}, {say.count(f['turns'])} of {say.count(f['planned_turns'])}",
        ),
        ("completed, rejected, failed", ", ".join(say.count(f[name]) for name in ("completed", "rejected", "failed"))),
        ("cached, of prompts from turn 2 on", say.share(f["share_cached"])),
        ("cached, of what the turn before left", say.share(f["share_of_history"])),
        ("TTFT of first turns (p50 / p90 / p99)", say.spread(f["first_ttft_s"])),
        ("TTFT of later turns", say.spread(f["later_ttft_s"])),
        ("time between tokens", say.spread(f["tbt_s"])),
        ("dialogues cut to the context", say.count(f["cut_dialogues"])),
        ("answers re-scored", checked),
        ("wrong tokens", say.count(f["wrong_tokens"])),
    ]


def cells(row: Mapping[str, Any]) -> list[str]:
    """One turn's row."""
    return [
        str(row["turn"]),
        f"{row['prompt_tokens']:,.0f}",
        f"{row['cached_tokens']:,.0f}",
        say.share(row["share_cached"]),
        say.share(row["share_of_history"]),
        f"{row['output_tokens']:,.0f}",
        say.seconds(row["ttft_s"]["p50"]),
        say.seconds(row["ttft_s"]["p90"]),
    ]


def _some(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most so many rows, evenly spread, the first and the last among them."""
    if len(rows) <= _ROWS:
        return list(rows)
    return [rows[round(at * (len(rows) - 1) / (_ROWS - 1))] for at in range(_ROWS)]
