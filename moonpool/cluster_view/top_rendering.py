"""Screen of `moonpool top`, fitted to the terminal's lines and columns. Makes no calls and reads no clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moonpool.cluster_view.activity import ClusterActivity, PoolUsage, TierUsage, WindowAttainment
from moonpool.cluster_view.formatting import count_text, percent_text, plain_table, size_text, state_text
from moonpool.cluster_view.status import NodeRow

_BARS: Final = "▁▂▃▄▅▆▇█"
_BAR_CELLS: Final = 10
_NARROW: Final = 110  # columns
_NODE_CELLS: Final = 20
_MODEL_CELLS: Final = 14
_LEAST_NODES: Final = 3  # lines of nodes, however small the terminal
KEYS: Final = "q quit · p pause · s sort · r reverse · ↑↓ scroll"


def _known(value: float | None) -> float:
    return -1.0 if value is None else value


SORTS: Final[Mapping[str, Callable[[NodeRow], Any]]] = {
    "node": lambda row: row.node,
    "running": lambda row: -_known(row.running),
    "waiting": lambda row: -_known(row.waiting),
    "free KV": lambda row: _known(row.free_share),
    "state": lambda row: (row.state == "ready", row.state),
}


@dataclass(frozen=True)
class TopView:
    """Choices of the user at the terminal, and texts beside the figures."""

    sort: str = "node"
    reverse: bool = False
    first: int = 0  # index of the first node shown
    paused: bool = False
    clock: str = ""
    trouble: str = ""  # reason for outdated figures
    keys: str = ""  # help on keys; "" without a keyboard


def screen(seen: ClusterActivity, view: TopView, *, columns: int, lines: int) -> RenderableType:
    """Render the screen for 20 `lines` or more; long tables are shortened, with a count of the hidden rows."""
    few = max(1, lines // 8)
    upper = [*_head(seen, view, columns), *_objectives(seen, few), *_pools(seen, few)]
    used = sum(part.row_count + 1 if isinstance(part, Table) else 1 for part in upper)
    footer = [Text(view.keys, style="dim", no_wrap=True, overflow="ellipsis")] if view.keys else []
    room = max(_LEAST_NODES, lines - used - 2 - len(footer))  # without its heading and the count of hidden rows
    return Group(*upper, *_nodes(seen.status.nodes, view, room, narrow=columns < _NARROW), *footer)


def sparkline(values: Sequence[float], cells: int) -> str:
    """Return the last `cells` values as bars, scaled to the highest of them."""
    shown = list(values)[-cells:]
    highest = max(shown, default=0.0)
    if highest <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / highest * len(_BARS)))] for value in shown)


def _head(seen: ClusterActivity, view: TopView, columns: int) -> list[Text]:
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
    parts += [Text(f"load      {', '.join(loads)} of the load that the objectives allow")] if loads else []
    rejected = [f"{count:,} {reason}" for reason, count in seen.rejected.items() if count]
    parts += [Text(f"rejected  {', '.join(rejected)}", style="yellow")] if rejected else []
    for part in parts:
        part.no_wrap, part.overflow = True, "ellipsis"
    return parts


def _objectives(seen: ClusterActivity, few: int) -> list[Table | Text]:
    if not seen.attained:
        return []
    table = _top_table("objectives of", "class", "TTFT", "TBT", "both", "judged")
    by_class: dict[tuple[str, str], dict[str, WindowAttainment]] = {}
    for each in seen.attained:
        by_class.setdefault((each.model, each.slo_class), {})[each.objective] = each
    most = sorted(by_class.items(), key=lambda item: -_judged(item[1]))[:few]
    for (model, slo_class), found in most:
        shares = [_share(found.get(kind)) for kind in ("ttft", "tbt", "all")]
        table.add_row(model, slo_class, *shares, f"{_judged(found):,}")
    return [table, *_hidden(len(by_class) - len(most), "classes of fewer requests")]


def _judged(found: Mapping[str, WindowAttainment]) -> int:
    return max(each.judged for each in found.values())


def _share(of: WindowAttainment | None) -> str:
    return "–" if of is None or not of.judged else f"{of.met / of.judged:.1%}"


def _pools(seen: ClusterActivity, few: int) -> list[Table | Text]:
    if not seen.pools:
        return []
    table = _top_table("pool", "DRAM", "SSD", "found", "evicted", "directory")
    first = sorted(seen.pools, key=lambda pool: (pool.directory != "DEGRADED", -_fullest(pool)))[:few]
    for pool in first:
        found = percent_text(pool.found_share, missing="–")
        tiers = [_bar(pool.tiers.get(name)) for name in ("DRAM", "SSD")]
        table.add_row(pool.node, *tiers, found, f"{pool.evicted_blocks:,}", state_text(pool.directory))
    return [table, *_hidden(len(seen.pools) - len(first), "pool nodes that are less full")]


def _fullest(pool: PoolUsage) -> float:
    return max((tier.used / tier.capacity for tier in pool.tiers.values()), default=0.0)


def _hidden(count: int, what: str) -> list[Table | Text]:
    return [Text(f"and {count} {what}", style="dim")] if count > 0 else []


def _bar(tier: TierUsage | None) -> Text:
    if tier is None:
        return Text("–")
    share = tier.used / tier.capacity
    full = min(_BAR_CELLS, round(share * _BAR_CELLS))
    text = Text("█" * full, style="cyan")
    text.append("·" * (_BAR_CELLS - full), style="dim")
    return text.append(f" {share:.0%} of {size_text(tier.capacity)}", style="default")


def _nodes(rows: Sequence[NodeRow], view: TopView, room: int, *, narrow: bool) -> list[RenderableType]:
    ordered = sorted(sorted(rows, key=lambda row: row.node), key=SORTS[view.sort], reverse=view.reverse)
    first = max(0, min(view.first, len(ordered) - room))
    shown = ordered[first : first + room]
    left_out = {"role"} if narrow else set()
    table = _top_table(*(_heading(name, view) for name in _COLUMNS if name not in left_out))
    for row in shown:
        cells = zip(_COLUMNS, _cells(row, narrow=narrow), strict=True)
        table.add_row(*(cell for name, cell in cells if name not in left_out))
    below = len(ordered) - first - len(shown)
    hidden = ", ".join([*([f"{first} above"] if first else []), *([f"{below} below"] if below else [])])
    return [table, *([Text(hidden, style="dim")] if hidden else [])]


def _heading(name: str, view: TopView) -> str:
    return f"{name}{'▲' if view.reverse else '▼'}" if name == view.sort else name


_COLUMNS: Final = ("node", "role", "model", "state", "waiting", "running", "free KV", "cached")


def _cells(row: NodeRow, *, narrow: bool) -> list[str | Text]:
    """Return the cells in the order of _COLUMNS."""
    counts, shares = map(count_text, (row.waiting, row.running)), map(percent_text, (row.free_share, row.cached_share))
    model = row.model_text
    if narrow:  # to leave room for the figures
        node, model = _cut(row.node, _NODE_CELLS), _cut(model, _MODEL_CELLS)
    else:
        node = row.node
    return [node, row.role, model, state_text(row.state), *counts, *shares]


def _cut(text: str, cells: int) -> str:
    return text if len(text) <= cells else text[: cells - 1] + "…"


def _top_table(*headings: str) -> Table:
    return plain_table(*headings, header_style="bold", collapse_padding=True)
