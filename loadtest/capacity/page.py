"""HTML page of a capacity search: the result, attainment and goodput by rate, and the steps."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest import pictures as p
from loadtest.capacity.runner import CapacityResult
from loadtest.capacity.search import CapacityStep, StepVerdict
from loadtest.html import render
from loadtest.panels import Panel

_COLORS = {StepVerdict.PASS: p.GREEN, StepVerdict.FAIL: p.RED, StepVerdict.INVALID: p.MUTED}
_LABELS = {StepVerdict.PASS: "met", StepVerdict.FAIL: "missed", StepVerdict.INVALID: "invalid"}


def headline(result: CapacityResult) -> str:
    """Return the result in one line; an invalid result starts with INVALID."""
    rate, finding = result.finding.rate, result.finding
    if result.interrupted:
        text = f"interrupted; so far {rate:.3g} requests/s" if rate else "interrupted before any rate had met"
    elif rate is None:
        text = "none: the lowest rate missed the objectives" if finding.bounded else "none: no rate could be sent"
    else:
        text = f"{rate:.3g} requests/s" if finding.bounded else f"at least {rate:.3g} requests/s"
    return f"{'INVALID ' if result.invalid_reasons else ''}Capacity: {text}"


def step_line(number: int, step: CapacityStep) -> str:
    """Return one step as a line for the terminal."""
    latencies = ", ".join(f"{m.upper()} {'–' if v is None else f'{v:.0f} ms'}" for m, v in step.latency_ms.items())
    why = f" ({'; '.join(step.reasons)})" if step.reasons else ""
    return (
        f"step {number}: {step.rate:.3g} requests/s {_LABELS[step.verdict].upper()}: {latencies}, "
        f"{step.attainment:.1%} within bounds{why}"
    )


def capacity_page(result: CapacityResult) -> str:
    """Return the HTML document."""
    return render(
        "capacity.html",
        title=headline(result),
        lead=f"{result.model}: {result.objective.describe()}.",
        invalid_reasons=result.invalid_reasons,
        notices=result.notices,
        panels=[_attainment(result), *_latencies(result)],
        steps=result.steps,
        labels=_LABELS,
    )


def _attainment(result: CapacityResult) -> Panel:
    with p.picture("attainment", x="requests per second sent", y="share of requests") as pic:
        _steps(pic, result, [(step, step.attainment) for step in result.steps])
        if result.steps:
            _goodput(pic, result.steps)
        pic.axes.set_ylim(0, 1.03)
        p.share_axis(pic.axes)
        p.legend(pic.axes)
    return Panel(
        "Attainment and goodput by rate", "Share of evaluated requests within every bound; one dot per step.", pic.svg
    )


def _goodput(pic: p.Picture, steps: Sequence[CapacityStep]) -> None:
    """Draw the goodput on a separate axis at the right."""
    right = pic.axes.twinx()
    right.plot(*_means([(step.rate, step.goodput_rps) for step in steps]), color=p.BLUE, linestyle=":")
    right.set_ylabel("goodput, requests per second")
    right.set_ylim(0, None)
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
    pic.axes.plot([], [], color=p.BLUE, linestyle=":", label="goodput (right)")


def _latencies(result: CapacityResult) -> list[Panel]:
    cards = []
    for metric, bound in result.objective.bounds_ms.items():
        with p.picture(f"latency-{metric}", x="requests per second sent", y=f"p{result.objective.percentile:g}") as pic:
            known = [(step, ms / 1000) for step in result.steps if (ms := step.latency_ms[metric]) is not None]
            _steps(pic, result, known)
            pic.axes.axhline(bound / 1000, color=p.RED, linestyle="--", label="bound")
            if known:
                pic.axes.set_yscale("log")
            p.seconds_axis(pic.axes)
            p.legend(pic.axes)
        cards.append(Panel(f"{metric.upper()} by rate", "At the objective's percentile; one dot per step.", pic.svg))
    return cards


def _steps(pic: p.Picture, result: CapacityResult, values: Sequence[tuple[CapacityStep, float]]) -> None:
    rates, means = _means([(step.rate, value) for step, value in values])
    pic.axes.plot(rates, means, color=p.MUTED, linewidth=1.0)
    for verdict, color in _COLORS.items():
        found = [(step.rate, value) for step, value in values if step.verdict is verdict]
        if found:
            x, y = zip(*found, strict=True)
            pic.axes.plot(x, y, "o", color=color, label=_LABELS[verdict], markersize=5, clip_on=False)
    if result.finding.rate is not None:
        pic.axes.axvline(result.finding.rate, color=p.INK, linewidth=0.9, label="capacity")


def _means(values: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the rates in ascending order and the mean value over the steps at each."""
    by_rate: dict[float, list[float]] = {}
    for rate, value in sorted(values):
        by_rate.setdefault(rate, []).append(value)
    return list(by_rate), [sum(some) / len(some) for some in by_rate.values()]
