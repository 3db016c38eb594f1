"""HTML page of a replay's report: figures, pictures and definitions, self-contained and without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import figures
from loadtest.cluster_metrics import ClusterHistory
from loadtest.html import render
from loadtest.objectives import ReplayObjectives
from loadtest.panels import Panel, ReportData, all_panels
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord

_DEFINITIONS = (
    "TTFT is the time from sending a request to its first token. Time between tokens is measured at the client, per "
    "token, and includes the hand-off from prefill to decode.",
    "The hit rate is the fraction of prompt tokens that the server reports as cached_tokens, over completed requests. "
    "The ideal is the hit rate of an infinite cache on the same requests in order of arrival: full blocks only, "
    "inserted at arrival, the last prompt token always computed. Requests that overlap in time cannot reuse each "
    "other's prefix, so a live cluster stays below it.",
    "The time saved by reuse is an estimate: the prefill time that the reused tokens would have taken, from a fit over "
    "computed tokens, minus the loading time. It is a sum over requests, which ran concurrently.",
    "Rejected and failed requests count as missing their objectives.",
)


def write_page(
    path: Path,
    report: Mapping[str, Any],
    records: Sequence[RequestRecord],
    requests: Mapping[int, PlannedRequest],
    *,
    history: ClusterHistory,
    objectives: ReplayObjectives,
) -> None:
    """Draw the pictures and write the page."""
    tokens_per_block = report["settings"]["tokens_per_block"]
    evidence = ReportData(records, requests, history, objectives, tokens_per_block, report["reuse_by_tier"])
    path.write_text(page(report, all_panels(evidence)), encoding="utf-8")


def page(report: Mapping[str, Any], panels: Sequence[Panel]) -> str:
    """Return the HTML document."""
    return render(
        "replay.html",
        title=_title(report),
        lead=_lead(report),
        invalid_reasons=report["invalid_reasons"],
        notices=report["notices"],
        interrupted=report["interrupted"],
        tiles=_tiles(report),
        panels=panels,
        tables=figures.rows(report),
        reasons=report["reasons"],
        definitions=(f"Objectives: {report['slo_rule']}.", *_DEFINITIONS),
    )


def _title(report: Mapping[str, Any]) -> str:
    invalid = "" if report["valid"] else "INVALID: "
    return f"{invalid}Replay of {Path(report['settings']['trace']).name}"


def _lead(report: Mapping[str, Any]) -> str:
    s = report["settings"]
    return (
        f"{report['requests']:,} requests at {s['speed']:g}× the trace's speed against {s['model']} at {s['url']}; "
        f"{s['tokens_per_block']} tokens per block, {s['sampled_fraction']:.0%} sampled at temperature "
        f"{s['temperature']:g}, the others greedy; seed {s['seed']}."
    )


@dataclass(frozen=True)
class _ReportTile:
    """Headline figure. `kind` is a CSS class: "good", "bad" or ""."""

    name: str
    value: str
    more: str
    kind: str = ""


def _tiles(report: Mapping[str, Any]) -> list[_ReportTile]:
    r = report
    lost = r["rejected"] + r["failed"]
    ideal = f"ideal {figures.share(r['ideal_prefix_hit_rate'])}"
    goodput = "–" if r["goodput_rps"] is None else f"{r['goodput_rps']:.2f}/s"
    tiles = [
        _ReportTile("completed", figures.count(r["completed"]), f"of {r['requests']:,} sent"),
        _ReportTile(
            "rejected, failed",
            f"{r['rejected']:,}, {r['failed']:,}",
            "HTTP 429, errors",
            "bad" if r["failed"] else "" if lost else "good",
        ),
        _ReportTile("prefix hit rate", figures.share(r["prefix_hit_rate"]), ideal),
        _ReportTile("TTFT p50", figures.seconds(r["ttft_s"]["p50"]), f"p90 {figures.seconds(r['ttft_s']['p90'])}"),
        _ReportTile("TBT p50", figures.seconds(r["tbt_s"]["p50"]), f"p90 {figures.seconds(r['tbt_s']['p90'])}"),
        _ReportTile("goodput", goodput, f"{figures.share(r['slo_attainment'])} meet both objectives"),
        _ReportTile("KV moved", figures.size(r["kv_bytes_moved"]), "pushed, pulled, loaded, stored"),
    ]
    if r["verification"] is not None:
        wrong = r["wrong_tokens"]
        looked_at = f"{r['verified_requests']:,} answers re-scored, {r['near_ties']} near-ties"
        tiles.append(_ReportTile("wrong tokens", figures.count(wrong), looked_at, "bad" if wrong else "good"))
    return tiles
