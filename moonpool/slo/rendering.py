"""Rendering of objectives, their versions, and previews of changes: lines, tables, JSON. Makes no calls."""

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from moonpool.cluster_view.formatting import time_text

if TYPE_CHECKING:
    from moonpool_proto.v1 import conductor_pb2


def version_lines(version: "conductor_pb2.SloVersion") -> list[str]:
    """Return lines with a version's number, author and reason."""
    if not version.version:
        return [f"version 0, digest {version.digest}: the configured objectives, until the store answers"]
    by = f"by {version.author} ({version.origin}{f' from {version.peer}' if version.peer else ''})"
    return [
        f"version {version.version}, digest {version.digest}, {by} at {time_text(version.at_s)}",
        f"reason: {version.reason}",
    ]


def state_lines(seen: "conductor_pb2.ShowSloReply") -> list[str]:
    """Return lines with the store, the conductors' versions, and warnings."""
    lines = [f"kept in {seen.kept}"]
    for each in seen.acknowledged:
        behind = "" if each.digest == seen.current.digest else ", differs"
        lines.append(f"acknowledged by {each.node_id}: version {each.version}{behind}")
    if seen.trouble:
        lines.append(f"warning: cannot be changed now: {seen.trouble}")
    lines += [f"warning: {text}" for text in seen.unmeetable]
    lines += [f"the configuration differs (in force -> configured): {text}" for text in seen.drift]
    return lines


def history_table(versions: "Iterable[conductor_pb2.SloVersion]") -> Table:
    """Return a table with one row per version, the newest first."""
    table = Table(box=None, pad_edge=False)
    for heading in ("version", "at", "author", "how", "from", "digest", "reason"):
        table.add_column(heading, no_wrap=heading != "reason")
    for each in versions:
        cells = (str(each.version), time_text(each.at_s), each.author, each.origin, each.peer, each.digest, each.reason)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def version_json(version: "conductor_pb2.SloVersion") -> dict[str, Any]:
    """Return a version as JSON."""
    return {
        "version": version.version,
        "digest": version.digest,
        "author": version.author,
        "reason": version.reason,
        "at": time_text(version.at_s),
        "how": version.origin,
        "from": version.peer,
        "objectives": json.loads(version.content),
    }


def state_json(seen: "conductor_pb2.ShowSloReply") -> dict[str, Any]:
    """Return what `show --json` prints."""
    return {
        **version_json(seen.current),
        "kept": seen.kept,
        "trouble": seen.trouble,
        "acknowledged": [
            {"conductor": each.node_id, "version": each.version, "digest": each.digest} for each in seen.acknowledged
        ],
        "drift": list(seen.drift),
        "unmeetable": list(seen.unmeetable),
    }


_HEADINGS = ("model", "class", "requests", "admitted", "newly rejected", "newly admitted", "met objectives")


def preview_title(preview: "conductor_pb2.SloPreview") -> str:
    """Return a title that describes the judged requests."""
    if not preview.judged:
        return "recent requests: none was judged yet"
    earlier = f"; {preview.forgotten:,} earlier ones are no longer known" if preview.forgotten else ""
    return f"the last {preview.judged:,} requests that this conductor judged, over {_span(preview.span_s)}{earlier}:"


def preview_table(preview: "conductor_pb2.SloPreview") -> Table:
    """Return a table with one row for each model and class: before -> with the proposed objectives."""
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for row in preview.rows:
        before, now = row.stay_admitted + row.now_rejected, row.stay_admitted + row.now_admitted
        requests = before + row.now_admitted + row.stay_rejected
        cells = (
            row.model,
            row.slo_class or "(none)",
            f"{requests:,}",
            f"{before:,} -> {now:,}",
            _newly_rejected(row),
            f"{row.now_admitted:,}",
            f"{_share(row.met_before, row.missed_before)} -> {_share(row.met_now, row.missed_now)}",
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def caveats(preview: "conductor_pb2.SloPreview") -> Iterator[str]:
    """Yield the limits of the preview."""
    if not preview.judged:
        return
    yield "judged by the predictions of that time; with other requests admitted, queues would have differed, too"
    if admitted := sum(row.now_admitted for row in preview.rows):
        yield f"latencies of the {admitted:,} newly admitted are unknown: they were never served"
    if unmeasured := sum(row.unmeasured for row in preview.rows):
        yield f"{unmeasured:,} admitted requests have no latencies: cancelled, failed or in progress"
    if preview.admission != "enforce":
        yield f"admission is {preview.admission}: rejections are hypothetical, objectives reject no request"
    elif preview.mode == "none":
        yield "the admission mode is none: objectives reject no request"
    elif preview.mode == "load":
        yield "decode load is judged after the prefill: it is unknown for requests that did not get there"


def _newly_rejected(row: "conductor_pb2.SloPreviewRow") -> str:
    if not row.now_rejected:
        return "0"
    return f"{row.now_rejected:,} ({row.now_rejected_met:,} of them had met their objectives)"


def _share(met: int, missed: int) -> str:
    return f"{100 * met / (met + missed):.1f} % of {met + missed:,}" if met + missed else "none"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
