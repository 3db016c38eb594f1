"""Report of a run of dialogues: figures, files, and the terminal table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest import figures as say
from loadtest.dialogue_config import DialogueConfig
from loadtest.dialogue_turns import TurnRecord, share_cached, share_of_history
from loadtest.errors import OutputUnwritable
from loadtest.record import SendOutcome
from loadtest.report import finite
from loadtest.summary import percentiles, reasons
from loadtest.verify import Verification

_LAST_LINE = (
    "dialogues",
    "turns",
    "completed",
    "rejected",
    "failed",
    "unfinished",
    "share_cached",
    "share_of_history",
    "ttft_s",
    "wrong_tokens",
    "interrupted",
)


def summarise_dialogues(
    config: DialogueConfig, turns: Sequence[TurnRecord], *, verification: Verification | None
) -> dict[str, Any]:
    """Return the figures of dialogues.json. First turns are excluded from the shares because they have no history."""
    completed = [t for t in turns if t.completed]
    ended = Counter(t.request.outcome for t in turns)
    return {
        "dialogues": len({t.dialogue for t in turns}),
        "planned_turns": config.num_dialogues * config.turns,
        "turns": len(turns),
        **{outcome.value: ended[outcome] for outcome in SendOutcome},
        "prompt_tokens": sum(t.request.prompt_tokens for t in completed),
        "cached_tokens": sum(t.request.cached_tokens for t in completed),
        "output_tokens": sum(t.request.output_tokens for t in completed),
        "share_cached": share_cached(turns),
        "share_of_history": share_of_history(turns),
        "ttft_s": percentiles(t.request.ttft_s for t in completed),
        "first_ttft_s": percentiles(t.request.ttft_s for t in completed if not t.turn),
        "later_ttft_s": percentiles(t.request.ttft_s for t in completed if t.turn),
        "tbt_s": percentiles(interval for t in completed for interval in t.request.intervals_s),
        "cut_dialogues": len({t.dialogue for t in completed if t.dropped_messages}),
        "by_turn": by_turn(turns),
        "verified_turns": verification.verified_requests if verification else 0,
        "wrong_tokens": verification.wrong_tokens if verification else None,
        "verification": verification.as_json() if verification else None,
        "reasons": reasons([t.request for t in turns]),
    }


def by_turn(turns: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """Return a row per turn number over all completed turns: mean tokens, shares, and TTFT percentiles."""
    rows = []
    ordered = sorted((t for t in turns if t.completed), key=lambda t: t.turn)
    for turn, group in groupby(ordered, key=lambda t: t.turn):
        same = list(group)
        rows.append(
            {
                "turn": turn + 1,
                "dialogues": len(same),
                "prompt_tokens": _mean([t.request.prompt_tokens for t in same]),
                "cached_tokens": _mean([t.request.cached_tokens for t in same]),
                "output_tokens": _mean([t.request.output_tokens for t in same]),
                "share_cached": share_cached(same),
                "share_of_history": share_of_history(same),
                "ttft_s": percentiles(t.request.ttft_s for t in same),
            }
        )
    return rows


def last_line(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures for scripts, printed as the last line of output."""
    return {name: figures[name] for name in _LAST_LINE}


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 2)


JSON_FILE = "dialogues.json"
HTML_FILE = "dialogues.html"
TURNS_FILE = "turns.jsonl"
_ROWS = 12


@dataclass(frozen=True)
class DialogueReport:
    """Results of a run of dialogues. `figures`: the keys of dialogues.json."""

    out: Path
    figures: dict[str, Any]
    turns: Sequence[TurnRecord] = field(repr=False)

    @property
    def ok(self) -> bool:
        """True if turns were completed, none failed or was rejected, and no wrong token was found."""
        f = self.figures
        return bool(f["completed"]) and not (f["failed"] or f["rejected"] or f["wrong_tokens"])

    def write(self, html: str) -> None:
        """Write figures, turns and the page `html` into `out`. Raises OutputUnwritable."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(finite(self.figures), indent=2, ensure_ascii=False, allow_nan=False)
            (self.out / JSON_FILE).write_text(text + "\n", encoding="utf-8")
            with (self.out / TURNS_FILE).open("w", encoding="utf-8") as file:
                for turn in self.turns:
                    file.write(json.dumps(finite(turn.as_json()), ensure_ascii=False, allow_nan=False) + "\n")
            (self.out / HTML_FILE).write_text(html, encoding="utf-8")
        except OSError as error:
            raise OutputUnwritable(f"cannot write the report to {self.out}: {error}") from error


def print_dialogues(report: DialogueReport, console: Console) -> None:
    """Print the totals, a row for some of the turns, and the paths of the files."""
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
    """Return the totals of the run as (name, value) rows."""
    checked = "none (--verify)" if f["wrong_tokens"] is None else say.count(f["verified_turns"])
    return [
        (
            "dialogues, turns",
            f"{say.count(f['dialogues'])}, {say.count(f['turns'])} of {say.count(f['planned_turns'])}",
        ),
        ("completed, rejected, failed", ", ".join(say.count(f[name]) for name in ("completed", "rejected", "failed"))),
        ("cached, of prompts from turn 2 on", say.share(f["share_cached"])),
        ("cached, of the previous turn's history", say.share(f["share_of_history"])),
        ("TTFT of first turns (p50 / p90 / p99)", say.spread(f["first_ttft_s"])),
        ("TTFT of later turns", say.spread(f["later_ttft_s"])),
        ("time between tokens", say.spread(f["tbt_s"])),
        ("dialogues cut to the context", say.count(f["cut_dialogues"])),
        ("answers re-scored", checked),
        ("wrong tokens", say.count(f["wrong_tokens"])),
    ]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one turn's row."""
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
    """Return at most `_ROWS` rows, evenly spaced, including the first and the last."""
    if len(rows) <= _ROWS:
        return list(rows)
    return [rows[round(at * (len(rows) - 1) / (_ROWS - 1))] for at in range(_ROWS)]
