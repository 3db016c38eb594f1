"""The commands `status`, `validate` and `config`: what a cluster is, whether it leaks, and which keys there are."""

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moonpool.config import all_settings
from moonpool.locate import DEFAULT_URL, Located, locate
from moonpool.options import reported_errors

_POLL_S = 0.2
_WIDE = 200

_Url = Annotated[
    str, typer.Option("--url", help="The cluster that `moonpool serve` runs on this port of this machine.")
]
_Conductor = Annotated[str, typer.Option("--conductor", help="gRPC address of the conductor of any cluster.")]
_ReadyFile = Annotated[Path | None, typer.Option("--ready-file", help="File written by `serve --ready-file`.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(
    url: _Url = DEFAULT_URL, conductor: _Conductor = "", ready_file: _ReadyFile = None, as_json: _Json = False
) -> None:
    """Show the nodes of a running cluster: load, memory, processes.

    Example: moonpool status --url http://127.0.0.1:8000
    """
    with reported_errors():
        located = locate(conductor=conductor, url=url, ready_file=ready_file)
        rows, models = asyncio.run(_status(located))
        ready = bool(models) and all(models.values())
        if as_json:
            print(json.dumps({"ready": ready, "models": models, "nodes": rows}, indent=2))
            return
        table = Table(
            "node", "role", "model", "pid", "restarts", "waiting", "running", "free tokens", "address", box=None
        )
        for row in rows:
            table.add_row(*("" if row[key] is None else str(row[key]) for key in row))
        console = _console()
        console.print(table)
        waiting = [model for model, is_ready in models.items() if not is_ready]
        of_these = f" of {' or '.join(waiting)}" if waiting else ""
        console.print("ready" if ready else f"not ready: no place can serve a request{of_these}")


def validate(
    url: _Url = DEFAULT_URL,
    conductor: _Conductor = "",
    ready_file: _ReadyFile = None,
    wait: Annotated[float, typer.Option(help="Ask again for so many seconds until all is well.", min=0.0)] = 0.0,
    as_json: _Json = False,
) -> None:
    """Ask every process of a cluster at rest whether it still holds anything: pages, leases, puts, streams, ledger.

    Exits with 1 when one does, or does not answer. Example: moonpool validate --wait 10
    """
    from moonpool.questions import validate_cluster

    with reported_errors():
        located = locate(conductor=conductor, url=url, ready_file=ready_file)
        deadline_s = time.monotonic() + wait
        while True:
            answers = asyncio.run(validate_cluster(located))
            ok = all(answer.ok for answer in answers)
            if ok or time.monotonic() >= deadline_s:
                break
            time.sleep(_POLL_S)
        if as_json:
            print(json.dumps({"ok": ok, "nodes": [asdict(answer) for answer in answers]}, indent=2))
        else:
            table = Table("node", "role", "", "held, or wrong", box=None)
            for answer in answers:
                said = answer.problems or [f"{name} {count}" for name, count in answer.counts.items() if count]
                table.add_row(answer.node_id, answer.role, "ok" if answer.ok else "[red]not ok[/red]", "; ".join(said))
            _console().print(table)
        raise typer.Exit(0 if ok else 1)


def config_keys() -> None:
    """Print a configuration file with every key, its default and its meaning; save it, and uncomment what you change.

    Example: moonpool config > cluster.yaml
    """
    panel = ""
    for declared in all_settings().values():
        if declared.panel != panel:
            panel = declared.panel
            print(f"\n## {panel}")
        choices = f" ({', '.join(declared.key.choices)})" if declared.key.choices else ""
        is_plain = declared.key.default_text is None and declared.default not in (None, "", ())
        value = declared.default_text if is_plain else f" # default: {declared.default_text}"
        print(f"# {declared.key.help}{choices}\n# {declared.name}: {value}")


def _console() -> Console:
    """Wide, however narrow the terminal: an address cut or folded can be neither read nor copied."""
    return Console(width=max(Console().width, _WIDE))


async def _status(located: Located) -> tuple[list[dict[str, object]], dict[str, bool]]:
    """The nodes, and which models can serve a request."""
    from moonpool.questions import ask_cluster, role_name

    cluster = await ask_cluster(located.conductor)
    joined = {item.node.node_id: item for item in cluster.nodes}
    started = located.ready.nodes if located.ready is not None else {}
    rows: list[dict[str, object]] = []
    for node_id in [*started, *(name for name in joined if name not in started)]:
        item, process = joined.get(node_id), started.get(node_id)
        is_worker = item is not None and item.node.capacity_tokens > 0
        rows.append(
            {
                "node": node_id,
                "role": role_name(item.node.role) if item is not None else process.role if process else "",
                "model": item.node.model if item is not None else process.model if process else "",
                "pid": process.pid if process else None,
                "restarts": process.restarts if process else None,
                "waiting": item.report.num_waiting if item is not None and is_worker else None,
                "running": item.report.num_running if item is not None and is_worker else None,
                "free_tokens": item.report.free_tokens if item is not None and is_worker else None,
                "address": item.node.target if item is not None else process.target if process else "",
            }
        )
    served = [str(row["model"]) for row in rows if row["model"]]
    models = {model: model in cluster.ready_models for model in served}
    return rows, models
