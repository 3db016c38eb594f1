"""Second tenant's time to first token while another one, or a stranger, attacks the cluster; memory; time to release.

    python -m benchmarks.hostile [--minutes 12] [--rate 8] [--rounds 2] [--attacks NAME ...] [--store]

A cluster with real engines, the bundled model and two pool nodes, so that KV goes over TCP, is attacked by each of
`tools.attacks`, while a second tenant sends `--rate` completions per second, every fourth with a grammar. Phases
without and with the attack alternate, and latency counts from the time at which a request was due. Ratios are to the
latency in all phases without an attack together. The attacker repeats its attack during the whole phase, in a process
of the lowest priority, since it computes elsewhere in reality. One row is no attack at all: its ratio is noise. A
broken connection is retried twice, as OpenAI's client does. Peaks are of each process with its children, and are
compared with the memory limits of the Helm chart.

Needs nothing else on the machine. `--store` writes benchmarks/results/hostile-DATE.json and docs/pictures/hostile.svg.
The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frontend.processes import BUNDLED, cluster
from benchmarks.stored import PICTURES, store
from tools.attacks.catalogue import ATTACKS
from tools.attacks.target import AttackedCluster, write_keys_file
from tools.attacks.victim import Victim, VictimAnswer
from tools.attacks.watch import MemoryWatch, memory_limits, over_limit, wait_released

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("--pool-nodes", "2", "--threads", "1")
CONTROL = "no attack"
_ATTACK_SHARE = 0.55  # of a round, the rest is without the attack
_START_S = 45.0
_ANSWERED_WITHIN_S = 30.0
_RELEASED_WITHIN_S = 30.0
_SETTLE_S = 0.3  # from the attack's begin to the first request that counts


@dataclass
class Measured:
    """Everything that was seen of one attack."""

    without: list[VictimAnswer] = field(default_factory=list)
    under: list[VictimAnswer] = field(default_factory=list)
    attacker: dict[str, int] = field(default_factory=dict)
    released_s: list[float] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def figures(self, without: Sequence[VictimAnswer]) -> dict[str, Any]:
        """Return the row of the result; ratios are to the latency of `without`."""
        ratios = {
            f"{name}_ratio": percentile(self.under, share) / percentile(without, share)
            for name, share in (("p50", 50), ("p99", 99))
        }
        errors = [served.error for served in (*self.without, *self.under) if served.error]
        return {
            "requests": len(self.under),
            **{
                f"without_{name}_ms": 1e3 * percentile(self.without, share)
                for name, share in (("p50", 50), ("p99", 99))
            },
            **{f"under_{name}_ms": 1e3 * percentile(self.under, share) for name, share in (("p50", 50), ("p99", 99))},
            **ratios,
            "failures": len(errors) + len(self.problems),
            "errors": sorted(set(errors))[:3] + self.problems,
            "retries": sum(served.retries for served in (*self.without, *self.under)),
            "released_s": max(self.released_s, default=None),
            "peak_mib": {node: peak >> 20 for node, peak in sorted(self.peak_bytes.items())},
            "over_limit": over_limit(self.peak_bytes),
            "attacker": self.attacker,
        }


def percentile(served: Sequence[VictimAnswer], share: float) -> float:
    """Return a percentile of the times to first token in seconds."""
    return float(np.percentile([each.ttft_s for each in served], share))


async def attack_phase(
    name: str, target: AttackedCluster, victim: Victim, rate: float, seconds: float, into: Measured
) -> None:
    """Measure the victim while the attacker's process repeats its attack."""
    if name == CONTROL:
        into.under += await victim.ask_at_rate(rate, seconds)
        return
    command = [
        "nice",
        "-n",
        "19",
        sys.executable,
        "-m",
        "tools.attacks",
        str(target.ready_file),
        str(seconds + 60),
        name,
    ]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        await asyncio.wait_for(process.stderr.readuntil(b"attacking\n"), _START_S)
        await asyncio.sleep(_SETTLE_S)
        into.under += await victim.ask_at_rate(rate, seconds)
    finally:
        process.terminate()  # it answers with what it saw
        output, errors = await process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the attacker of {name!r} failed:\n{errors.decode()}")
    for outcome, count in json.loads(output).items():
        into.attacker[outcome] = into.attacker.get(outcome, 0) + count


async def measure(
    name: str, target: AttackedCluster, victim: Victim, options: argparse.Namespace, round_s: float
) -> Measured:
    """Alternate phases without and with an attack."""
    measured = Measured()
    with MemoryWatch(target) as memory:
        for _ in range(options.rounds):
            measured.without += await victim.ask_at_rate(options.rate, round_s * (1 - _ATTACK_SHARE))
            await attack_phase(name, target, victim, options.rate, round_s * _ATTACK_SHARE, measured)
            try:
                measured.released_s.append(await wait_released(target, within_s=_RELEASED_WITHIN_S))
            except TimeoutError as error:
                measured.problems.append(str(error)[:500])
    measured.peak_bytes = dict(memory.peak_bytes)
    if name != CONTROL and (unexpected := ATTACKS[name].unexpected(measured.attacker)):
        measured.problems.append(f"the attacker saw {unexpected}")
    return measured


