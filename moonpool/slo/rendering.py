"""How the record of objectives and its versions are shown: lines, a table, JSON. Nothing is asked here.

What other objectives would have done to the recent past, as lines and a table for a terminal. Nothing is asked.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from moonpool_proto.v1 import conductor_pb2


def version_lines(version: "conductor_pb2.SloVersion") -> list[str]:
    """Which it is, whose, and why."""
    if not version.version:
        return [f"version 0, digest {version.digest}: what is configured, until the store answers"]
    by = f"by {version.author} ({version.origin}{f' from {version.peer}' if version.peer else ''})"
    return [
        f"version {version.version}, digest {version.digest}, {by} at {_at(version.at_s)}",
        f"reason: {version.reason}",
    ]


def standing_lines(seen: "conductor_pb2.ShowSloReply") -> list[str]:
    """Where it is kept, who goes by it, and what is wrong."""
    lines = [f"kept in {seen.kept}"]
    for each in seen.acknowledged:
        behind = "" if each.digest == seen.current.digest else ", another one"
        lines.append(f"acknowledged by {each.node_id}: version {each.version}{behind}")
    if seen.trouble:
        lines.append(f"warning: cannot be changed now: {seen.trouble}")
    lines += [f"warning: {text}" for text in seen.unmeetable]
    lines += [f"configured otherwise (in force -> configured): {text}" for text in seen.drift]
    return lines


def history_picture(versions: "Iterable[conductor_pb2.SloVersion]") -> Table:
    """One row a version, the newest first."""
    table = Table(box=None, pad_edge=False)
    for heading in ("version", "at", "author", "how", "from", "digest", "reason"):
        table.add_column(heading, no_wrap=heading != "reason")
    for each in versions:
        cells = (str(each.version), _at(each.at_s), each.author, each.origin, each.peer, each.digest, each.reason)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def version_json(version: "conductor_pb2.SloVersion") -> dict[str, Any]:
    """A version as JSON."""
    return {
        "version": version.version,
        "digest": version.digest,
        "author": version.author,
        "reason": version.reason,
        "at": _at(version.at_s),
        "how": version.origin,
        "from": version.peer,
        "objectives": json.loads(version.content),
    }


def state_json(seen: "conductor_pb2.ShowSloReply") -> dict[str, Any]:
    """All of `show` as JSON."""
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


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


__all__ = ["caveats", "preview_picture", "preview_title"]

_HEADINGS = ("model", "class", "requests", "admitted", "newly rejected", "newly admitted", "kept what is asked")


def preview_title(preview: "conductor_pb2.SloPreview") -> str:
    """Of which requests it speaks."""
    if not preview.judged:
        return "the recent past: no request was judged yet"
    earlier = f"; {preview.forgotten:,} earlier ones are no longer known" if preview.forgotten else ""
    return f"the last {preview.judged:,} requests that this conductor judged, over {_span(preview.span_s)}{earlier}:"


def preview_picture(preview: "conductor_pb2.SloPreview") -> Table:
    """One row for each model and class; before -> with the wanted objectives."""
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
    """What it cannot know."""
    if not preview.judged:
        return
    yield "judged again by what was predicted then; with other requests let in, queues would have been others, too"
    if admitted := sum(row.now_admitted for row in preview.rows):
        yield f"how long the {admitted:,} newly admitted would have taken is not known: they were never served"
    if unmeasured := sum(row.unmeasured for row in preview.rows):
        yield f"{unmeasured:,} that were admitted have no times: cancelled, failed or still under way"
    if preview.admission != "enforce":
        yield f"admission is {preview.admission}: rejected means would be, and nobody is turned away by objectives"
    elif preview.mode == "none":
        yield "the admission mode is none: nobody is turned away by objectives"
    elif preview.mode == "load":
        yield "decode load is judged after the prefill: of those that never came so far, that part is not known"


def _newly_rejected(row: "conductor_pb2.SloPreviewRow") -> str:
    if not row.now_rejected:
        return "0"
    return f"{row.now_rejected:,} ({row.now_rejected_met:,} of them had kept it)"


def _share(met: int, missed: int) -> str:
    return f"{100 * met / (met + missed):.1f} % of {met + missed:,}" if met + missed else "none"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
