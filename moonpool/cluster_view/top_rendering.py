"""How `moonpool top` looks, in as many lines and columns as the terminal has. No calls, no clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moonpool.cluster_view.activity import Attained, PoolRow, Tier, TopFigures
from moonpool.cluster_view.status import NodeRow
from moonpool.doctor.checks import size_text

_BARS: Final = "▁▂▃▄▅▆▇█"
_BAR_CELLS: Final = 10
_STYLES: Final = {"silent": "bold red", "restarting": "bold red", "draining": "yellow", "starting": "yellow"}
_NARROW: Final = 110  # columns
_NODE_CELLS: Final = 20
_MODEL_CELLS: Final = 14
_LEAST_NODES: Final = 3  # lines that nodes have, however low the terminal
KEYS: Final = "q quit · p pause · s sort · r reverse · ↑↓ scroll"


def _known(value: float | None) -> float:
    return -1.0 if value is None else value


SORTS: Final[Mapping[str, Callable[[NodeRow], Any]]] = {
    "node": lambda row: row.node,
    "running": lambda row: -_known(row.running),
    "waiting": lambda row: -_known(row.waiting),
    "free KV": lambda row: _known(_free_share(row)),
    "state": lambda row: (row.state == "ready", row.state),
}


@dataclass(frozen=True)
class View:
    """What the person at the terminal chose, and what is to be said beside the figures."""

    sort: str = "node"
    reverse: bool = False
    first: int = 0  # of the nodes in this order, the first shown
    paused: bool = False
    clock: str = ""
    trouble: str = ""  # why the figures are old
    keys: str = ""  # what can be pressed; "" where nothing can


def picture(seen: TopFigures, view: View, *, columns: int, lines: int) -> RenderableType:
    """Fits into 20 `lines` or more: of what there is much of, some is left out, and it is said how much."""
    few = max(1, lines // 8)
    upper = [*_head(seen, view, columns), *_objectives(seen, few), *_pools(seen, few)]
    used = sum(part.row_count + 1 if isinstance(part, Table) else 1 for part in upper)
    footer = [Text(view.keys, style="dim", no_wrap=True, overflow="ellipsis")] if view.keys else []
    room = max(_LEAST_NODES, lines - used - 2 - len(footer))  # its heading, and how many are not shown
    return Group(*upper, *_nodes(seen.status.nodes, view, room, narrow=columns < _NARROW), *footer)


def sparkline(values: Sequence[float], cells: int) -> str:
    """The last `cells` values, each as a bar; the highest of them is the whole height."""
    shown = list(values)[-cells:]
    highest = max(shown, default=0.0)
    if highest <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / highest * len(_BARS)))] for value in shown)


def _head(seen: TopFigures, view: View, columns: int) -> list[Text]:
    marks = [view.clock, "PAUSED" if view.paused else "", f"over {seen.window_s:.0f} s"]
    title = Text("moonpool top  ", style="bold")
    title.append(" · ".join(mark for mark in marks if mark), style="not bold")
    parts = [title, Text(seen.status.verdict(), style="" if seen.status.ready else "bold red")]
    if view.trouble:
        parts.append(Text(f"as last seen: {view.trouble}", style="bold red"))
    reused = "" if seen.reused_share is None else f", {seen.reused_share:.0%} of them reused"
    cells = max(10, columns - 50)
    for name, rate, rates in (
        ("generated", seen.generated_rate, seen.generated_rates),
        ("prompts", seen.prompt_rate, seen.prompt_rates),
    ):
        after = reused if name == "prompts" else f"; {seen.running} running, {seen.waiting} waiting"
        line = Text(f"{name:<9} {rate:>9,.1f} tokens/s  ")
        line.append(sparkline(rates, cells), style="cyan").append(after)
        parts.append(line)
    loads = [f"{model} {phase} {load:.0%}" for (model, phase), load in sorted(seen.loads.items())]
    parts += [Text(f"load      {', '.join(loads)} of what the objectives allow")] if loads else []
    rejected = [f"{count:,} {reason}" for reason, count in seen.rejected.items() if count]
    parts += [Text(f"rejected  {', '.join(rejected)}", style="yellow")] if rejected else []
    for part in parts:
        part.no_wrap, part.overflow = True, "ellipsis"
    return parts


def _objectives(seen: TopFigures, few: int) -> list[Table | Text]:
    if not seen.attained:
        return []
    table = _table("objectives of", "class", "TTFT", "TBT", "both", "judged")
    by_class: dict[tuple[str, str], dict[str, Attained]] = {}
    for each in seen.attained:
        by_class.setdefault((each.model, each.slo_class), {})[each.objective] = each
    most = sorted(by_class.items(), key=lambda item: -_judged(item[1]))[:few]
    for (model, slo_class), found in most:
        shares = [_share(found.get(kind)) for kind in ("ttft", "tbt", "all")]
        table.add_row(model, slo_class, *shares, f"{_judged(found):,}")
    return [table, *_hidden(len(by_class) - len(most), "classes of fewer requests")]


def _judged(found: Mapping[str, Attained]) -> int:
    return max(each.judged for each in found.values())


def _share(of: Attained | None) -> str:
    return "–" if of is None or not of.judged else f"{of.met / of.judged:.1%}"


def _pools(seen: TopFigures, few: int) -> list[Table | Text]:
    if not seen.pools:
        return []
    table = _table("pool", "DRAM", "SSD", "found", "evicted", "directory")
    first = sorted(seen.pools, key=lambda pool: (pool.directory != "DEGRADED", -_fullest(pool)))[:few]
    for pool in first:
        found = "–" if pool.found_share is None else f"{pool.found_share:.0%}"
        style = "yellow" if pool.directory == "DEGRADED" else ""
        tiers = [_bar(pool.tiers.get(name)) for name in ("DRAM", "SSD")]
        table.add_row(pool.node, *tiers, found, f"{pool.evicted_blocks:,}", Text(pool.directory, style=style))
    return [table, *_hidden(len(seen.pools) - len(first), "pool nodes that are less full")]


def _fullest(pool: PoolRow) -> float:
    return max((tier.used / tier.capacity for tier in pool.tiers.values()), default=0.0)


def _hidden(count: int, what: str) -> list[Table | Text]:
    return [Text(f"and {count} {what}", style="dim")] if count > 0 else []


def _bar(tier: Tier | None) -> Text:
    if tier is None:
        return Text("–")
    share = tier.used / tier.capacity
    full = min(_BAR_CELLS, round(share * _BAR_CELLS))
    text = Text("█" * full, style="cyan")
    text.append("·" * (_BAR_CELLS - full), style="dim")
    return text.append(f" {share:.0%} of {size_text(tier.capacity)}", style="default")


def _nodes(rows: Sequence[NodeRow], view: View, room: int, *, narrow: bool) -> list[RenderableType]:
    ordered = sorted(sorted(rows, key=lambda row: row.node), key=SORTS[view.sort], reverse=view.reverse)
    first = max(0, min(view.first, len(ordered) - room))
    shown = ordered[first : first + room]
    left_out = {"role"} if narrow else set()
    table = _table(*(_heading(name, view) for name in _COLUMNS if name not in left_out))
    for row in shown:
        cells = zip(_COLUMNS, _cells(row, narrow=narrow), strict=True)
        table.add_row(*(cell for name, cell in cells if name not in left_out))
    below = len(ordered) - first - len(shown)
    hidden = ", ".join([*([f"{first} above"] if first else []), *([f"{below} below"] if below else [])])
    return [table, *([Text(hidden, style="dim")] if hidden else [])]


def _heading(name: str, view: View) -> str:
    return f"{name}{'▲' if view.reverse else '▼'}" if name == view.sort else name


_COLUMNS: Final = ("node", "role", "model", "state", "waiting", "running", "free KV", "cached")


def _cells(row: NodeRow, *, narrow: bool) -> list[str | Text]:
    """As in _COLUMNS."""
    free = _free_share(row)
    counts = ["" if count is None else str(count) for count in (row.waiting, row.running)]
    model = f"{row.model} ({row.stand_in})" if row.stand_in else row.model
    shares = ["" if share is None else f"{share:.0%}" for share in (free, row.cached_share)]
    if narrow:  # so that what changes has its room
        node, model = _cut(row.node, _NODE_CELLS), _cut(model, _MODEL_CELLS)
    else:
        node = row.node
    return [node, row.role, model, Text(row.state, style=_STYLES.get(row.state, "")), *counts, *shares]


def _cut(text: str, cells: int) -> str:
    return text if len(text) <= cells else text[: cells - 1] + "…"


def _free_share(row: NodeRow) -> float | None:
    return row.free_tokens / row.capacity_tokens if row.free_tokens is not None and row.capacity_tokens else None


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for heading in headings:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    return table
