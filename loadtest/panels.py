"""Pictures of a replay's report and the data they are drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from loadtest import pictures as p
from loadtest.cluster_metrics import ClusterHistory
from loadtest.figures import PLACE_NAMES
from loadtest.objectives import ReplayObjectives
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord, SendOutcome
from loadtest.summary import PLACES, tokens_by_place
from traces import InfiniteCache, reusable_tokens

__all__ = ["Panel", "ReportData"]


@dataclass(frozen=True)
class Panel:
    """Picture with its heading and caption."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class ReportData:
    """Input of the pictures."""

    records: Sequence[RequestRecord]
    requests: Mapping[int, PlannedRequest]
    history: ClusterHistory
    objectives: ReplayObjectives
    tokens_per_block: int
    reuse_by_tier: Mapping[str, Mapping[str, Any]] | None  # as in report.json

    @property
    def completed(self) -> list[RequestRecord]:
        """Completed requests in order of arrival."""
        done = [r for r in self.records if r.outcome is SendOutcome.COMPLETED]
        return sorted(done, key=lambda r: (r.due_s, r.index))


_BINS = 48


def all_panels(evidence: ReportData) -> list[Panel]:
    """Return all pictures of the report."""
    return [
        ttft_distribution(evidence),
        tbt_distribution(evidence),
        ttft_over_time(evidence),
        tbt_over_time(evidence),
        ttft_by_length(evidence),
        hit_rate(evidence),
        *reuse_panels(evidence),
        load(evidence),
        kv_bytes(evidence),
        outcomes(evidence),
        lateness(evidence),
    ]


def ttft_distribution(e: ReportData) -> Panel:
    """Draw the CDF of TTFT, and that of unloaded requests."""
    with p.picture("ttft-distribution", x="time to first token", y="share of requests") as pic:
        if e.objectives.unloaded:
            p.distribution(pic.axes, [t for _, t in e.objectives.unloaded.samples], color=p.MUTED, label="unloaded")
        p.distribution(pic.axes, [r.ttft_s for r in e.completed], color=p.BLUE, label="replay")
        _log_seconds_x(pic, drawn=bool(pic.axes.lines))
    return Panel("Time to first token", "Share of requests at or below; dots at p50, p90, p99.", pic.svg)


def tbt_distribution(e: ReportData) -> Panel:
    """Draw the CDFs of all intervals and of each request's longest tenth."""
    with p.picture("tbt-distribution", x="time between tokens", y="share") as pic:
        intervals = [i for r in e.completed for i in r.intervals_s]
        p.distribution(pic.axes, intervals, color=p.BLUE, label="all intervals")
        worst = [r.tbt_worst10_s for r in e.completed]
        p.distribution(pic.axes, worst, color=p.ORANGE, label="longest tenth, per request")
        if math.isfinite(e.objectives.tbt_objective_s):
            pic.axes.axvline(e.objectives.tbt_objective_s, color=p.RED, linestyle="--", label="objective")
        _log_seconds_x(pic, drawn=bool(intervals))
    return Panel("Time between tokens", "The objective applies to the mean of a request's longest tenth.", pic.svg)


def ttft_over_time(e: ReportData) -> Panel:
    """Draw the TTFT of each request by arrival, coloured by whether it met its objective."""
    with p.picture("ttft-over-time", x="arrival, seconds of replay", y="time to first token") as pic:
        if e.objectives.known:
            met = [r for r in e.completed if e.objectives.meets_ttft(r)]
            missed = [r for r in e.completed if not e.objectives.meets_ttft(r)]
        else:
            met, missed = e.completed, []
        for group, color, label in ((met, p.BLUE, "within objective"), (missed, p.ORANGE, "over objective")):
            if group:
                name = label if e.objectives.known else "requests"
                p.points(pic.axes, [r.due_s for r in group], [r.ttft_s for r in group], color=color, label=name)
        _running_p90(pic, [r.due_s for r in e.completed], [r.ttft_s for r in e.completed])
    return Panel("Time to first token over time", "One dot per request; the line is the running p90.", pic.svg)


def tbt_over_time(e: ReportData) -> Panel:
    """Draw each request's mean of its longest tenth of intervals, by arrival."""
    with p.picture("tbt-over-time", x="arrival, seconds of replay", y="time between tokens") as pic:
        some = [r for r in e.completed if r.intervals_s]
        x, y = [r.due_s for r in some], [r.tbt_worst10_s for r in some]
        p.points(pic.axes, x, y, color=p.BLUE, label="longest tenth of a request")
        if math.isfinite(e.objectives.tbt_objective_s):
            pic.axes.axhline(e.objectives.tbt_objective_s, color=p.RED, linestyle="--", label="objective")
        _running_p90(pic, x, y)
    return Panel("Time between tokens over time", "Mean of each request's longest tenth; line: running p90.", pic.svg)


