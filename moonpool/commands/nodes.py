"""Commands `moonpool node scale`, `drain` and `switch`: number and roles of a cluster's workers."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from moonpool.commands.arguments import ClusterArguments, on_cluster
from moonpool.errors import ConfigError
from moonpool.options import reported_errors
from moonpool.supervision.run_dir import supervisor_target


@on_cluster
def scale(
    counts: Annotated[
        list[str],
        typer.Argument(metavar="ROLE=COUNT", help="New number of workers of a role, such as prefill=2. Repeatable."),
    ],
    cluster: ClusterArguments,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory of the `serve` to change.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Allow counts that leave a model without the workers to serve it.")
    ] = False,
) -> None:
    """Change the number of workers of a cluster that `moonpool serve` runs, without losing a request.

    New workers start first; then the newest of the others are drained. Example: moonpool node scale prefill=2 decode=3
    """
    with reported_errors():
        counts_by_role = parse_counts(counts)
        target = _serve_target(cluster) if run_dir is None else supervisor_target(run_dir.absolute())
        from moonpool.scaling.client import ask_to_scale

        asyncio.run(ask_to_scale(target, counts_by_role, force=force))


def _serve_target(cluster: ClusterArguments) -> str:
    """Return the target of the `serve` that runs the cluster. Raises ClusterNotFound, ConfigError."""
    located = cluster.locate()
    if located.gateway:
        from rpc.gateway import supervisor_url

        return supervisor_url(located.gateway)
    if located.ready is None:
        raise ConfigError(
            "a conductor starts no workers: give --url, --ready-file or --run-dir of the `moonpool serve` that does"
        )
    return supervisor_target(Path(located.ready.run_dir))


@on_cluster
def drain(
    node_id: Annotated[str, typer.Argument(help="Node id, as shown by `moonpool status`.")],
    cluster: ClusterArguments,
    force: Annotated[bool, typer.Option("--force", help="Drain even the last node that can serve its model.")] = False,
    wait: Annotated[
        float, typer.Option(help="Maximum seconds to wait until the node has left; 0: do not wait.", min=0.0)
    ] = 120.0,
) -> None:
    """Drain a node: it accepts no new requests, finishes its own, and leaves permanently.

    Example: moonpool node drain decode-1
    """
    with reported_errors():
        from moonpool.scaling.client import drain_and_wait

        located = cluster.locate()
        asyncio.run(drain_and_wait(located.conductor, node_id, force=force, wait_s=wait))


@on_cluster
def switch(
    node_id: Annotated[str, typer.Argument(help="Node id, as shown by `moonpool status`.")],
    role: Annotated[str, typer.Argument(help="New role: prefill or decode.")],
    cluster: ClusterArguments,
    wait: Annotated[
        float, typer.Option(help="Maximum seconds to wait until the node has changed; 0: do not wait.", min=0.0)
    ] = 60.0,
) -> None:
    """Change a prefill node to a decode node or back: it finishes its requests, and keeps its model and KV.

    Example: moonpool node switch prefill-1 decode
    """
    with reported_errors():
        from moonpool.scaling.client import ROLES, switch_and_wait

        if role not in ROLES:
            raise ConfigError(f"ROLE must be {' or '.join(ROLES)}, got {role!r}")
        located = cluster.locate()
        asyncio.run(switch_and_wait(located.conductor, node_id, role, wait_s=wait))


def parse_counts(arguments: list[str]) -> dict[str, int]:
    """Parse ROLE=COUNT texts to counts by role. Raises ConfigError."""
    counts: dict[str, int] = {}
    for argument in arguments:
        role, equals, count = argument.partition("=")
        if not equals or not role or not count.isdecimal():
            raise ConfigError(f"argument must be ROLE=COUNT, such as prefill=2, got {argument!r}")
        if role in counts:
            raise ConfigError(f"{role} is given twice")
        counts[role] = int(count)
    return counts
