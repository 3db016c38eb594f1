"""Comparison of the messenger's RDMA transport with perftest's ib_write_bw, alternating in one boot of the test VM.

Both write between two processes of a VM over the same device, repeatedly to the same address, with the same size and
number of writes in flight, and a completion for each write (ib_write_bw's -Q 1). The VM is emulated, so only ratios are
meaningful; they are medians over rounds of two turns of the same round. ib_write_bw spins on its completion queue (it
cannot sleep on a channel for writes); the messenger sleeps.

Emulation slows Python down more than the kernel, especially on a busy host. `--count` measures instructions instead:
one CPU whose clock advances by one nanosecond per instruction, so that "MiB per second" means MiB per 10^9
instructions. The result is then independent of the host's load, and one round suffices.

CPU time is that of the whole VM, including soft-RoCE in the kernel, per GiB moved; for ib_write_bw, it is the
difference to a run with the minimum number of writes. `cpu_us_per_slice` is the additional cost, in the whole VM, of
each of many small slices of a batch over the same bytes in one piece.

Run: python benchmarks/rdma_vm.py [--rounds N] [--count]; outside the VM, the script starts itself in the VM. The last
line of output is JSON: `write_vs_ib_write_bw` is the minimum ratio over the sizes from 1 MiB up; all ratios are under
`by_size`.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(ROOT)

DEVICE, ADDRESS, PORT = "rxe0", "10.77.0.1", 18515
MIB = 1 << 20
REGION_NBYTES = 32 * MIB
SLICES, SLICE_NBYTES = 2000, 1024


@dataclass(frozen=True)
class WriteBurst:
    """Turn of `count` writes of `nbytes`, with `depth` in flight."""

    nbytes: int
    count: int
    depth: int


SIZES = {
    "64KiB": WriteBurst(MIB // 16, 400, 8),
    "1MiB": WriteBurst(MIB, 120, 8),
    "4MiB": WriteBurst(4 * MIB, 32, 8),
    "16MiB": WriteBurst(16 * MIB, 12, 4),
}
FEWEST = 5  # minimum number of writes of ib_write_bw


@dataclass(frozen=True)
class Figure:
    """Throughput of a turn and its CPU cost in the VM."""

    mib_per_s: float
    cpu_s_per_gib: float


def outside(rounds: int, *, count: bool) -> int:
    """Run this script in the VM."""
    inner = ["python3", str(Path(__file__).resolve()), "--rounds", str(rounds)]
    vm = [sys.executable, "-m", "tools.rdma_vm", "run", "--timeout", "900", *(["--count"] if count else [])]
    return subprocess.run([*vm, "--", *inner], cwd=ROOT).returncode


def cpu_s() -> float:
    """Return the total CPU seconds of the VM so far."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def gid_index() -> int:
    """Return the index of the device's IPv4 address in its GID table."""
    octets = [int(octet) for octet in ADDRESS.split(".")]
    wanted = "ffff:{:02x}{:02x}:{:02x}{:02x}".format(*octets)
    for path in Path(f"/sys/class/infiniband/{DEVICE}/ports/1/gids").iterdir():
        if path.read_text().strip().endswith(wanted):
            return int(path.name)
    raise SystemExit(f"{DEVICE} has no GID for {ADDRESS}")


def perftest(turn: WriteBurst) -> tuple[float, float]:
    """Run ib_write_bw's server and client; return (MiB per second as reported, CPU seconds of the VM)."""
    command = ["ib_write_bw", "-d", DEVICE, "-x", str(gid_index()), "-m", "4096", "-F", "-p", str(PORT)]
    command += ["-s", str(turn.nbytes), "-n", str(turn.count), "-Q", "1", "-t", str(min(turn.depth, turn.count))]
    before_s = cpu_s()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for_listener(PORT)
        client = subprocess.run([*command, ADDRESS], capture_output=True, text=True, timeout=300)
        server.wait(60)
    finally:
        server.kill()
        server.wait()
    rows = [line.split() for line in client.stdout.splitlines()]
    found = [float(row[3]) for row in rows if len(row) == 5 and row[0] == str(turn.nbytes)]
    if not found:
        raise SystemExit(f"ib_write_bw gave no figure: {client.stdout}{client.stderr}")
    return found[0], cpu_s() - before_s


def wait_for_listener(port: int) -> None:
    """Wait until a process listens on the port; exits after a minute."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port:
                    return
        time.sleep(0.05)
    raise SystemExit(f"no process listens on port {port}")


def perftest_figure(turn: WriteBurst) -> Figure:
    """Return ib_write_bw's figure; the CPU time excludes its start and the minimum number of writes."""
    speed, cost_s = perftest(turn)
    _, start_s = perftest(dataclasses.replace(turn, count=FEWEST))
    gib = (turn.count - FEWEST) * turn.nbytes / (1 << 30)
    return Figure(speed, (cost_s - start_s) / gib)


