"""How the record of objectives and its versions are shown: lines, a table, JSON. Nothing is asked here."""

import json
from collections.abc import Iterable
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
