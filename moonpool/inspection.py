"""The commands `validate` and `config`: whether a cluster leaks, and which keys there are."""

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from moonpool.config import all_settings
from moonpool.locate import DEFAULT_URL, locate
from moonpool.options import reported_errors
from moonpool.secret_file import read_secret
from moonpool.status_command import Conductor, Json, ReadyPath, Url, wide_console

_POLL_S = 0.2


def validate(
    url: Url = DEFAULT_URL,
    conductor: Conductor = "",
    ready_file: ReadyPath = None,
    wait: Annotated[float, typer.Option(help="Ask again for so many seconds until all is well.", min=0.0)] = 0.0,
    as_json: Json = False,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File that holds an admin's API key, where front doors ask for one.")
    ] = None,
) -> None:
    """Ask every process of a cluster at rest whether it still holds anything: pages, leases, puts, streams, ledger.

    Exits with 1 when one does, or does not answer. Example: moonpool validate --wait 10
    """
    from moonpool.questions import validate_cluster

    with reported_errors():
        located = locate(conductor=conductor, url=url, ready_file=ready_file)
        admin_key = read_secret(admin_key_file) if admin_key_file is not None else ""
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
            table = Table("node", "role", "", "held, or wrong", box=None)
            for answer in answers:
                said = answer.problems or [f"{name} {count}" for name, count in answer.counts.items() if count]
                table.add_row(answer.node_id, answer.role, "ok" if answer.ok else "[red]not ok[/red]", "; ".join(said))
            wide_console().print(table)
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