class MessengerPair:
    """Messenger in this process that is connected to one in another process."""

    def __init__(self, messenger: Any, region: Any, peer: Any, key: Any) -> None:
        self._messenger, self._region, self._peer, self._key = messenger, region, peer, key

    def write(self, turn: WriteBurst) -> Figure:
        """Perform a turn and return its figure."""
        under_way: deque[Any] = deque()
        before_s, began_s = cpu_s(), time.monotonic()
        for _ in range(turn.count):
            if len(under_way) == turn.depth:
                under_way.popleft().result()
            under_way.append(self._peer.write(self._key, self._region, [[0, 0, turn.nbytes]], deadline_s=200))
        for future in under_way:
            future.result()
        taken_s, nbytes = time.monotonic() - began_s, turn.count * turn.nbytes
        return Figure(nbytes / MIB / taken_s, (cpu_s() - before_s) / nbytes * (1 << 30))

    def cpu_us_per_slice(self, batches: int = 5) -> float:
        """Return the CPU cost of a slice in addition to its bytes, in microseconds."""
        # Separated by a byte, so that they cannot be merged.
        slices = [[n * (SLICE_NBYTES + 1), n * (SLICE_NBYTES + 1), SLICE_NBYTES] for n in range(SLICES)]
        costs = []
        for rows in (slices, [[0, 0, SLICES * SLICE_NBYTES]]):
            before_s = cpu_s()
            for _ in range(batches):
                self._peer.write(self._key, self._region, rows, deadline_s=200).result()
            costs.append(cpu_s() - before_s)
        return (costs[0] - costs[1]) / batches / SLICES * 1e6


def config() -> Any:
    """Return the configuration of both sides: one device, like ib_write_bw."""
    from messenger import MessengerConfig
    from settings.keys import assemble

    return assemble(
        MessengerConfig,
        transport="rdma",
        data_host=ADDRESS,
        rdma_devices=(DEVICE,),
        handshake_timeout_s=60.0,
        default_deadline_s=200.0,
    )


@contextmanager
def pair() -> Iterator[MessengerPair]:
    """Start an owner process and connect to it."""
    from messenger import Endpoint, Messenger, RemoteKey, SharedMemory

    owner = subprocess.Popen([sys.executable, __file__, "--owner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None
    assert owner.stdout is not None
    messenger = Messenger(config(), node_id="caller", incarnation=1)
    memory = SharedMemory.create(REGION_NBYTES, "caller")
    try:
        ready = json.loads(owner.stdout.readline())
        messenger.start()
        peer = messenger.connect(Endpoint(**ready["endpoint"]))
        key = RemoteKey.unpack(bytes.fromhex(ready["key"]))
        yield MessengerPair(messenger, messenger.register(memory), peer, key)
    finally:
        messenger.close()
        memory.close()
        owner.stdin.close()
        owner.wait(60)


def own() -> None:
    """Run the owner process until its input ends."""
    from messenger import Messenger, SharedMemory

    messenger = Messenger(config(), node_id="owner", incarnation=1)
    memory = SharedMemory.create(REGION_NBYTES, "owner")
    endpoint = messenger.start()
    key = messenger.grant(messenger.register(memory), 0, memory.nbytes, read=True, write=True)
    print(json.dumps({"endpoint": dataclasses.asdict(endpoint), "key": key.pack().hex()}), flush=True)
    sys.stdin.read()
    messenger.close()
    memory.close()


def measure(rounds: int) -> dict[str, Any]:
    """Return all figures."""
    figures: dict[str, dict[str, list[Figure]]] = {size: {"messenger": [], "ib_write_bw": []} for size in SIZES}
    per_slice = []
    with pair() as messengers:
        messengers.write(WriteBurst(MIB, 8, 4))
        for number in range(rounds):
            for size, turn in SIZES.items():
                for name, run in (("messenger", messengers.write), ("ib_write_bw", perftest_figure)):
                    figure = run(turn)
                    figures[size][name].append(figure)
                    costs = f"{figure.mib_per_s:.1f} MiB/s, {figure.cpu_s_per_gib:.1f} CPU-s/GiB"
                    print(f"round {number}: {size} {name} {costs}", flush=True)
            per_slice.append(messengers.cpu_us_per_slice())
    by_size = {size: summary(found) for size, found in figures.items()}
    return {
        "write_vs_ib_write_bw": min(
            found["write_vs_ib_write_bw"] for size, found in by_size.items() if SIZES[size].nbytes >= MIB
        ),
        "cpu_us_per_slice": round(statistics.median(per_slice), 1),
        "by_size": by_size,
        "rounds": rounds,
    }


def summary(found: dict[str, list[Figure]]) -> dict[str, Any]:
    """Return medians for one size, and the median ratio of the messenger to ib_write_bw in the same round."""
    result: dict[str, Any] = {
        f"{name}_{field}": round(statistics.median(getattr(figure, field) for figure in figures), 2)
        for name, figures in found.items()
        for field in ("mib_per_s", "cpu_s_per_gib")
    }
    turns = zip(found["messenger"], found["ib_write_bw"], strict=True)
    result["write_vs_ib_write_bw"] = round(
        statistics.median(ours.mib_per_s / theirs.mib_per_s for ours, theirs in turns), 3
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", action="store_true", help="measure instructions instead of time, see above")
    parser.add_argument("--owner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RDMA_VM" not in os.environ:
        return outside(options.rounds, count=options.count)
    if options.owner:
        own()
    else:
        print(json.dumps(measure(options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
