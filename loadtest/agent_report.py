"""Report of a run of agents: figures, files, and the terminal table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from loadtest import figures as say
from loadtest.agent_turns import AgentLoad, AgentTurnRecord
from loadtest.errors import OutputUnwritable
from loadtest.record import SendOutcome
from loadtest.report import finite
from loadtest.summary import PLACES, percentiles, reasons, tokens_by_place
from traces.agents import Agent

JSON_FILE: Final = "agents.json"
TURNS_FILE: Final = "turns.jsonl"
_PLACES: Final = {
    "pages": "workers' own memory",
    "dram": "the host's pool node, memory",
    "ssd": "the host's pool node, SSD",
    "remote": "other pool nodes",
}
_LAST_LINE: Final = (
    *("agents", "ended", "turns", "completed", "rejected", "failed", "unfinished", "lost_turns", "mean_job_s"),
    *("share_cached", "reused_by_tier", "ttft_s", "interrupted"),
)


def summarise_agents(agents: Sequence[Agent], load: AgentLoad) -> dict[str, Any]:
    """Return the figures of agents.json.

    `mean_job_s`: mean seconds from the start to the end of the agents that ended, without the waits for tools. Retries
    after rejections are part of it.
    """
    records, outcomes = load.records, Counter(record.request.outcome for record in load.records)
    completed = [record.request for record in records if record.completed]
    prompts, cached = (sum(getattr(each, name) for each in completed) for name in ("prompt_tokens", "cached_tokens"))
    planned = sum(agent.num_turns() for agent in agents)
    places = [found for each in completed if (found := tokens_by_place(each)) is not None]
    return {
        "agents": len(agents),
        "ended": len(load.jobs_s),
        "planned_turns": planned,
        "turns": len(records),
        "lost_turns": planned - len(completed),
        **{outcome.value: outcomes[outcome] for outcome in SendOutcome},
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "output_tokens": sum(each.output_tokens for each in completed),
        "share_cached": cached / prompts if prompts else None,
        "reused_by_tier": {place: sum(each[place] for each in places) for place in PLACES} if places else None,
        "mean_job_s": fmean(load.jobs_s.values()) if load.jobs_s else None,
        "jobs_s": {str(number): load.jobs_s[number] for number in sorted(load.jobs_s)},
        "ttft_s": percentiles(each.ttft_s for each in completed),
        "tbt_s": percentiles(interval for each in completed for interval in each.intervals_s),
        "reasons": reasons([record.request for record in records]),
    }


def last_line(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures for scripts, printed as the last line of output."""
    return {name: figures[name] for name in _LAST_LINE}


@dataclass(frozen=True)
class AgentReport:
    """Results of a run of agents. `figures`: the keys of agents.json."""

    out: Path
    figures: dict[str, Any]
    turns: Sequence[AgentTurnRecord] = field(repr=False)

    @property
    def ok(self) -> bool:
        """True if all agents completed all their turns."""
        return bool(self.figures["ended"] == self.figures["agents"])

    def write(self) -> None:
        """Write figures and turns into `out`. Raises OutputUnwritable."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(finite(self.figures), indent=2, ensure_ascii=False, allow_nan=False, default=str)
            (self.out / JSON_FILE).write_text(text + "\n", encoding="utf-8")
            with (self.out / TURNS_FILE).open("w", encoding="utf-8") as file:
                for turn in self.turns:
                    file.write(json.dumps(finite(turn.as_json()), ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise OutputUnwritable(f"cannot write the report to {self.out}: {error}") from error


def print_agents(report: AgentReport, console: Console) -> None:
    """Print the totals and the paths of the files."""
    f = report.figures
    console.print(Text("Agents (interrupted)" if f["interrupted"] else "Agents", style="bold"))
    rows = [
        ("agents that ended", f"{say.count(f['ended'])} of {say.count(f['agents'])}"),
        ("turns sent", f"{say.count(f['turns'])} of {say.count(f['planned_turns'])}"),
        ("completed, rejected, failed", ", ".join(say.count(f[name]) for name in ("completed", "rejected", "failed"))),
        ("turns lost", say.count(f["lost_turns"])),
        ("mean job time without tool waits", say.seconds(f["mean_job_s"])),
        ("cached, of all prompts", say.share(f["share_cached"])),
        *((f"  from {_PLACES[place]}", say.count(count)) for place, count in (f["reused_by_tier"] or {}).items()),
        ("TTFT (p50 / p90 / p99)", say.spread(f["ttft_s"])),
        ("time between tokens", say.spread(f["tbt_s"])),
    ]
    for name, value in rows:
        console.print(f"  {name:<38}{value}", highlight=False, markup=False, soft_wrap=True)
    for entry in f["reasons"][:5]:
        console.print(Text(f"{entry['count']} × {entry['outcome']}: {entry['reason']}", style="yellow"))
    for notice in f["notices"]:
        console.print(Text(f"note: {notice}", style="dim"))
    console.print(Text(f"Figures:  {report.out / JSON_FILE}"), soft_wrap=True)
