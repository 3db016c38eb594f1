"""The command `moonpool doctor`: all checks, as a table or as JSON, and an exit status for scripts."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moonpool.doctor import gpu, machine, network, pool_ssd, rdma, software, storage
from moonpool.doctor.examine import examine
from moonpool.doctor.finding import Check, Finding, Level, Needs, Purpose

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(
    needed: Annotated[
        list[Purpose] | None,
        typer.Option(
            "--for",
            help="What this machine is to do beside serving on its CPU; makes what that takes needed. Repeatable.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that is to be served at.")] = network.DEFAULT_PORT,
    pool_ssd_dir: Annotated[
        Path | None, typer.Option(help="Folder that a pool node is to keep KV in: is it on a disk, and fast?")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what this machine offers for serving, and what to do about what is missing. Takes less than 5 seconds.

    Changes nothing and needs no root. Exits with 1 when something that is needed to serve here is broken.

    Examples: moonpool doctor · moonpool doctor --for gpu --json · moonpool doctor --for pool --pool-ssd-dir /mnt/nvme
    """
    needs = frozenset(needed or ())
    findings = examine(all_checks(port, pool_ssd_dir, needs), needs)
    ok = all(finding.level is not Level.FAIL for finding in findings)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings, ok)
    raise typer.Exit(0 if ok else 1)


def all_checks(port: int, pool_ssd_dir: Path | None = None, needs: Needs = frozenset()) -> tuple[Check, ...]:
    """Everything that is looked at, in the order in which it is shown; a pool's SSD where one is meant."""
    has_pool = pool_ssd_dir is not None or Purpose.POOL in needs
    return (
        *software.CHECKS,
        *machine.CHECKS,
        *storage.CHECKS,
        *(pool_ssd.checks(pool_ssd_dir) if has_pool else ()),
        *network.checks(port),
        *gpu.CHECKS,
        *rdma.CHECKS,
        *software.EXTRA_CHECKS,
    )


def _show(findings: Sequence[Finding], ok: bool) -> None:
    console = Console(highlight=False)
    table = Table("", "", "", box=None, show_header=False, pad_edge=False)
    for finding in findings:
        said = f"{finding.found}\n→ {finding.advice}" if finding.advice else finding.found
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", finding.check, _plain(said))
    console.print(table)
    failed = [finding.check for finding in findings if finding.level is Level.FAIL]
    console.print("This machine can serve." if ok else f"This machine cannot serve as asked: {', '.join(failed)}.")


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
