"""Comparison of the messenger over tcp and shm with Mooncake's Transfer Engine, NIXL, iperf3, memcpy and plain sockets.

Every contender is a process that moves batches to and from an owner process (benchmarks/peers/). The batches walk
through regions of 128 MiB, so that they are not in a cache (only iperf3 sends the same MiB repeatedly). In every round,
the contenders alternate in turns of some tens of milliseconds, so that other load on the machine affects all equally;
ratios are medians over rounds of two turns of the same round. A batch is complete when its bytes have arrived and the
caller is notified. Throughput (1e9 bytes per second) is measured with several batches in flight, latency with one.

Batches: 64 KiB, 1 MiB, 16 MiB, and 2,000 slices of 16 KiB that are not adjacent on either side. `tcp` and `shm` are
without digests, like all peers; `tcp_encrypted` is tcp with mutual TLS, and `aes_socket` the bound for it:
AES-256-GCM of large records over a plain socket. `..._digests` compute a digest of every 64 KiB of a write and send it
in a notification to the owner, and compare digests after a read. With `..._notified`, every write has a notification:
the messenger's is complete when the owner's handler has returned, NIXL's when the bytes have arrived. `shm_borrow`
lends the owner's bytes in place: nothing is moved, so it has only a latency.

Peers are included if they are installed:
    python -m venv mooncake && mooncake/bin/pip install mooncake-transfer-engine-non-cuda numpy   # --mooncake-python
        (Debian: libibverbs1 librdmacm1 libnuma1 ibverbs-providers liburing2 libcurl4)
    python -m venv nixl && nixl/bin/pip install nixl-cu12 numpy                                   # --nixl-python
    apt install iperf3

Run: python benchmarks/messenger.py [--mooncake-python PATH] [--nixl-python PATH] [--rounds N] [--store]; the
last line of output is JSON: each ratio `<ours>_vs_<theirs>` is the minimum throughput ratio over all sizes and both
directions (`..._latency`: the latency ratio; iperf3 and memcpy: from 1 MiB up), and all of them are under `by_size`.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Replace this folder on the path by the repository root: this file would hide the package messenger.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.stored import PICTURES, store  # noqa: E402
from benchmarks.transfers.contenders import ContenderScript, Iperf3, Turn, TurnFailed, has, has_iperf3  # noqa: E402
from benchmarks.transfers.figures import DIRECTIONS, PAIRS, Rounds, slices_vs_one_piece, summary  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SLICES, ONE_PIECE = "2000x16KiB", "1x31.25MiB"
SIZES = {
    "64KiB": Turn((64 * KIB, 1), True, batches=768, window=8),
    "1MiB": Turn((MIB, 1), True, batches=96, window=8),
    "16MiB": Turn((16 * MIB, 1), True, batches=4, window=4),
    SLICES: Turn((16 * KIB, 2000), True, batches=4, window=2),
    ONE_PIECE: Turn((16 * KIB * 2000, 1), True, batches=4, window=2),
}
OWN = ("tcp", "shm")
NOTIFIED = "_notified"
BORROW = "shm_borrow"
LATENCY_SHARE = 8  # ratio of the batches for throughput to those for latency

AnyContender = ContenderScript | Iperf3
Begin = Callable[[], AnyContender]


def contenders(mooncake_python: str, nixl_python: str, folder: Path) -> tuple[dict[str, Begin], dict[str, str]]:
    """Return functions that start the available contenders, by name, and the reasons why the others are absent."""
    absent: dict[str, str] = {}
    found: dict[str, Begin] = {}

    def add(name: str, script: str, *arguments: str, **how: str) -> None:
        found[name] = lambda: ContenderScript(name, script, *arguments, **how)

    add("plain_socket", "plain_stream.py")
    add("memcpy", "memory_copy.py")
    for name in (
        *("tcp", "tcp_notified", "tcp_encrypted", "tcp_digests"),
        *("shm", "shm_notified", "shm_digests", BORROW),
    ):
        transport, _, how = name.partition("_")
        run_dir = folder / name
        run_dir.mkdir()
        add(name, "messenger_peer.py", transport, str(run_dir), *filter(None, [how]))
    add("aes_socket", "encrypted_stream.py")
    if has(mooncake_python, "mooncake"):
        add("mooncake", "mooncake_engine.py", python=mooncake_python)
    else:
        absent["mooncake"] = f"{mooncake_python} has no mooncake-transfer-engine: see --mooncake-python"
    if has(nixl_python, "nixl_cu12"):
        add("nixl", "nixl_agent.py", python=nixl_python)
        add("nixl_notified", "nixl_agent.py", "notified", python=nixl_python)
        add("nixl_tcp", "nixl_agent.py", python=nixl_python, UCX_TLS="tcp")
        add("nixl_tcp_notified", "nixl_agent.py", "notified", python=nixl_python, UCX_TLS="tcp")
    else:
        absent["nixl"] = f"{nixl_python} has no nixl-cu12: see --nixl-python"
    if has_iperf3():
        found["iperf3"] = Iperf3
    else:
        absent["iperf3"] = "not found on PATH"
    return found, absent


def takes_part(contender: AnyContender, label: str, direction: str, *, latency: bool) -> bool:
    if contender.name == BORROW:
        return latency and direction == "read" and SIZES[label].shape[1] == 1 and label != ONE_PIECE
    if label == ONE_PIECE:
        return contender.name in OWN and not latency
    if contender.name == "iperf3":
        return label != "64KiB" and not latency
    return direction == "write" or not contender.name.endswith(NOTIFIED)


def play(everyone: list[AnyContender], labels: list[str], count: int) -> Rounds:
    """Play `count` rounds, each with another contender first. A preceding warm-up round is discarded."""
    rounds = Rounds()
    began = time.monotonic()
    for number in range(count + 1):
        order = everyone[number % len(everyone) :] + everyone[: number % len(everyone)]
        for label in labels:
            full = SIZES[label]
            single = Turn(full.shape, True, max(3, full.batches // LATENCY_SHARE), 1)
            for turn in (full, single):
                for direction in DIRECTIONS:
                    asked = Turn(turn.shape, direction == "write", turn.batches, turn.window)
                    for contender in order:
                        if takes_part(contender, label, direction, latency=turn is single):
                            seconds = contender.take(asked)
                            if number:
                                rounds.add(label, contender.name, asked, seconds)
        print(f"\rround {number} of {count}, {time.monotonic() - began:.0f} s ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rounds


def zero_copy(told: dict[str, Any]) -> dict[str, Any]:
    """Return by label the p50 in microseconds of a confirmed loan and of a read of as many bytes."""
    reads = {label: row["read"] for label, row in told["by_size"].items() if BORROW in row.get("read", {})}
    return {
        label: {"borrow_p50_us": row[BORROW]["p50_us"], "read_p50_us": row.get("shm", {}).get("p50_us")}
        for label, row in reads.items()
    }


def print_table(told: dict[str, Any], names: list[str]) -> None:
    for label, directions in told["by_size"].items():
        for direction, row in directions.items():
            print(f"\n{label} {direction}: {'':<8} {'GB/s':>8} {'p50 us':>10}   ratios of throughput (latency)")
            for name in names:
                if name not in row:
                    continue
                ratios = (
                    f"{pair.theirs} {ratio.get('throughput', 0):.2f}"
                    + (f" ({ratio['latency']:.2f})" if "latency" in ratio else "")
                    for pair in PAIRS
                    if pair.ours == name and (ratio := row["ratios"].get(pair.name))
                )
                figures = row[name]
                print(
                    f"  {name:<22} {figures.get('gbps', ''):>8} {figures.get('p50_us', ''):>10}   {', '.join(ratios)}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="batches (default: all)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these contenders, such as: tcp plain_socket")
    parser.add_argument("--mooncake-python", default=sys.executable, help="Python with Mooncake's Transfer Engine")
    parser.add_argument("--nixl-python", default=sys.executable, help="Python with NIXL")
    parser.add_argument("--store", action="store_true", help="write the result and the picture")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found, absent = contenders(arguments.mooncake_python, arguments.nixl_python, Path(folder))
        if unknown := set(arguments.only or ()) - found.keys():
            parser.error(f"--only: unknown contender {', '.join(sorted(unknown))}; choose from {', '.join(found)}")
        everyone: list[AnyContender] = []
        try:
            everyone.extend(begin() for name, begin in found.items() if name in (arguments.only or found))
            for contender in everyone:
                contender.await_ready()
            rounds = play(everyone, arguments.sizes, arguments.rounds)
        except TurnFailed as error:
            raise SystemExit(str(error)) from None
        finally:
            for contender in everyone:
                contender.close()
    told = summary(rounds)
    print_table(told, [contender.name for contender in everyone])
    slices = slices_vs_one_piece(rounds, SLICES, ONE_PIECE, OWN)
    result = {
        "benchmark": "messenger",
        "rounds": arguments.rounds,
        "load_1m": [load_before, os.getloadavg()[0]],
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "absent": absent,
        "zero_copy_handover": zero_copy(told),
        **({"slices_vs_one_piece": min(slices.values()), "slices_vs_one_piece_by": slices} if slices else {}),
        **told,
    }
    if arguments.store:
        from benchmarks.transfers.picture import draw

        store("messenger", result)
        draw(result, PICTURES / "messenger.svg")
    for name, reason in absent.items():
        print(f"{name} was skipped: {reason}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