def ttft_by_length(e: ReportData) -> Panel:
    """Draw TTFT against prompt length, with the unloaded fit and the objective."""
    with p.picture("ttft-by-length", x="prompt tokens", y="time to first token") as pic:
        reused = [r for r in e.completed if 2 * r.cached_tokens > r.prompt_tokens]
        fresh = [r for r in e.completed if 2 * r.cached_tokens <= r.prompt_tokens]
        for group, color, label in ((fresh, p.BLUE, "mostly computed"), (reused, p.GREEN, "mostly reused")):
            if group:
                x, y = [float(r.prompt_tokens) for r in group], [r.ttft_s for r in group]
                p.points(pic.axes, x, y, color=color, label=label)
        lengths = np.linspace(1, max((r.prompt_tokens for r in e.completed), default=1), 100)
        if e.objectives.unloaded:
            fit = [e.objectives.unloaded.ttft_of(int(n)) for n in lengths]
            pic.axes.plot(lengths, fit, color=p.INK, label="unloaded")
        if e.objectives.known:
            bound = [e.objectives.ttft_of(int(n)) for n in lengths]
            pic.axes.plot(lengths, bound, color=p.RED, linestyle="--", label="objective")
        _log_seconds_y(pic, drawn=bool(e.completed))
    caption = "The default objective is relative to an unloaded request of the same length."
    return Panel("Time to first token by prompt length", caption, pic.svg)


