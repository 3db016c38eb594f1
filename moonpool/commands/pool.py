"""Commands `moonpool pool …`: inspect, verify and flush the pool nodes of a running cluster."""

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvpool.handles import Verified
from moonpool.cluster_view import pool_client
from moonpool.cluster_view import pool_rendering as view
from moonpool.cluster_view.locate import Located
from moonpool.commands.arguments import ClusterArguments, Json, command_group, on_cluster, wide_console
from moonpool.errors import ConfigError
from moonpool.options import reported_errors

_LEAST_DIGITS = 4
_KEY_DIGITS = 32

Node = Annotated[str, typer.Option("--node", help="Id of one pool node, as shown by `status`. Default: all.")]

app = command_group(
    "pool", "Inspect, verify and flush the KV pool of a running cluster.\n\n[bold]moonpool pool status[/bold]"
)


@app.command()
@on_cluster
def status(cluster: ClusterArguments, as_json: Json = False) -> None:
    """Show contents, hit rates and evictions of each pool node by tier.

    Example: moonpool pool status --json
    """
    with reported_errors():
        located = cluster.locate()
        seen = asyncio.run(pool_client.ask_pool_status(located))
        if as_json:
            print(json.dumps(seen.to_json(), indent=2))
        else:
            wide_console().print(view.status_table(seen))


@app.command()
@on_cluster
def inspect(
    key: Annotated[str, typer.Argument(help="First hex digits of a block's key, as logs show it; 4 or more.")],
    cluster: ClusterArguments,
    as_json: Json = False,
) -> None:
    """Show every copy of a block in every node and tier. Its bytes are verified, and damaged copies removed.

    Exits with 1 if no node has the block, or a copy was damaged. Example: moonpool pool inspect 3fa9c0
    """
    with reported_errors():
        digits = _checked_key(key)
        located = cluster.locate()

        async def ask() -> list[pool_client.FoundBlock]:
            nodes = await pool_client.pool_nodes(located)
            found = await pool_client.inspect_key(nodes, bytes.fromhex(digits[: len(digits) // 2 * 2]))
            return [block for block in found if block.facts["key"].startswith(digits)]

        found = asyncio.run(ask())
        if as_json:
            print(json.dumps([{"node_id": block.node_id, **block.facts} for block in found], indent=2))
        elif found:
            wide_console().print(view.blocks_table(found))
        else:
            print(f"No pool node has a block whose key begins with {digits}.")
        damaged = any(not copy["right"] for block in found for copy in block.facts["tiers"].values())
        raise typer.Exit(1 if damaged or not found else 0)


@app.command()
@on_cluster
def flush(
    cluster: ClusterArguments,
    node: Node = "",
    dram_only: Annotated[
        bool, typer.Option("--dram-only", help="Write blocks that are only in memory to SSD, then empty the memory.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Remove all blocks that are not in use from memory and SSD. The workers' own pages stay.

    Example: moonpool pool flush --node pool-0 --dram-only --yes
    """
    with reported_errors():
        located = cluster.locate()
        nodes = asyncio.run(pool_client.pool_nodes(located, node))
        what = "the memory" if dram_only else "memory and SSD"
        if not yes and not _confirmed(f"Empty {what} of {', '.join(nodes)}?"):
            print("Nothing was removed.")
            raise typer.Exit(1)
        done = asyncio.run(pool_client.flush_nodes(nodes, dram_only=dram_only))
        if as_json:
            print(json.dumps({name: asdict(each) for name, each in done.items()}, indent=2))
        else:
            print("\n".join(view.flushed_lines(done, dram_only=dram_only)))


@app.command()
@on_cluster
def verify(
    cluster: ClusterArguments,
    node: Node = "",
    as_json: Json = False,
) -> None:
    """Read every block of both tiers and verify its digests. Damaged blocks are removed, and recomputed when needed.

    Exits with 1 if there were any. Serving continues. Example: moonpool pool verify
    """
    with reported_errors():
        located = cluster.locate()
        done = asyncio.run(_verify(located, node))
        if as_json:
            print(json.dumps({name: asdict(each) for name, each in done.items()}, indent=2))
        else:
            print("\n".join(view.verified_line(name, each) for name, each in done.items()))
        raise typer.Exit(1 if any(each.corrupt for each in done.values()) else 0)


async def _verify(located: Located, node: str) -> dict[str, Verified]:
    """Verify the nodes, with a progress bar on a terminal, and return each node's result."""
    nodes = await pool_client.pool_nodes(located, node)
    console = Console(stderr=True)
    done: dict[str, Verified] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bars = {name: progress.add_task(name, total=None) for name in nodes}
        async for name, each in pool_client.verify_nodes(nodes):
            done[name] = each
            progress.update(bars[name], completed=each.checked, total=each.total)
    return done


def _checked_key(key: str) -> str:
    digits = key.lower().removeprefix("0x")
    if not set(digits) <= set("0123456789abcdef") or not _LEAST_DIGITS <= len(digits) <= _KEY_DIGITS:
        raise ConfigError(
            f"KEY must be the first {_LEAST_DIGITS} to {_KEY_DIGITS} hex digits of a block's key, got {key!r}"
        )
    return digits


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("cannot ask for confirmation without a terminal: give --yes to remove the blocks")
    return typer.confirm(question)
