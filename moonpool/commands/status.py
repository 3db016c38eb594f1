"""Commands `moonpool status`, once or continuously, and `moonpool validate`, which finds leaks."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moonpool.cluster_view.formatting import count_text, percent_text, plain_table, state_text
from moonpool.commands.arguments import ClusterArguments, Json, on_cluster, wide_console
from moonpool.errors import ClusterNotFound
from moonpool.options import reported_errors

if TYPE_CHECKING:
    from moonpool.cluster_view.status import ClusterStatus, NodeRow


_HEADINGS = (
    "node",
    "role",
    "model",
    "state",
    "pid",
    "restarts",
    "waiting",
    "running",
    "free KV",
    "cached",
    "version",
    "address",
)


@on_cluster
def status(
    cluster: ClusterArguments,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C; with --json print a line each time.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes of --watch.")] = 1.0,
) -> None:
    """Show the nodes of a running cluster: state, load, memory, cache hits, processes.

    Examples: moonpool status · moonpool status --watch · moonpool status --url https://api.example.com:8000 --json
    """

    def look() -> "ClusterStatus":
        from moonpool.cluster_view.collector import look_at_cluster
        from moonpool.cluster_view.status import cluster_status

        return cluster_status(*asyncio.run(look_at_cluster(cluster.locate())))

    with reported_errors():
        seen = look()
        if not watch:
            print(json.dumps(seen.to_json(), indent=2)) if as_json else wide_console().print(_picture(seen))
            return
        try:
            _print_lines(seen, look, every) if as_json else _redraw(seen, look, every)
        except KeyboardInterrupt:
            return


def _print_lines(seen: "ClusterStatus", look: Callable[[], "ClusterStatus"], every_s: float) -> None:
    while True:
        print(json.dumps(seen.to_json()), flush=True)
        time.sleep(every_s)
        seen = look()


def _redraw(seen: "ClusterStatus", look: Callable[[], "ClusterStatus"], every_s: float) -> None:
    """Redraw in place in a terminal, otherwise print repeatedly; a conductor may be away for a while."""
    console = Console()
    picture: RenderableType = _picture(seen, brief=True)
    with Live(picture, console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            console.print(picture) if live is None else live.update(picture, refresh=True)
            time.sleep(every_s)
            try:
                seen = look()
                picture = _picture(seen, brief=True)
            except ClusterNotFound as error:
                picture = Group(_picture(seen, brief=True), Text(f"as last seen: {error}", style="bold red"))


def _picture(seen: "ClusterStatus", *, brief: bool = False) -> Group:
    """Return a table and a verdict; `brief` omits pids, versions and addresses to fit 80 columns."""
    left_out = {"pid", "version", "address"} if brief else set()
    cells = [_cells(row, brief=brief) for row in seen.nodes]
    table = plain_table(*(heading for heading in _HEADINGS if heading not in left_out), collapse_padding=brief)
    for row in cells:
        table.add_row(*(cell for heading, cell in zip(_HEADINGS, row, strict=True) if heading not in left_out))
    return Group(table, Text(seen.verdict()))


def _cells(row: "NodeRow", *, brief: bool) -> list[str | Text]:
    """Return the cells in the order of _HEADINGS."""
    free = ""
    if row.free_tokens is not None and row.capacity_tokens:
        free = (
            f"{row.free_tokens / row.capacity_tokens:.0%}" if brief else f"{row.free_tokens} of {row.capacity_tokens}"
        )
    counts = map(count_text, (row.pid, row.restarts, row.waiting, row.running))
    cached = percent_text(row.cached_share)
    return [row.node, row.role, row.model_text, state_text(row.state), *counts, free, cached, row.version, row.address]


_POLL_S = 0.2


@on_cluster
def validate(
    cluster: ClusterArguments,
    wait: Annotated[
        float, typer.Option(help="Repeat for up to this many seconds until no problem is left.", min=0.0)
    ] = 0.0,
    as_json: Json = False,
    admin_key_file: Annotated[Path | None, typer.Option(hidden=True, help="Earlier name of --api-key-file.")] = None,
) -> None:
    """Check that no process of an idle cluster holds resources: pages, leases, puts, streams, ledger entries.

    Exits with 1 if one does, or does not answer. Example: moonpool validate --wait 10
    """
    from moonpool.cluster_view.collector import validate_cluster

    with reported_errors():
        if admin_key_file is not None:
            cluster = replace(cluster, api_key_file=admin_key_file)
        located, admin_key = cluster.locate(), cluster.api_key()
        deadline_s = time.monotonic() + wait
        while True:
            answers = asyncio.run(validate_cluster(located, admin_key=admin_key))
            ok = all(answer.ok for answer in answers)
            if ok or time.monotonic() >= deadline_s:
                break
            time.sleep(_POLL_S)
        if as_json:
            print(json.dumps({"ok": ok, "nodes": [asdict(answer) for answer in answers]}, indent=2))
        else:
            table = Table("node", "role", "", "held, or problem", box=None)
            for answer in answers:
                texts = answer.problems or [f"{name} {count}" for name, count in answer.counts.items() if count]
                table.add_row(answer.node_id, answer.role, "ok" if answer.ok else "[red]not ok[/red]", "; ".join(texts))
            wide_console().print(table)
        raise typer.Exit(0 if ok else 1)
