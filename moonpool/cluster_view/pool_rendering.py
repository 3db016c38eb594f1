"""Tables and texts of the `moonpool pool` commands. Makes no calls."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvpool.handles import Flushed, Verified
from moonpool.cluster_view.formatting import counts_text, duration_text, share_text, size_text, state_text
from moonpool.cluster_view.pool_client import FoundBlock
from moonpool.cluster_view.pool_status import PoolNodeStatus, PoolStatus, TierStatus

_NAMES = {"dram": "DRAM", "ssd": "SSD", "pages": "the worker's own pages", "remote": "another host's pool"}


def status_table(seen: PoolStatus) -> RenderableType:
    """Return a section for each node, then the figures that all share."""
    parts: list[RenderableType] = []
    for node in seen.nodes:
        parts += [_heading(node), *(Padding(part, (0, 0, 0, 2)) for part in _node(node)), Text()]
    if not seen.nodes:
        parts.append(Text("No pool node has joined the cluster.", style="yellow"))
    parts.append(Text(_prompts(seen)))
    parts.append(
        Text(
            f"Prefix replicas in use: {seen.replicas}; copying took {duration_text(seen.replication_spent_s)}, "
            f"saved {duration_text(seen.replication_saved_s)} of waiting (predicted)."
        )
    )
    parts += [Text(trouble, style="bold red") for trouble in seen.troubles()]
    return Group(*parts)


def blocks_table(found: Sequence[FoundBlock]) -> RenderableType:
    """Return a table with a row for each copy of a block."""
    table = Table(
        "node", "key", "tokens", "depth", "tier", "bytes", "age", "unused for", "", "used", "follows", box=None
    )
    for block in found:
        facts = block.facts
        relatives = [
            f"after {facts['parent'][:8]}" if int(facts["parent"], 16) else "first block of a prompt",
            f"{len(facts['children'])} after it" if facts["children"] else "",
            f"{len(facts['tails'])} tails" if facts["tails"] else "",
            f"{facts['replicas']} more nodes" if facts["replicas"] else "",
            f"{facts['leases']} leases" if facts["leases"] else "",
        ]
        common = [block.node_id, facts["key"], str(facts["tokens"]), str(facts["depth"])]
        ends = [f"{facts['uses']}×", ", ".join(part for part in relatives if part)]
        for tier, copy in facts["tiers"].items():
            right = Text("intact", style="green") if copy["right"] else Text("damaged, removed", style="bold red")
            middle = [
                _NAMES[tier],
                size_text(copy["nbytes"]),
                duration_text(copy["age_s"]),
                duration_text(copy["unused_s"]),
            ]
            table.add_row(*common, *middle, right, *ends)
        if not facts["tiers"]:
            table.add_row(*common, "", size_text(facts["nbytes"]), "", "", facts["state"], *ends)
    return table


def flushed_lines(done: Mapping[str, Flushed], *, dram_only: bool) -> list[str]:
    """Return one line for each node: the blocks removed and kept."""
    where = "from memory" if dram_only else "from memory and SSD"
    kept = "in use, or not on SSD" if dram_only else "in use"
    return [f"{node}: {each.removed} blocks removed {where}, {each.kept} kept ({kept})" for node, each in done.items()]


def verified_line(node_id: str, done: Verified) -> str:
    """Return one line with the result of verifying a node."""
    damaged = f"{done.corrupt} damaged blocks were removed" if done.corrupt else "all are intact"
    return f"{node_id}: {done.checked} of {done.total} copies of blocks checked, {damaged}"


def _heading(node: PoolNodeStatus) -> Text:
    text = Text.assemble((node.node_id, "bold"), "  ", state_text(node.state), "  ", node.address)
    if node.directory:
        text.append("  directory ").append(state_text(node.directory))
        text.append(f", {node.directory_blocks:,} whole blocks")
    return text


def _node(node: PoolNodeStatus) -> list[RenderableType]:
    if node.problem:
        return [Text(node.problem, style="bold red")]
    table = Table("", "used", "of", "blocks", "found", "saved", "evicted", "age when evicted", box=None, pad_edge=False)
    for name, tier in node.tiers.items():
        table.add_row(*_tier(name, tier, node.asked_blocks))
    lines = [_lookups(node)]
    if node.ssd_state:
        lines.append(_ssd(node))
    if node.lost_blocks:
        lines.append(f"lost from this node: {counts_text(node.lost_blocks)}")
    lines += [
        f"namespace {name} ({node.namespace_users[name] or 'of no worker that has joined'}): {count:,} blocks"
        for name, count in node.namespaces.items()
    ]
    lines.append(
        f"memory of {node.memory_pages} pages; {f'host socket {node.door}' if node.door else 'no socket for its host'}"
    )
    lines.append(f"in use: {node.leases} leases, {node.puts} puts, {node.loading_blocks} blocks loading from SSD")
    return [table, *map(Text, lines)]


def _tier(name: str, tier: TierStatus, asked: int) -> list[str]:
    return [
        _NAMES[name],
        f"{size_text(tier.used_bytes)} ({tier.used_bytes / tier.capacity_bytes:.0%})",
        size_text(tier.capacity_bytes),
        f"{tier.blocks:,}",
        f"{tier.hit_blocks:,}{share_text(tier.hit_blocks, asked)}",
        duration_text(tier.saved_s),
        counts_text(tier.evicted_blocks) or "0",
        duration_text(tier.evicted_age_p50_s),
    ]


def _lookups(node: PoolNodeStatus) -> str:
    if not node.asked_blocks:
        return "no block was requested yet"
    return (
        f"{node.asked_blocks:,} blocks requested: {node.hit_rate:.1%} found, {node.waiting_blocks:,} on SSD but not in "
        f"time, {node.missed_blocks:,} missing; median time between uses {duration_text(node.reuse_gap_p50_s)}"
    )


def _ssd(node: PoolNodeStatus) -> str:
    errors = f"; {counts_text(node.ssd_errors)}" if node.ssd_errors else "; no errors"
    coded = "" if node.coded_ratio is None else f" ({node.coded_blocks:,} compressed to {node.coded_ratio:.0%})"
    return (
        f"SSD {node.ssd_state} in {node.ssd_folder}: {node.written_blocks:,} blocks written{coded}, "
        f"{node.unwritten_blocks:,} only in memory, {node.loaded_blocks:,} loaded, "
        f"{node.load_timeouts:,} requests timed out waiting{errors}"
    )


def _prompts(seen: PoolStatus) -> str:
    if not seen.prompt_tokens:
        return "No prompt was computed yet."
    parts = [
        f"{_NAMES[place]} {count:,}{share_text(count, seen.prompt_tokens)}"
        for place, count in seen.reused_tokens.items()
    ]
    computed = seen.prompt_tokens - sum(seen.reused_tokens.values())
    parts.append(f"computed {computed:,}{share_text(computed, seen.prompt_tokens)}")
    return f"Prompt tokens: {seen.prompt_tokens:,}; from {', '.join(parts)}."
