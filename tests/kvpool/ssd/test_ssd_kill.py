"""A writing process is killed again and again at random points: what it was told is stored is stored, and right."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

KILLS = 80
PROCESS = Path(__file__).parent / "ssd_writer_process.py"


class Truth:
    """Contents that the folder must have, according to its writers."""

    def __init__(self) -> None:
        self.sealed: dict[int, int] = {}  # number to page
        self.found: dict[int, int] = {}
        self.num_sealed = self.num_freed = 0

    def hear(self, line: str) -> bool:
        """Take one line in; True when it is the last of its child."""
        word, *rest = line.split()
        numbers = [int(each) for each in rest]
        if word == "sealed":
            pairs = dict(zip(numbers[::2], numbers[1::2], strict=True))
            self.sealed |= pairs
            self.num_sealed += len(pairs)
        elif word == "freeing":
            self.num_freed += len(numbers)
            self.sealed = {number: page for number, page in self.sealed.items() if page not in numbers}
        elif word == "found":
            assert numbers[0] not in self.found
            self.found[numbers[0]] = numbers[1]
        elif word == "open":
            assert self.found.items() >= self.sealed.items(), "a sealed block is lost"
            self.sealed = self.found
        elif word == "ended":
            self.found = {}
            assert numbers == [-signal.SIGKILL], line
        else:
            assert word == "child", line
        return word == "ended"


def test_a_writer_killed_at_any_point_loses_nothing_it_was_told_is_stored(ssd_path: Path) -> None:
    rng, truth = random.Random(1), Truth()
    writers = subprocess.Popen(
        [sys.executable, str(PROCESS), str(ssd_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writers.stdin is not None
    assert writers.stdout is not None
    lines = Lines(writers.stdout.fileno())
    num_open = 0
    try:
        for seed in range(KILLS):
            writers.stdin.write(f"{seed}\n".encode())
            writers.stdin.flush()
            while not (line := lines.next()).startswith("child"):
                truth.hear(line)
            pid = int(line.split()[1])
            # While it recovers, or writes, seals, frees, rewrites its journal.
            if rng.random() < 0.9:
                while (line := lines.next()) != "open":
                    truth.hear(line)
                truth.hear(line)
                num_open += 1
                for _ in range(rng.randrange(5)):
                    truth.hear(lines.next())
            kill_at = time.monotonic() + rng.random() * 0.005
            while (left_s := kill_at - time.monotonic()) > 0 and lines.wait(left_s):
                truth.hear(lines.next())
            os.kill(pid, signal.SIGKILL)
            while not truth.hear(lines.next()):
                pass
    finally:
        writers.stdin.close()
        writers.wait(60)
        writers.stdout.close()
    assert num_open > KILLS / 2
    assert truth.num_sealed > KILLS
    assert truth.num_freed > KILLS / 4


class Lines:
    """Whole lines of a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd, self._data = fd, b""

    def wait(self, timeout_s: float) -> bool:
        """Return True if a line, or a part of one, arrives within this time."""
        return bool(self._data) or bool(select.select([self._fd], [], [], timeout_s)[0])

    def next(self) -> str:
        while b"\n" not in self._data:
            more = os.read(self._fd, 65536)
            assert more, "the writers' process ended"
            self._data += more
        line, _, self._data = self._data.partition(b"\n")
        return line.decode()
