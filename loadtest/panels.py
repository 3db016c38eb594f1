"""Which pictures the report shows, and what is drawn in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from loadtest import pictures as p
from loadtest.evidence import Evidence, Panel
from loadtest.record import Outcome, RequestRecord
from loadtest.reuse_panels import reuse_panels
from traces import InfiniteCache, reusable_tokens

_BINS = 48


def all_panels(evidence: Evidence) -> list[Panel]:
    """Every picture of the report."""
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


def ttft_distribution(e: Evidence) -> Panel:
    """CDF of TTFT, beside that of lone requests."""
    with p.picture("ttft-distribution", x="time to first token", y="share of requests") as pic:
        if e.objectives.unloaded:
            p.distribution(pic.axes, [t for _, t in e.objectives.unloaded.samples], color=p.MUTED, label="unloaded")
        p.distribution(pic.axes, [r.ttft_s for r in e.completed], color=p.BLUE, label="replay")
        _log_seconds_x(pic, drawn=bool(pic.axes.lines))
    return Panel("Time to first token", "Share of requests at or below; dots at p50, p90, p99.", pic.svg)


def tbt_distribution(e: Evidence) -> Panel:
    """CDFs of all intervals and of each request's worst tenth."""
    with p.picture("tbt-distribution", x="time between tokens", y="share") as pic:
        intervals = [i for r in e.completed for i in r.intervals_s]
        p.distribution(pic.axes, intervals, color=p.BLUE, label="all intervals")
        worst = [r.tbt_worst10_s for r in e.completed]
        p.distribution(pic.axes, worst, color=p.ORANGE, label="longest tenth, per request")
        if math.isfinite(e.objectives.tbt_objective_s):
            pic.axes.axvline(e.objectives.tbt_objective_s, color=p.RED, linestyle="--", label="objective")
        _log_seconds_x(pic, drawn=bool(intervals))
    return Panel("Time between tokens", "The objective holds for the mean of a request's longest tenth.", pic.svg)


def ttft_over_time(e: Evidence) -> Panel:
    """TTFT of each request by arrival, apart by whether it met its objective."""
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


def tbt_over_time(e: Evidence) -> Panel:
    """Worst tenth of intervals of each request by arrival."""
    with p.picture("tbt-over-time", x="arrival, seconds of replay", y="time between tokens") as pic:
        some = [r for r in e.completed if r.intervals_s]
        x, y = [r.due_s for r in some], [r.tbt_worst10_s for r in some]
        p.points(pic.axes, x, y, color=p.BLUE, label="longest tenth of a request")
        if math.isfinite(e.objectives.tbt_objective_s):
            pic.axes.axhline(e.objectives.tbt_objective_s, color=p.RED, linestyle="--", label="objective")
        _running_p90(pic, x, y)
    return Panel("Time between tokens over time", "Mean of each request's longest tenth; line: running p90.", pic.svg)


def ttft_by_length(e: Evidence) -> Panel:
    """TTFT against prompt length, with the unloaded fit and the objective."""
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
    caption = "The objective of each request follows the lone request of its length."
    return Panel("Time to first token by prompt length", caption, pic.svg)


def hit_rate(e: Evidence) -> Panel:
    """Cumulative token hit rate against the infinite cache's."""
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
    return Panel("Prefix hit rate", "Cumulative, in tokens, against a cache that forgets nothing.", pic.svg)


def load(e: Evidence) -> Panel:
    """Requests running and waiting per role, and in flight at the client."""
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
    return Panel("Load", "Running and waiting as the nodes report them; in flight as the client sees it.", pic.svg)


def kv_bytes(e: Evidence) -> Panel:
    """Cumulative KV bytes by path."""
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


def outcomes(e: Evidence) -> Panel:
    """Arrivals per bin of time, by how they ended."""
    with p.picture("outcomes", x="arrival, seconds of replay", y="requests per second") as pic:
        last = max((r.due_s for r in e.records), default=0.0)
        edges = np.linspace(0, max(last, 1e-3), _BINS + 1)
        width = float(edges[1])
        below = np.zeros(_BINS)
        styles = {
            Outcome.COMPLETED: p.BLUE,
            Outcome.REJECTED: p.ORANGE,
            Outcome.FAILED: p.RED,
            Outcome.UNFINISHED: p.MUTED,
        }
        for outcome, color in styles.items():
            arrivals = [r.due_s for r in e.records if r.outcome is outcome]
            if arrivals:
                rate = np.histogram(arrivals, edges)[0] / width
                label = f"{outcome.value} {len(arrivals):,}"
                pic.axes.bar(edges[:-1], rate, width * 0.86, below, align="edge", color=color, label=label)
                below = below + rate
        p.legend(pic.axes)
    return Panel("Arrivals and how they ended", "By time of arrival; rejections are HTTP 429.", pic.svg)


def lateness(e: Evidence) -> Panel:
    """CDF of how late requests were sent."""
    with p.picture("lateness", x="lateness of sending", y="share of requests") as pic:
        p.distribution(pic.axes, [r.lateness_s for r in e.records], color=p.PURPLE, label="requests")
        _log_seconds_x(pic, drawn=bool(e.records))
    return Panel(
        "Lateness of sending", "An open loop must not wait for the server: how far it kept its times.", pic.svg
    )


def in_flight(records: Sequence[RequestRecord], *, steps: int = 400) -> tuple[list[float], list[float]]:
    """(times, requests sent and not ended) at evenly spaced times."""
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
    """A logarithmic axis of durations; of an axis without values matplotlib makes no logarithm."""
    if drawn:
        pic.axes.set_xscale("log")
    p.seconds_axis(pic.axes, "x")
    p.share_axis(pic.axes)
    pic.axes.set_ylim(0, 1.03)
    p.legend(pic.axes)


def _log_seconds_y(pic: p.Picture, *, drawn: bool) -> None:
    """As `_log_seconds_x`, for the other axis."""
    if drawn:
        pic.axes.set_yscale("log")
    p.seconds_axis(pic.axes)
    p.legend(pic.axes)
