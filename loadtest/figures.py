"""Formatting of figures: units, rounding, and the rows of the report's table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = tuple[str, str]

PLACE_NAMES = {
    "pages": "the worker's KV cache",
    "dram": "the pool's memory",
    "ssd": "the pool's SSD",
    "remote": "another host's pool",
}


def seconds(value: float | None) -> str:
    """Format a duration with a suitable unit."""
    if value is None:
        return "–"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if abs(value) < 1:
        return f"{value * 1e3:.3g} ms" if abs(value) < 0.1 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if abs(value) < 100 else f"{value:.0f} s"


def round_seconds(value: float) -> str:
    """Format a round duration, as for an axis tick."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= 0.9999 * unit:
            return f"{value / unit:g} {name}"
    return f"{value * 1e6:g} µs" if value else "0"


def size(value: float | None) -> str:
    """Format a number of bytes with a suitable unit."""
    if value is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def share(value: float | None) -> str:
    """Format a fraction as a percentage."""
    return "–" if value is None else f"{value:.1%}"


def count(value: int | None) -> str:
    """Format an integer with thousands separators."""
    return "–" if value is None else f"{value:,}"


def spread(values: Mapping[str, float | None]) -> str:
    """Format the p50 / p90 / p99 of a duration."""
    return " / ".join(seconds(values[key]) for key in ("p50", "p90", "p99"))


def rows(figures: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """Return the table's sections, each with its (name, value) rows."""
    f = figures
    return [
        ("Requests", _requests(f)),
        ("Prefix reuse", _reuse(f)),
        ("Latency (p50 / p90 / p99)", _latency(f)),
        ("Objectives", _objectives(f)),
        ("Cluster", _cluster(f)),
        ("Verification", _verification(f)),
    ]


def _requests(f: Mapping[str, Any]) -> list[Row]:
    unfinished = [("unfinished (interrupted)", count(f["unfinished"]))] if f["unfinished"] else []
    retried = [("sent again after a rejection", f"{count(f['retried_requests'])} ({count(f['retries'])} times)")]
    return [
        ("sent", f"{count(f['requests'])} of {count(f['planned'])} in {seconds(f['duration_s'])}"),
        ("completed", count(f["completed"])),
        ("rejected (HTTP 429)", count(f["rejected"])),
        ("failed", count(f["failed"])),
        *unfinished,
        *(retried if f["retries"] else []),
        ("prompt / output tokens", f"{count(f['prompt_tokens'])} / {count(f['output_tokens'])}"),
        ("prompts truncated to the context", count(f["overlong_prompts"])),
        ("lateness of sending (p50 / p90 / p99)", spread(f["send_lateness_s"])),
    ]


def _reuse(f: Mapping[str, Any]) -> list[Row]:
    hit, ideal = f["prefix_hit_rate"], f["ideal_prefix_hit_rate"]
    of_ideal = f" ({hit / ideal:.1%} of the ideal)" if hit is not None and ideal else ""
    return [
        ("prefix hit rate, tokens", share(hit) + of_ideal),
        ("ideal (infinite cache)", share(ideal)),
        *(_place(name, f["reuse_by_tier"][place]) for place, name in PLACE_NAMES.items() if f["reuse_by_tier"]),
    ]


def _place(name: str, found: Mapping[str, Any]) -> Row:
    if not found["tokens"]:
        return f"· from {name}", "none"
    saved = "" if found["saved_s"] is None else f": {seconds(found['saved_s'])} saved"
    loading = f", {seconds(found['load_s'])} of loading" if found["load_s"] else ""
    return f"· from {name}", f"{count(found['tokens'])} tokens in {count(found['requests'])} requests{loading}{saved}"


def _latency(f: Mapping[str, Any]) -> list[Row]:
    parts = [
        (f"· {name}", spread(f["ttft_parts_s"][key]))
        for name, key in (("queue", "queue_s"), ("load", "load_s"), ("prefill", "prefill_s"))
        if f["ttft_parts_s"][key]["p50"] is not None
    ]
    return [
        ("time to first token", spread(f["ttft_s"])),
        *parts,
        ("time between tokens", spread(f["tbt_s"])),
        ("· longest tenth of a request's", spread(f["tbt_worst10_s"])),
        ("whole request", spread(f["e2e_s"])),
        ("unloaded TTFT, TBT", f"{seconds(f['unloaded_ttft_s'])}, {seconds(f['unloaded_tbt_s'])}"),
        *([("unloaded failed", count(f["unloaded_failed"]))] if f["unloaded_failed"] else []),
    ]


def _objectives(f: Mapping[str, Any]) -> list[Row]:
    goodput = f["goodput_rps"]
    ttft, tbt = share(f["slo_ttft_attainment"]), share(f["slo_tbt_attainment"])
    return [
        ("requests that meet both", f"{share(f['slo_attainment'])} (TTFT {ttft}, TBT {tbt})"),
        ("goodput", "–" if goodput is None else f"{goodput:.2f} requests/s"),
    ]


def _cluster(f: Mapping[str, Any]) -> list[Row]:
    paths = ", ".join(f"{path} {size(moved)}" for path, moved in f["kv_bytes_by_path"].items())
    return [
        ("KV bytes moved", f"{size(f['kv_bytes_moved'])} ({paths})"),
        ("requests moved to another node", count(f["replaced_requests"])),
        ("digest mismatches, blocks recomputed", f"{count(f['digest_mismatches'])}, {count(f['recomputed_blocks'])}"),
    ]


def _verification(f: Mapping[str, Any]) -> list[Row]:
    if f["verification"] is None:
        return [("answers re-scored", "none (--verify)")]
    v = f["verification"]
    return [
        (
            "answers re-scored",
            f"{count(v['verified_requests'])} ({count(v['requests_with_reuse'])} with reuse, "
            f"{count(v['sampled_requests'])} sampled), {count(v['verified_tokens'])} tokens",
        ),
        ("wrong tokens", count(v["wrong_tokens"])),
        ("near-ties", count(v["near_ties"])),
    ]
