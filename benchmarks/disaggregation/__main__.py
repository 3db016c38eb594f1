"""Live comparison of 1 prefill + 1 decode worker with 2 aggregated workers, on the same trace and cores.

    python -m benchmarks.disaggregation [--repeats 3] [--speeds 20,60] [--duration 1200]

Each repeat starts a fresh cluster of either shape (in alternating order) and replays the same requests of the Mooncake
conversation trace at each speed. The table contains the median over the repeats and their range. It names a better
shape only if the ranges do not overlap and the medians differ by at least two per cent. Results are written to
--results as `disaggregation-DATE` .md, .json and .svg.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.clients.errors import ClusterFailed, ToolFailed
from benchmarks.disaggregation.measure import COMMON, SHAPES, Run, Workload, run_shape
from benchmarks.disaggregation.picture import draw
from benchmarks.disaggregation.tables import HEADINGS, markdown, rows

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    """Run the command line; see the module's docstring. Returns 1 if a request or a run failed."""
    given = _parse()
    workload = Workload(given.sample_families, given.duration, given.slo_ttft, given.slo_tbt)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="moonpool-disaggregation-") as folder:
        for repeat in range(given.repeats):
            for shape in list(SHAPES)[:: 1 if repeat % 2 == 0 else -1]:
                print(f"== repeat {repeat + 1} of {given.repeats}: {shape}", flush=True)
                try:
                    runs += run_shape(shape, repeat, given.speeds, workload, Path(folder))
                except (ClusterFailed, ToolFailed) as error:
                    print(error, file=sys.stderr)
                    return 1
    _report(runs, workload, given.results)
    return 1 if any(run.figures["failed"] for run in runs) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="clusters of each shape (default: %(default)s)")
    parser.add_argument("--speeds", type=_speeds, default=(20.0, 60.0), help="speeds of the trace, comma-separated")
    parser.add_argument(
        "--sample-families", type=float, default=0.1, help="fraction of the trace's families (default: %(default)s)"
    )
    parser.add_argument("--duration", type=float, default=1200.0, help="seconds of the trace (default: %(default)s)")
    parser.add_argument("--slo-ttft", type=float, default=0.5, help="objective in seconds (default: %(default)s)")
    parser.add_argument("--slo-tbt", type=float, default=0.05, help="objective in seconds (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    return parser.parse_args()


def _speeds(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _report(runs: Sequence[Run], workload: Workload, folder: Path) -> None:
    table = Table(*HEADINGS, title="Disaggregated against aggregated")
    for row in rows(runs):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"disaggregation-{now:%Y-%m-%d}"
    draw(runs, stem.with_suffix(".svg"))
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    loads = sorted(run.load_average for run in runs)
    speeds = ",".join(f"{speed:g}" for speed in sorted({run.speed for run in runs}))
    repeats = len({run.repeat for run in runs})
    bad = [run for run in runs if run.invalid_reasons]
    notices = sorted({notice for run in runs for notice in run.notices})
    text = [
        f"# 1 prefill + 1 decode against 2 aggregated workers, {now:%Y-%m-%d %H:%M} UTC",
        f"{machine}, no GPU; cluster and client share the cores. Load average (one minute) when the replays began: "
        f"{loads[0]:.1f} to {loads[-1]:.1f}.",
        f"`python -m benchmarks.disaggregation --repeats {repeats} --speeds {speeds} "
        f"--duration {workload.duration_s:g}`: "
        f"{repeats} fresh clusters of each shape in turn, the bundled model, "
        f"`{' '.join(COMMON)}`; the first {workload.duration_s:g} s of {workload.families:.0%} of the conversation "
        f"trace's families. Objectives: TTFT {workload.ttft_slo_s * 1e3:g} ms, time between tokens "
        f"{workload.tbt_slo_s * 1e3:g} ms (mean of a request's longest tenth). Medians over the repeats, least and "
        "greatest in brackets; the ratio is of the medians. CPU: all the cluster's processes during a replay.",
        markdown(runs),
        f"![the same as bars]({stem.with_suffix('.svg').name})",
        *(["Notices of the replays: " + "; ".join(notices)] if notices else []),
        *(
            f"INVALID: {run.shape}, {run.speed:g}x, repeat {run.repeat + 1}: {'; '.join(run.invalid_reasons)}"
            for run in bad
        ),
    ]
    stem.with_suffix(".md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    figures = {"time": now.isoformat(), "machine": machine, "runs": [run.as_json() for run in runs]}
    stem.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"{stem}.md, .json and .svg written")


if __name__ == "__main__":
    sys.exit(main())