async def measure_all(target: AttackedCluster, options: argparse.Namespace) -> dict[str, Measured]:
    """Measure every chosen attack, with progress on standard error."""
    names = [CONTROL, *(options.attacks or ATTACKS)]
    round_s = (60 * options.minutes - _START_S) / len(names) / options.rounds - 2.0  # starts, ends and releases
    victim = Victim(target, prompt_tokens=options.prompt_tokens, within_s=_ANSWERED_WITHIN_S)
    await victim.ask_at_rate(options.rate, 5.0)
    found = {}
    for number, name in enumerate(names, start=1):
        found[name] = await measure(name, target, victim, options, round_s)
        row = found[name].figures([served for each in found.values() for served in each.without])
        print(
            f"{time.strftime('%X')} {number}/{len(names)} {name}: TTFT p50 {row['without_p50_ms']:.0f} -> "
            f"{row['under_p50_ms']:.0f} ms, p99 {row['without_p99_ms']:.0f} -> {row['under_p99_ms']:.0f} ms "
            f"({row['p99_ratio']:.2f}x), {row['failures']} failures, released in {row['released_s']} s, "
            f"attacker saw {row['attacker']} {' '.join(row['errors'])}",
            file=sys.stderr,
            flush=True,
        )
    return found


def result_of(found: dict[str, Measured], options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return the result: a row per attack, and the worst of all of them."""
    without = [served for measured in found.values() for served in measured.without]
    rows = {name: measured.figures(without) for name, measured in found.items()}
    attacks = {name: row for name, row in rows.items() if name != CONTROL}
    worst = max(attacks, key=lambda name: float(attacks[name]["p99_ratio"]))
    peaks: dict[str, int] = {}
    for measured in found.values():
        for node, peak in measured.peak_bytes.items():
            peaks[node] = max(peaks.get(node, 0), peak)
    return {
        "rate": options.rate,
        "rounds": options.rounds,
        "seconds": seconds,
        "requests": sum(len(measured.under) for measured in found.values()),
        "without_p50_ms": 1e3 * percentile(without, 50),
        "without_p99_ms": 1e3 * percentile(without, 99),
        "control_p99_ratio": rows[CONTROL]["p99_ratio"],
        "worst_p99_ratio": attacks[worst]["p99_ratio"],
        "worst": worst,
        "failures": sum(row["failures"] for row in rows.values()),
        "peak_rss_over_limit": len(over_limit(peaks)),
        "peak_mib": {node: peak >> 20 for node, peak in sorted(peaks.items())},
        "limit_mib": {role: limit >> 20 for role, limit in memory_limits().items()},
        "longest_release_s": max((row["released_s"] or _RELEASED_WITHIN_S) for row in rows.values()),
        "attacks": rows,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the victim's p99 without and with each attack, in the format of the file's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["attacks"]
    places = np.arange(len(rows))
    with plt.rc_context({"svg.hashsalt": "hostile", "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, axes = plt.subplots(figsize=(8.5, 1.4 + 0.3 * len(rows)), layout="constrained")
        values = [row["under_p99_ms"] for row in rows.values()]
        axes.barh(places, values, height=0.7, color="#cf222e", label="during the attack")
        axes.axvline(result["without_p99_ms"], color="#57606a", label="without an attack")
        for place, row in zip(places, rows.values(), strict=True):
            axes.annotate(
                f"{row['p99_ratio']:.2f}×",
                (row["under_p99_ms"], place),
                (4, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_yticks(places, list(rows))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(*values, result["without_p99_ms"]))
        axes.set_xlabel("p99 of the second tenant's time to first token, ms")
        axes.grid(axis="x", color="#d8dee4", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12.0, help="for everything [12]")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second of the second tenant [8]")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of phases per attack [2]")
    parser.add_argument("--prompt-tokens", type=int, default=90, help="tokens per prompt [90]")
    parser.add_argument("--attacks", nargs="*", choices=list(ATTACKS), metavar="NAME", help="only these")
    parser.add_argument("--store", action="store_true", help="write the result and the picture")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        keys = write_keys_file(work / "keys.yaml")
        with cluster(BUNDLED, work / "cluster", *FLAGS, "--api-keys-file", str(keys)) as served:
            target = AttackedCluster(served.url, work / "cluster" / "ready.json")
            found = asyncio.run(measure_all(target, options))
    result = result_of(found, options, time.monotonic() - began)
    if options.store:
        store("hostile", result)
        draw(result, PICTURES / "hostile.svg")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