def hit_rate(e: ReportData) -> Panel:
    """Draw the cumulative token hit rate against that of an infinite cache."""
    cache, hit, ideal, total = InfiniteCache(), 0, 0, 0
    x, actual, best = [], [], []
    for record in e.completed:
        request = e.requests[record.index]
        known = cache.match_and_insert(request.block_ids)
        ideal += reusable_tokens(known, record.prompt_tokens, e.tokens_per_block)
        hit += record.cached_tokens
        total += record.prompt_tokens
        x.append(record.due_s)
        actual.append(hit / total)
        best.append(ideal / total)
    with p.picture("hit-rate", x="arrival, seconds of replay", y="prompt tokens reused") as pic:
        step = -(-len(x) // p.MAX_POINTS) or 1
        pic.axes.plot(x[::step], best[::step], color=p.MUTED, linestyle="--", label="infinite cache")
        pic.axes.plot(x[::step], actual[::step], color=p.GREEN, label="cluster")
        pic.axes.set_ylim(0, None)
        p.share_axis(pic.axes)
        p.legend(pic.axes)
    return Panel("Prefix hit rate", "Cumulative, in tokens, compared with an infinite cache.", pic.svg)


def load(e: ReportData) -> Panel:
    """Draw the requests running and waiting per role, and those in flight at the client."""
    with p.picture("load", x="seconds of replay", y="requests") as pic:
        for color, role in zip(p.SERIES, e.history.roles(), strict=False):
            name = role or "server"
            for what, style in (("running", "-"), ("waiting", ":")):
                times, values = p.averaged(*e.history.load_of(role, what))
                if any(values):
                    label = f"{name} {what}"
                    pic.axes.plot(times, values, color=color, linestyle=style, linewidth=1.3, label=label)
        times, values = in_flight(e.records)
        if times:
            pic.axes.plot(times, values, color=p.MUTED, linewidth=0.9, label="in flight", zorder=1)
        pic.axes.set_ylim(0, None)
        p.legend(pic.axes)
    return Panel("Load", "Running and waiting as reported by the nodes; in flight as counted by the client.", pic.svg)


def kv_bytes(e: ReportData) -> Panel:
    """Draw the cumulative KV bytes by path."""
    with p.picture("kv-bytes", x="seconds of replay", y="KV bytes moved") as pic:
        moved = {path: total for path, total in e.history.kv_bytes_by_path.items() if total}
        if moved:
            times = e.history.increases_of(next(iter(moved)))[0]
            stack = [e.history.increases_of(path)[1] for path in moved]
            colors = p.SERIES[: len(stack)]
            pic.axes.stackplot(times, stack, colors=colors, labels=list(moved), alpha=0.8, linewidth=0)
        pic.axes.set_ylim(0, None)
        p.size_axis(pic.axes)
        p.legend(pic.axes)
    caption = "Pushed prefill → decode, pulled by decode nodes, loaded from and stored to pools; cumulative."
    return Panel("KV moved, by path", caption, pic.svg)


def outcomes(e: ReportData) -> Panel:
    """Draw the arrivals per time bin, by outcome."""
    with p.picture("outcomes", x="arrival, seconds of replay", y="requests per second") as pic:
        last = max((r.due_s for r in e.records), default=0.0)
        edges = np.linspace(0, max(last, 1e-3), _BINS + 1)
        width = float(edges[1])
        below = np.zeros(_BINS)
        styles = {
            SendOutcome.COMPLETED: p.BLUE,
            SendOutcome.REJECTED: p.ORANGE,
            SendOutcome.FAILED: p.RED,
            SendOutcome.UNFINISHED: p.MUTED,
        }
        for outcome, color in styles.items():
            arrivals = [r.due_s for r in e.records if r.outcome is outcome]
            if arrivals:
                rate = np.histogram(arrivals, edges)[0] / width
                label = f"{outcome.value} {len(arrivals):,}"
                pic.axes.bar(edges[:-1], rate, width * 0.86, below, align="edge", color=color, label=label)
                below = below + rate
        p.legend(pic.axes)
    return Panel("Arrivals by outcome", "By time of arrival; rejections are HTTP 429.", pic.svg)


def lateness(e: ReportData) -> Panel:
    """Draw the CDF of the lateness of sending."""
    with p.picture("lateness", x="lateness of sending", y="share of requests") as pic:
        p.distribution(pic.axes, [r.lateness_s for r in e.records], color=p.PURPLE, label="requests")
        _log_seconds_x(pic, drawn=bool(e.records))
    return Panel(
        "Lateness of sending",
        "Delay of sending after the due time; an open loop does not wait for the server.",
        pic.svg,
    )


def in_flight(records: Sequence[RequestRecord], *, steps: int = 400) -> tuple[list[float], list[float]]:
    """Return (times, requests in flight) at evenly spaced times."""
    sent = np.sort([r.sent_s for r in records if math.isfinite(r.sent_s)])
    ended = np.sort([r.end_s for r in records if math.isfinite(r.end_s)])
    if not len(sent):
        return [], []
    times = np.linspace(sent[0], max(sent[-1], ended[-1] if len(ended) else sent[-1]), steps)
    flying = np.searchsorted(sent, times, side="right") - np.searchsorted(ended, times, side="right")
    return list(times), list(flying.astype(float))


def _running_p90(pic: p.Picture, x: Sequence[float], y: Sequence[float]) -> None:
    centres, values = p.running(x, y, share=0.9)
    if any(a != b for a, b in pairwise(centres)):
        pic.axes.plot(centres, values, color=p.INK, linewidth=1.4, label="running p90")
    _log_seconds_y(pic, drawn=bool(x))


def _log_seconds_x(pic: p.Picture, *, drawn: bool) -> None:
    """Set up a logarithmic x axis of durations; linear if nothing is drawn, since matplotlib cannot scale it."""
    if drawn:
        pic.axes.set_xscale("log")
    p.seconds_axis(pic.axes, "x")
    p.share_axis(pic.axes)
    pic.axes.set_ylim(0, 1.03)
    p.legend(pic.axes)


def _log_seconds_y(pic: p.Picture, *, drawn: bool) -> None:
    """Set up a logarithmic y axis of durations, like `_log_seconds_x`."""
    if drawn:
        pic.axes.set_yscale("log")
    p.seconds_axis(pic.axes)
    p.legend(pic.axes)


_REUSE_BINS = 60
_COLORS = dict(zip(PLACES, (p.BLUE, p.GREEN, p.ORANGE, p.PURPLE), strict=True))


def reuse_panels(e: ReportData) -> list[Panel]:
    """Return the pictures of reuse by tier; empty if the server does not report it."""
    return [] if e.reuse_by_tier is None else [reused_over_time(e), saved_by_tier(e)]


def reused_over_time(e: ReportData) -> Panel:
    """Draw the share of reused prompt tokens by place, over bins of arrival time."""
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


def saved_by_tier(e: ReportData) -> Panel:
    """Draw the estimated seconds of computation saved per place, beside the seconds of loading."""
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
    caption = "Coloured: estimated time to compute the reused tokens; grey: time to load them."
    return Panel("Time saved by reuse", caption, pic.svg)
