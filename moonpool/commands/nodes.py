"""The commands `scale`, `drain` and `switch`: how many workers there are, which one is to go, and what one does."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from moonpool.cluster_view.locate import DEFAULT_URL, locate
from moonpool.commands.arguments import Conductor, ReadyPath, Url
from moonpool.errors import ConfigError
from moonpool.options import reported_errors


def scale(
    counts: Annotated[list[str], typer.Argument(metavar="ROLE=COUNT", help="prefill=2 decode=4 aggregated=1")],
    url: Url = DEFAULT_URL,
    ready_file: ReadyPath = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory of the `serve` that is meant.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also where nothing could be served any more.")] = False,
) -> None:
    """Change the number of workers of a cluster that `moonpool serve` runs: new ones are started first, then the
    newest of the others are drained. No request is lost.

    Example: moonpool scale prefill=2 decode=3
    """
    with reported_errors():
        wanted = parse_counts(counts)
        folder = run_dir
        if folder is None:
            ready = locate(conductor="", url=url, ready_file=ready_file).ready
            assert ready is not None  # only a conductor's address finds a cluster without one
            folder = Path(ready.run_dir)
        from moonpool.scaling.client import ask_to_scale

        asyncio.run(ask_to_scale(folder.absolute(), wanted, force=force))


def drain(
    node_id: Annotated[str, typer.Argument(help="As `moonpool status` names it.")],
    url: Url = DEFAULT_URL,
    conductor: Conductor = "",
    ready_file: ReadyPath = None,
    force: Annotated[bool, typer.Option("--force", help="Even the last one that can serve its model.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait until it has left; 0: only ask.", min=0.0)] = 120.0,
) -> None:
    """Let one node take no new work, finish what it has, and leave for good.

    Example: moonpool drain decode-1
    """
    with reported_errors():
        from moonpool.scaling.client import drain_and_wait

        located = locate(conductor=conductor, url=url, ready_file=ready_file)
        asyncio.run(drain_and_wait(located.conductor, node_id, force=force, wait_s=wait))


def switch(
    node_id: Annotated[str, typer.Argument(help="As `moonpool status` names it.")],
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    url: Url = DEFAULT_URL,
    conductor: Conductor = "",
    ready_file: ReadyPath = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait until it has changed; 0: only ask.", min=0.0)] = 60.0,
) -> None:
    """Make a prefill node a decode node, or the other way round: it finishes what it has, and keeps model and KV.

    Example: moonpool switch prefill-1 decode
    """
    with reported_errors():
        from moonpool.scaling.client import ROLES, switch_and_wait

        if role not in ROLES:
            raise ConfigError(f"{role!r} is no role that a node can change to: expected {' or '.join(ROLES)}")
        located = locate(conductor=conductor, url=url, ready_file=ready_file)
        asyncio.run(switch_and_wait(located.conductor, node_id, role, wait_s=wait))


def parse_counts(arguments: list[str]) -> dict[str, int]:
    """Workers wanted by role. Raises ConfigError for what is not ROLE=COUNT."""
    wanted: dict[str, int] = {}
    for argument in arguments:
        role, equals, count = argument.partition("=")
        if not equals or not role or not count.isdecimal():
            raise ConfigError(f"{argument!r} is not ROLE=COUNT: expected prefill=2, for example")
        if role in wanted:
            raise ConfigError(f"{role} is given twice")
        wanted[role] = int(count)
    return wanted
