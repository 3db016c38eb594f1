"""Test of unmodified third-party clients against a live cluster: whether they work and whether their figures agree.

    python -m benchmarks.clients [--only aiperf,lm-eval] [--allow-missing] [--torch-index URL]

Creates an environment for each tool under .clients/, starts `moonpool serve`, and runs openai, anthropic, Open WebUI's
requests, aiperf, guidellm and lm-eval. The printed table is also written to `clients-DATE.md` and `.json` in --results.
Exit status: 0 if everything works and agrees, 1 if something does not or a tool could not be installed, 2 if the
cluster did not start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.clients.cluster import running_cluster
from benchmarks.clients.comparison import HEADINGS, ClientCheck, Row, markdown, summary
from benchmarks.clients.context import Context
from benchmarks.clients.environments import ROOT, Environment
from benchmarks.clients.errors import ClusterFailed, ToolFailed, ToolMissing
from benchmarks.clients.run_aiperf import run_aiperf
from benchmarks.clients.run_anthropic import run_anthropic
from benchmarks.clients.run_guidellm import run_guidellm
from benchmarks.clients.run_lm_eval import run_lm_eval
from benchmarks.clients.run_open_webui import ORIGIN, run_open_webui
from benchmarks.clients.run_openai import run_openai

BUNDLED = ROOT / "moonpool" / "data" / "model"
RESULTS = ROOT / "benchmarks" / "results"
TOOLS: dict[str, Callable[[Context, Environment], list[Row]]] = {
    "aiperf": run_aiperf,
    "guidellm": run_guidellm,
    "lm-eval": run_lm_eval,
}
PACKAGES: dict[str, Callable[[Context], list[Row]]] = {  # installed beside Moonpool, or a client of our own
    "openai": run_openai,
    "anthropic": run_anthropic,
    "open-webui": run_open_webui,
}
CLIENTS = (*PACKAGES, *TOOLS)
# A large --max-queue, so that no request is rejected even on a slow machine.
SERVE_FLAGS = (
    f"--cors-origins={ORIGIN}",
    "--block-tokens=8",
    "--max-queue=600",
    "--pool-bytes=2GiB",
    "--prefill-nodes=1",
    "--decode-nodes=1",
)


def main() -> int:
    """Run the command line; see the module's docstring."""
    given = _parse()
    rows: list[Row] = []
    home = given.folder.absolute()
    ready_tools = [name for name in given.only if name in TOOLS and _installed(name, home, given, rows)]
    loads = [os.getloadavg()[0]]
    try:
        with running_cluster(home / "serve.log", *SERVE_FLAGS) as cluster:
            for name in given.only:
                if name in TOOLS and name not in ready_tools:
                    continue
                print(f"== {name}", flush=True)
                rows += _run(
                    name, Context(cluster.url, cluster.model, BUNDLED, home / f"{name}-run", home / "hub"), home
                )
                loads.append(os.getloadavg()[0])
    except ClusterFailed as error:
        print(error, file=sys.stderr)
        return 2
    _report(rows, given.results, given.only, loads)
    return 0 if rows and all(row.agrees for row in rows) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_clients, default=CLIENTS, help=f"comma-separated list of {', '.join(CLIENTS)}")
    parser.add_argument("--allow-missing", action="store_true", help="do not fail if a tool cannot be installed")
    parser.add_argument("--torch-index", default="", help="package index of torch's CPU build")
    parser.add_argument("--folder", type=Path, default=ROOT / ".clients", help="folder of environments and tool output")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for clients-DATE.md and .json")
    return parser.parse_args()


def _clients(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(CLIENTS):
        raise argparse.ArgumentTypeError(
            f"unknown client {', '.join(sorted(unknown))}; choose from {', '.join(CLIENTS)}"
        )
    return names


def _installed(name: str, home: Path, given: argparse.Namespace, rows: list[Row]) -> bool:
    print(f"== environment of {name}", flush=True)
    try:
        Environment(name, home / name).install(given.torch_index)
    except ToolMissing as error:
        print(error, file=sys.stderr)
        if not given.allow_missing:
            rows.append(ClientCheck(name, "installation", False, str(error)))
        return False
    return True


def _run(name: str, context: Context, home: Path) -> list[Row]:
    """Return a client's rows; if it failed, a single row with the error."""
    try:
        if name in PACKAGES:
            return PACKAGES[name](context)
        return TOOLS[name](context, Environment(name, home / name))
    except (ToolFailed, ToolMissing, OSError, LookupError, TypeError) as error:
        print(error, file=sys.stderr)
        return [ClientCheck(name, "run", False, f"{type(error).__name__}: {error}".splitlines()[0])]


def _report(rows: Sequence[Row], folder: Path, clients: Sequence[str], loads: Sequence[float]) -> None:
    table = Table(*HEADINGS, title="Third-party clients against a live cluster")
    for row in rows:
        table.add_row(*row.cells(), style=None if row.agrees else "red")
    width = None if sys.stdout.isatty() else 200
    Console(width=width).print(table)
    print(summary(rows))
    now = datetime.now(UTC)
    versions = {name: _version(name) for name in clients}
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    load = f"load average {min(loads):.1f} to {max(loads):.1f} (one minute, between the clients)"
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"clients-{now:%Y-%m-%d}"
    head = f"# Third-party clients against a live cluster, {now:%Y-%m-%d %H:%M} UTC\n\n{machine}; {load}. {told}.\n"
    command = (
        "`python -m benchmarks.clients`: 1 prefill, 1 decode, 1 pool node, the bundled model; see docs/clients.md."
    )
    text = f"{head}\n{command}\n\n{markdown(rows)}\n\n{summary(rows)}\n"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    figures = {
        "time": now.isoformat(),
        "machine": machine,
        "load_average": [round(load, 2) for load in loads],
        "versions": versions,
        "rows": [row.as_json() for row in rows],
    }
    stem.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"{stem}.md and .json written")


def _version(name: str) -> str:
    if name == "open-webui":
        return "requests"
    return version(name) if name in PACKAGES else Environment(name, Path()).version()


if __name__ == "__main__":
    sys.exit(main())
