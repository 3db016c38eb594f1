"""How `moonpool pool` shows its findings to people. No calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvpool.handles import Flushed, Verified
from moonpool.cluster_view.collector import FoundBlock
from moonpool.cluster_view.pool_status import PoolNodeFigures, PoolStatus, TierFigures
from moonpool.doctor.checks import size_text

__all__ = ["blocks_picture", "flushed_lines", "status_picture", "verified_line"]

_NAMES = {"dram": "DRAM", "ssd": "SSD", "pages": "the worker's own pages", "remote": "another host's pool"}
_STATES = {
    "silent": "bold red",
    "draining": "yellow",
    "DEGRADED": "yellow",
    "failed": "bold red",
    "read_only": "yellow",
}


def status_picture(seen: PoolStatus) -> RenderableType:
    """A part per node, then what all share."""
    parts: list[RenderableType] = []
    for node in seen.nodes:
        parts += [_heading(node), *(Padding(part, (0, 0, 0, 2)) for part in _node(node)), Text()]
    if not seen.nodes:
        parts.append(Text("No pool node has joined the cluster.", style="yellow"))
    parts.append(Text(_prompts(seen)))
    parts.append(
        Text(
            f"Copied prefixes in use: {seen.replicas}; copying took {seconds(seen.replication_spent_s)}, "
            f"saved {seconds(seen.replication_saved_s)} of waiting (predicted)."
        )
    )
    parts += [Text(trouble, style="bold red") for trouble in seen.troubles()]
    return Group(*parts)


def blocks_picture(found: Sequence[FoundBlock]) -> RenderableType:
    """A row per copy of a block, as the nodes hold it."""
    table = Table(
        "node", "key", "tokens", "depth", "tier", "bytes", "age", "unused for", "", "used", "follows", box=None
    )
    for block in found:
        facts = block.facts
        relatives = [
            f"after {facts['parent'][:8]}" if int(facts["parent"], 16) else "begins a prompt",
            f"{len(facts['children'])} after it" if facts["children"] else "",
            f"{len(facts['tails'])} tails" if facts["tails"] else "",
            f"{facts['replicas']} nodes more" if facts["replicas"] else "",
            f"{facts['leases']} leases" if facts["leases"] else "",
        ]
        common = [block.node_id, facts["key"], str(facts["tokens"]), str(facts["depth"])]
        ends = [f"{facts['uses']}×", ", ".join(part for part in relatives if part)]
        for tier, copy in facts["tiers"].items():
            right = Text("right", style="green") if copy["right"] else Text("damaged, taken out", style="bold red")
            middle = [_NAMES[tier], size_text(copy["nbytes"]), seconds(copy["age_s"]), seconds(copy["unused_s"])]
            table.add_row(*common, *middle, right, *ends)
        if not facts["tiers"]:
            table.add_row(*common, "", size_text(facts["nbytes"]), "", "", facts["state"], *ends)
    return table


def flushed_lines(done: Mapping[str, Flushed], *, dram_only: bool) -> list[str]:
    """One line per node: what was removed and what was kept."""
    where = "from memory" if dram_only else "from memory and SSD"
    kept = "in use, or not on SSD" if dram_only else "in use"
    return [f"{node}: {each.removed} blocks removed {where}, {each.kept} kept ({kept})" for node, each in done.items()]


def verified_line(node_id: str, done: Verified) -> str:
    """What verifying a node came to."""
    damaged = f"{done.corrupt} blocks were damaged and are taken out" if done.corrupt else "all are right"
    return f"{node_id}: {done.checked} of {done.total} copies of blocks checked, {damaged}"


def seconds(value: float | None) -> str:
    """A duration with a fitting unit."""
    if value is None:
        return "–"
    for unit, name, above in ((86400, "d", 2 * 86400), (3600, "h", 7200), (60, "min", 120)):
        if value >= above:
            return f"{value / unit:.1f} {name}"
    return f"{value:.3g} s" if value >= 1 or not value else f"{value * 1e3:.3g} ms"


def _heading(node: PoolNodeFigures) -> Text:
    text = Text.assemble((node.node_id, "bold"), "  ", (node.state, _STATES.get(node.state, "")), "  ", node.address)
    if node.directory:
        text.append("  directory ").append(node.directory, _STATES.get(node.directory, ""))
        text.append(f", {node.directory_blocks:,} whole blocks")
    return text


def _node(node: PoolNodeFigures) -> list[RenderableType]:
    if node.problem:
        return [Text(node.problem, style="bold red")]
    table = Table("", "used", "of", "blocks", "found", "saved", "evicted", "age when evicted", box=None, pad_edge=False)
    for name, tier in node.tiers.items():
        table.add_row(*_tier(name, tier, node.asked_blocks))
    lines = [_lookups(node)]
    if node.ssd_state:
        lines.append(_ssd(node))
    if node.lost_blocks:
        lines.append(f"left no copy here: {_reasons(node.lost_blocks)}")
    lines += [f"namespace {name}: {count:,} blocks" for name, count in node.namespaces.items()]
    lines.append(f"memory of {node.memory_pages} pages; {f'door {node.door}' if node.door else 'no door for its host'}")
    lines.append(f"in use: {node.leases} leases, {node.puts} puts, {node.loading_blocks} blocks on their way from SSD")
    return [table, *map(Text, lines)]


def _tier(name: str, tier: TierFigures, asked: int) -> list[str]:
    return [
        _NAMES[name],
        f"{size_text(tier.used_bytes)} ({tier.used_bytes / tier.capacity_bytes:.0%})",
        size_text(tier.capacity_bytes),
        f"{tier.blocks:,}",
        f"{tier.hit_blocks:,}{_share(tier.hit_blocks, asked)}",
        seconds(tier.saved_s),
        _reasons(tier.evicted_blocks) or "0",
        seconds(tier.evicted_age_p50_s),
    ]


def _lookups(node: PoolNodeFigures) -> str:
    if not node.asked_blocks:
        return "nobody has asked for a block yet"
    return (
        f"asked for {node.asked_blocks:,} blocks: {node.hit_rate:.1%} found, {node.waiting_blocks:,} on SSD but not in "
        f"time, {node.missed_blocks:,} not there; median time between uses {seconds(node.reuse_gap_p50_s)}"
    )


def _ssd(node: PoolNodeFigures) -> str:
    errors = f"; {_reasons(node.ssd_errors)}" if node.ssd_errors else "; no errors"
    return (
        f"SSD {node.ssd_state} in {node.ssd_folder}: {node.written_blocks:,} blocks written, {node.unwritten_blocks:,} "
        f"in memory alone, {node.loaded_blocks:,} loaded, {node.load_timeouts:,} requests gave up waiting{errors}"
    )


def _prompts(seen: PoolStatus) -> str:
    if not seen.prompt_tokens:
        return "No prompt was computed yet."
    parts = [
        f"{_NAMES[place]} {count:,}{_share(count, seen.prompt_tokens)}" for place, count in seen.reused_tokens.items()
    ]
    computed = seen.prompt_tokens - sum(seen.reused_tokens.values())
    parts.append(f"computed {computed:,}{_share(computed, seen.prompt_tokens)}")
    return f"Tokens of prompts: {seen.prompt_tokens:,}; from {', '.join(parts)}."


def _share(part: int, of: int) -> str:
    return f" ({part / of:.1%})" if of else ""


def _reasons(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.items())
