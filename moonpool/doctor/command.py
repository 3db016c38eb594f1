"""The command `moonpool doctor`: all checks, as a table or JSON, with an exit status for scripts."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moonpool.commands.arguments import ClusterArguments, on_cluster
from moonpool.doctor import gpu, machine, network, peers, rdma, software, storage
from moonpool.doctor.checks import Check, CheckResult, Level, Needs, Purpose, examine
from moonpool.errors import ConfigError
from moonpool.options import reported_errors, size_of


@dataclass(frozen=True)
class DoctorOptions:
    """Options of the checks. Raises ValueError for a peer that is not HOST:PORT."""

    port: int = network.DEFAULT_PORT
    pool_ssd_dir: Path | None = None
    needs: Needs = frozenset()
    peers: tuple[str, ...] = ()
    rdma_devices: tuple[str, ...] = ()
    registered: int = machine.DEFAULT_REGISTERED_NBYTES

    def __post_init__(self) -> None:
        for address in self.peers:
            peers.split_address(address)


_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARN: "yellow", Level.FAIL: "bold red"}


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
@on_cluster
def doctor(
    place: ClusterArguments,
    needed: Annotated[
        list[Purpose] | None,
        typer.Option(
            "--for",
            help="Intended use beyond serving on the CPU, whose checks become required. Repeatable.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = network.DEFAULT_PORT,
    pool_ssd_dir: Annotated[
        Path | None, typer.Option(help="Folder for a pool node's SSD tier, to check that it is on a fast disk.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT of a node on another host, to check that it is reachable. Repeatable."),
    ] = None,
    rdma_devices: Annotated[list[str] | None, typer.Option(help="RDMA device to use, e.g. mlx5_0. Repeatable.")] = None,
    registered: Annotated[
        str, typer.Option(help="Memory that a process registers for RDMA, such as its pool or KV cache, e.g. 64GiB.")
    ] = f"{machine.DEFAULT_REGISTERED_NBYTES >> 30}GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Check a running cluster, located as by `moonpool status`, instead of this machine."
        ),
    ] = False,
) -> None:
    """Check what this machine provides for serving, and advise on what is missing. Takes less than 5 seconds.

    With --cluster it checks that the processes of a running cluster reach each other, are compatible, and agree.
    Changes nothing and needs no root. Exits with 1 if something required for serving is broken.

    Examples: moonpool doctor · moonpool doctor --for gpu --json · moonpool doctor --for pool --pool-ssd-dir /mnt/nvme
    · moonpool doctor --for rdma --peer 10.0.0.2:7100 --registered 64GiB
    · moonpool doctor --cluster · moonpool doctor --cluster --url https://api.example.com:8000
    · moonpool doctor --cluster --conductor 10.0.0.1:7000 --conductor 10.0.0.2:7000
    """
    if cluster:
        with reported_errors():
            _report(_examined(place), "cluster", as_json)
    if place.is_given:
        raise typer.BadParameter("the options that name a cluster require --cluster")
    try:
        options = DoctorOptions(
            port=port,
            pool_ssd_dir=pool_ssd_dir,
            needs=frozenset(needed or ()),
            peers=tuple(peer or ()),
            rdma_devices=tuple(rdma_devices or ()),
            registered=size_of("--registered", registered),
        )
    except (ValueError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    _report(examine(all_checks(options), options.needs), "machine", as_json)


def _examined(place: ClusterArguments) -> list[CheckResult]:
    from moonpool.cluster_view.collector import observe_cluster
    from moonpool.doctor.cluster import judge_cluster

    return judge_cluster(asyncio.run(observe_cluster(place.locate())))


def _report(findings: Sequence[CheckResult], what: str, as_json: bool) -> NoReturn:
    """Print the results and exit."""
    ok = all(finding.level is not Level.FAIL for finding in findings)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings, what, ok)
    raise typer.Exit(0 if ok else 1)


def all_checks(options: DoctorOptions) -> tuple[Check, ...]:
    """Return all checks in the order of display; the pool's SSD is checked only if requested."""
    has_pool = options.pool_ssd_dir is not None or Purpose.POOL in options.needs
    return (
        *software.CHECKS,
        *machine.CHECKS,
        *machine.checks(options.registered),
        *storage.CHECKS,
        *(storage.checks(options.pool_ssd_dir) if has_pool else ()),
        *network.checks(options.port),
        *peers.checks(options.peers),
        *network.CHECKS,
        *gpu.CHECKS,
        *rdma.checks(options.rdma_devices),
        *software.EXTRA_CHECKS,
    )


def _show(findings: Sequence[CheckResult], what: str, ok: bool) -> None:
    console = Console(highlight=False)
    table = Table("", "", "", box=None, show_header=False, pad_edge=False)
    for finding in findings:
        text = f"{finding.found}\n→ {finding.advice}" if finding.advice else finding.found
        table.add_row(Text(finding.level, _STYLES[finding.level]), finding.check, Text(text))
    console.print(table)
    failed = [finding.check for finding in findings if finding.level is Level.FAIL]
    console.print(f"This {what} can serve." if ok else f"This {what} cannot serve as requested: {', '.join(failed)}.")
