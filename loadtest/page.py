"""The report as one HTML page: figures, pictures and what they mean; no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from loadtest import figures
from loadtest.cluster_metrics import ClusterHistory
from loadtest.evidence import Evidence, Panel
from loadtest.objectives import Objectives
from loadtest.panels import all_panels
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord

_INTERRUPTED = "The replay was interrupted; these are the figures up to then."
_INVALID = "this run does not tell how the server is. Its figures are not to be used."
_DEFINITIONS = (
    "TTFT runs from sending a request to its first token. Time between tokens is taken at the client, per token, the "
    "hand-off from prefill to decode included.",
    "The hit rate is in prompt tokens, as the server reports them (cached_tokens), over completed requests. The ideal "
    "is an infinite cache's on the same requests in order of arrival: full blocks only, inserted at arrival, the last "
    "prompt token always computed. Requests that overlap in time cannot reuse each other's prefix, so a live cluster "
    "stays below.",
    "What reuse saved is an estimate: prefill seconds, fitted over computed tokens, tell what computing the "
    "reused ones would have taken; the time that loading took is taken off. Sums over requests that ran side by side.",
    "Rejected and failed requests count as missing their objectives.",
)


def write_page(
    path: Path,
    report: Mapping[str, Any],
    records: Sequence[RequestRecord],
    requests: Mapping[int, PlannedRequest],
    *,
    history: ClusterHistory,
    objectives: Objectives,
) -> None:
    """Draw the pictures and write the page."""
    tokens_per_block = report["settings"]["tokens_per_block"]
    evidence = Evidence(records, requests, history, objectives, tokens_per_block, report["reuse_by_tier"])
    path.write_text(page(report, all_panels(evidence)), encoding="utf-8")


def page(report: Mapping[str, Any], panels: Sequence[Panel]) -> str:
    """The whole HTML document."""
    css = resources.files("loadtest").joinpath("data", "page.css").read_text(encoding="utf-8")
    invalid = invalid_banner(report["invalid_reasons"])
    interrupted = f'<p class="notice">{_INTERRUPTED}</p>' if report["interrupted"] else ""
    notices = "".join(f'<p class="lead">{escape(text)}</p>' for text in report["notices"])
    cards = "".join(_picture(panel) for panel in panels)
    tables = "".join(_table(name, rows) for name, rows in figures.rows(report)) + _reasons(report)
    definitions = "".join(f"<p>{escape(text)}</p>" for text in (f"Objectives: {report['slo_rule']}.", *_DEFINITIONS))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(_title(report))}</title>
<style>
{css}</style>
</head>
<body>
<main>
<h1>{escape(_title(report))}</h1>
<p class="lead">{escape(_lead(report))}</p>
{invalid}
{notices}
{interrupted}
<section class="tiles">{"".join(_tiles(report))}</section>
<section class="pictures">{cards}</section>
<section class="tables">{tables}</section>
<footer>{definitions}</footer>
</main>
</body>
</html>
"""


def invalid_banner(reasons: Sequence[str]) -> str:
    """Why the figures are not to be used; nothing for a valid run."""
    if not reasons:
        return ""
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<div class="invalid" role="alert"><strong>INVALID</strong>: {_INVALID}<ul>{listed}</ul></div>'


def _title(report: Mapping[str, Any]) -> str:
    invalid = "" if report["valid"] else "INVALID: "
    return f"{invalid}Replay of {Path(report['settings']['trace']).name}"


def _lead(report: Mapping[str, Any]) -> str:
    s = report["settings"]
    return (
        f"{report['requests']:,} requests at {s['speed']:g}× the trace's speed against {s['model']} at {s['url']}; "
        f"{s['tokens_per_block']} tokens per block, {s['sampled_fraction']:.0%} drawn at temperature "
        f"{s['temperature']:g}, the rest greedy; seed {s['seed']}."
    )


def _tiles(report: Mapping[str, Any]) -> list[str]:
    r = report
    lost = r["rejected"] + r["failed"]
    ideal = f"ideal {figures.share(r['ideal_prefix_hit_rate'])}"
    goodput = "–" if r["goodput_rps"] is None else f"{r['goodput_rps']:.2f}/s"
    tiles = [
        _tile("completed", figures.count(r["completed"]), f"of {r['requests']:,} sent"),
        _tile(
            "rejected, failed",
            f"{r['rejected']:,}, {r['failed']:,}",
            "HTTP 429, errors",
            "bad" if r["failed"] else "" if lost else "good",
        ),
        _tile("prefix hit rate", figures.share(r["prefix_hit_rate"]), ideal),
        _tile("TTFT p50", figures.seconds(r["ttft_s"]["p50"]), f"p90 {figures.seconds(r['ttft_s']['p90'])}"),
        _tile("TBT p50", figures.seconds(r["tbt_s"]["p50"]), f"p90 {figures.seconds(r['tbt_s']['p90'])}"),
        _tile("goodput", goodput, f"{figures.share(r['slo_attainment'])} meet both objectives"),
        _tile("KV moved", figures.size(r["kv_bytes_moved"]), "pushed, pulled, loaded, stored"),
    ]
    if r["verification"] is not None:
        wrong = r["wrong_tokens"]
        looked_at = f"{r['verified_requests']:,} answers re-scored, {r['near_ties']} near-ties"
        tiles.append(_tile("wrong tokens", figures.count(wrong), looked_at, "bad" if wrong else "good"))
    return tiles


def _tile(name: str, value: str, more: str, kind: str = "") -> str:
    return (
        f'<div class="tile {kind}"><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}</div><div class="more">{escape(more)}</div></div>'
    )


def _picture(panel: Panel) -> str:
    return f'<div class="card"><h2>{escape(panel.title)}</h2><p>{escape(panel.caption)}</p>{panel.svg}</div>'


def _table(name: str, rows: Sequence[figures.Row]) -> str:
    cells = "".join(f'<tr><td class="name">{escape(key)}</td><td>{escape(value)}</td></tr>' for key, value in rows)
    return f'<div class="card"><h2>{escape(name)}</h2><table>{cells}</table></div>'


def _reasons(report: Mapping[str, Any]) -> str:
    if not report["reasons"]:
        return ""
    cells = "".join(
        f'<tr><td class="wrap">{escape(entry["outcome"])}: {escape(entry["reason"])}</td>'
        f"<td>{entry['count']:,}</td></tr>"
        for entry in report["reasons"]
    )
    return f'<div class="card"><h2>Why requests were rejected or failed</h2><table>{cells}</table></div>'
