"""HTML page of a dialogue run's report: figures and pictures by turn, self-contained and without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from loadtest import figures as say
from loadtest import pictures as p
from loadtest.dialogue_report import cells, totals
from loadtest.dialogue_turns import TurnRecord
from loadtest.html import render
from loadtest.panels import Panel

_HEADINGS = ("turn", "prompt tokens", "cached", "of prompt", "of history", "answer tokens", "TTFT p50", "TTFT p90")
_DEFINITIONS = (
    "Each question is sent after the previous answer, which becomes part of the history as text.",
    "Cached tokens are as reported by the server. History is the prompt and answer of the previous turn without the "
    "answer's last token, which is all that a turn can reuse. Servers reuse whole blocks, so 100 % is not reachable.",
    "First turns have no history and are excluded from both shares.",
)


def dialogue_page(f: Mapping[str, Any], turns: Sequence[TurnRecord]) -> str:
    """Return the HTML document."""
    s = f["settings"]
    lead = (
        f"{f['dialogues']:,} dialogues of {s['turns']:,} turns, {s['dialogues']:,} at a time, against {s['model']} at "
        f"{s['url']}; think time {say.seconds(s['think_time_s'])}, questions of {s['turn_tokens']} and answers of at "
        f"most {s['answer_tokens']} tokens on average, temperature {s['temperature']:g}; seed {s['seed']}."
    )
    return render(
        "dialogues.html",
        title="Dialogues",
        lead=lead,
        notices=f["notices"],
        interrupted=f["interrupted"],
        panels=panels(f, turns),
        totals=totals(f),
        headings=_HEADINGS,
        rows=[cells(row) for row in f["by_turn"]],
        definitions=_DEFINITIONS,
    )


def panels(f: Mapping[str, Any], turns: Sequence[TurnRecord]) -> list[Panel]:
    """Return all pictures of the page."""
    rows = f["by_turn"]
    return [_tokens(rows), _shares(rows), _ttft(rows, turns)]


def _tokens(rows: Sequence[Mapping[str, Any]]) -> Panel:
    with p.picture("tokens-by-turn", x="turn", y="tokens, mean") as pic:
        at = [row["turn"] for row in rows]
        prompt, cached = ([row[name] for row in rows] for name in ("prompt_tokens", "cached_tokens"))
        pic.axes.fill_between(at, cached, color=p.BLUE, alpha=0.25, linewidth=0, label="reused")
        pic.axes.fill_between(at, cached, prompt, color=p.ORANGE, alpha=0.55, linewidth=0, label="computed")
        pic.axes.plot(at, prompt, color=p.INK, linewidth=1.2, label="prompt")
        pic.axes.set_ylim(bottom=0)
        _by_turn(pic)
    return Panel(
        "The prompt of each turn", "The history grows with each turn; the reused part need not be computed.", pic.svg
    )


def _shares(rows: Sequence[Mapping[str, Any]]) -> Panel:
    with p.picture("shares-by-turn", x="turn", y="share cached") as pic:
        for name, label, color in (
            ("share_cached", "of the prompt", p.BLUE),
            ("share_of_history", "of the previous turn's history", p.GREEN),
        ):
            shown = [(row["turn"], row[name]) for row in rows if row[name] is not None]
            pic.axes.plot([x for x, _ in shown], [y for _, y in shown], ".-", color=color, label=label)
        pic.axes.set_ylim(0, 1.03)
        p.share_axis(pic.axes)
        _by_turn(pic)
    return Panel("Share of tokens reused", "From the second turn on; only whole blocks are reused.", pic.svg)


def _ttft(rows: Sequence[Mapping[str, Any]], turns: Sequence[TurnRecord]) -> Panel:
    with p.picture("ttft-by-turn", x="turn", y="time to first token") as pic:
        seen = [t for t in turns if t.completed and t.request.token_times]
        p.points(
            pic.axes, [t.turn + 1 for t in seen], [t.request.ttft_s for t in seen], color=p.MUTED, label="each turn"
        )
        shown = [row for row in rows if row["ttft_s"]["p50"] is not None]
        median = [max(p.LEAST_S, row["ttft_s"]["p50"]) for row in shown]
        pic.axes.plot([row["turn"] for row in shown], median, color=p.BLUE, label="median")
        if shown:
            pic.axes.set_yscale("log")
            p.seconds_axis(pic.axes)
        _by_turn(pic)
    return Panel("Time to first token", "With reuse, it depends little on the length of the history.", pic.svg)


def _by_turn(pic: p.Picture) -> None:
    pic.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    p.legend(pic.axes)
