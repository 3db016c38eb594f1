"""The pictures of where reused KV came from and what that saved."""

from __future__ import annotations

import numpy as np

from loadtest import pictures as p
from loadtest.evidence import Evidence, Panel
from loadtest.figures import PLACE_NAMES
from loadtest.reuse import PLACES, tokens_by_place

_REUSE_BINS = 60
_COLORS = dict(zip(PLACES, (p.BLUE, p.GREEN, p.ORANGE, p.PURPLE), strict=True))


def reuse_panels(e: Evidence) -> list[Panel]:
    """Both, or none where the server does not tell."""
    return [] if e.reuse_by_tier is None else [reused_over_time(e), saved_by_tier(e)]


def reused_over_time(e: Evidence) -> Panel:
    """Share of prompt tokens that were reused, by place, over bins of arrival."""
    found = [(r, places) for r in e.completed if (places := tokens_by_place(r)) is not None]
    edges = np.linspace(0, max((r.due_s for r, _ in found), default=0.0) + 1e-3, _REUSE_BINS + 1)
    at = [r.due_s for r, _ in found]
    prompt = np.histogram(at, edges, weights=[r.prompt_tokens for r, _ in found])[0]
    with p.picture("reuse-over-time", x="arrival, seconds of replay", y="prompt tokens reused") as pic:
        below = np.zeros(_REUSE_BINS)
        for place in PLACES:
            tokens = np.histogram(at, edges, weights=[places[place] for _, places in found])[0]
            share = np.divide(tokens, prompt, out=np.zeros(_REUSE_BINS), where=prompt > 0)
            if tokens.any():
                width = float(edges[1]) * 0.9
                pic.axes.bar(
                    edges[:-1], share, width, below, align="edge", color=_COLORS[place], label=PLACE_NAMES[place]
                )
                below += share
        pic.axes.set_ylim(0, None)
        p.share_axis(pic.axes)
        p.legend(pic.axes)
    return Panel("Where reused KV came from", "Share of the prompts' tokens, by time of arrival.", pic.svg)


def saved_by_tier(e: Evidence) -> Panel:
    """Estimated seconds of computing per place, beside those of loading."""
    assert e.reuse_by_tier is not None
    shown = [place for place in PLACES if e.reuse_by_tier[place]["tokens"]]
    with p.picture("saved-by-tier", x="", y="seconds, all requests") as pic:
        for i, place in enumerate(shown):
            facts = e.reuse_by_tier[place]
            pic.axes.bar(i - 0.2, facts["compute_s"] or 0.0, 0.36, color=_COLORS[place])
            pic.axes.bar(i + 0.2, facts["load_s"], 0.36, color=p.MUTED)
            for x, value in ((i - 0.2, facts["compute_s"]), (i + 0.2, facts["load_s"])):
                text = "–" if value is None else f"{value:.3g} s"
                pic.axes.annotate(text, (x, value or 0.0), (0, 2), textcoords="offset points", ha="center", fontsize=9)
        names = [f"{PLACE_NAMES[place]}\n{e.reuse_by_tier[place]['tokens']:,} tokens" for place in shown]
        pic.axes.set_xticks(range(len(shown)), names)
        pic.axes.set_xlim(-0.6, max(len(shown), 1) - 0.4)
        pic.axes.grid(visible=False, axis="x")
        pic.axes.margins(y=0.15)
        pic.axes.set_ylim(0, None)
    caption = "Coloured: what computing the reused tokens would have taken, by a fit; grey: what loading them took."
    return Panel("What reuse saved", caption, pic.svg)
