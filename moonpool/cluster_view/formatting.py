"""Formatting that the commands' tables and texts share."""

import time
from collections.abc import Mapping
from typing import Any, Final

from rich.table import Table
from rich.text import Text

_STATE_STYLES: Final = {
    "silent": "bold red",
    "restarting": "bold red",
    "failed": "bold red",
    "draining": "yellow",
    "starting": "yellow",
    "DEGRADED": "yellow",
    "read_only": "yellow",
}


def size_text(nbytes: float) -> str:
    """Return a size with its binary unit, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def duration_text(seconds: float | None) -> str:
    """Return a duration in the unit that suits it, from milliseconds to days; "–" for None."""
    if seconds is None:
        return "–"
    for unit, name, above in ((86400, "d", 2 * 86400), (3600, "h", 7200), (60, "min", 120)):
        if seconds >= above:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{seconds * 1e3:.3g} ms"


def time_text(at_s: float) -> str:
    """Return the UTC date and time of `at_s`, in seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))


def percent_text(share: float | None, *, missing: str = "") -> str:
    """Return a share as whole percent; `missing` for None."""
    return missing if share is None else f"{share:.0%}"


def share_text(part: int, total: int) -> str:
    """Return " (12.5%)", or "" if there is no total."""
    return f" ({part / total:.1%})" if total else ""


def counts_text(counts: Mapping[str, Any]) -> str:
    """Return counts by name in words: "3 no ssd, 1 quota"."""
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())


def count_text(count: int | None) -> str:
    """Return the number, or "" for None."""
    return "" if count is None else str(count)


def state_text(state: str) -> Text:
    """Return a node's, a directory's or a disk's state in the colour of its urgency."""
    return Text(state, style=_STATE_STYLES.get(state, ""))


def plain_table(*headings: str, right: int | None = None, **options: Any) -> Table:
    """Return a table without lines whose cells do not wrap; columns from number `right` on are right-aligned."""
    table = Table(**{"box": None, "pad_edge": False, **options})
    for number, heading in enumerate(headings):
        justify: Any = "right" if right is not None and number >= right else "left"
        table.add_column(heading, no_wrap=True, overflow="ellipsis", justify=justify)
    return table
