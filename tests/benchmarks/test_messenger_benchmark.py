"""The messenger's benchmark: its arithmetic, and one short run of it with the contenders that are everywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.transfers.contenders import Turn
from benchmarks.transfers.figures import Rounds, slices_vs_one_piece, summary

ROOT = Path(__file__).parents[2]


def turn(nbytes: int, *, write: bool = True, window: int = 8) -> Turn:
    return Turn((nbytes, 1), write, 10, window)


def test_ratios_are_medians_over_rounds_of_turns_of_the_same_round() -> None:
    rounds = Rounds()
    # The machine was ten times slower in the second round: a ratio of medians would be 2.
    for seconds, factor in ((1.0, 3), (10.0, 3), (1.0, 2)):
        rounds.add("1MiB", "tcp", turn(1 << 20), [seconds])
        rounds.add("1MiB", "mooncake", turn(1 << 20), [seconds * factor])
    assert summary(rounds)["tcp_vs_mooncake"] == 3


def test_a_headline_is_the_least_over_sizes_and_directions() -> None:
    rounds = Rounds()
    for label, nbytes, write, factor in (
        ("64KiB", 65536, True, 4),
        ("1MiB", 1 << 20, True, 2),
        ("1MiB", 1 << 20, False, 3),
    ):
        rounds.add(label, "tcp", turn(nbytes, write=write), [1.0])
        rounds.add(label, "mooncake", turn(nbytes, write=write), [1.0 * factor])
    told = summary(rounds)
    assert told["tcp_vs_mooncake"] == 2
    assert told["by_size"]["1MiB"]["read"]["ratios"]["tcp_vs_mooncake"] == {"throughput": 3}


def test_memcpy_counts_from_a_mebibyte_up() -> None:
    rounds = Rounds()
    for label, nbytes, factor in (("64KiB", 65536, 0.1), ("1MiB", 1 << 20, 0.9)):
        rounds.add(label, "shm", turn(nbytes), [1.0])
        rounds.add(label, "memcpy", turn(nbytes), [factor])
    assert summary(rounds)["shm_vs_memcpy"] == 0.9


def test_latency_is_told_apart_and_quicker_is_more() -> None:
    rounds = Rounds()
    rounds.add("64KiB", "shm", turn(65536, window=1), [2e-6, 1e-6, 9e-6])
    rounds.add("64KiB", "nixl", turn(65536, window=1), [8e-6])
    told = summary(rounds)
    assert told["shm_vs_nixl_latency"] == 4
    assert told["by_size"]["64KiB"]["write"]["shm"] == {"p50_us": 2.0}
    assert "shm_vs_nixl" not in told


def test_slices_are_compared_with_one_piece_of_as_many_bytes() -> None:
    rounds = Rounds()
    rounds.add("many", "tcp", Turn((1024, 10), True, 10, 8), [2.0])
    rounds.add("one", "tcp", Turn((10240, 1), True, 10, 8), [1.0])
    assert slices_vs_one_piece(rounds, "many", "one", ("tcp", "shm")) == {"tcp_write": 0.5}


@pytest.mark.long
def test_a_run_compares_what_is_there_and_says_what_is_not() -> None:
    contenders = ["tcp_digests", "shm_borrow", "memcpy"]
    command = [sys.executable, str(ROOT / "benchmarks" / "messenger.py"), "--rounds", "1", "--sizes", "64KiB"]
    done = subprocess.run(
        [*command, "--only", *contenders], capture_output=True, text=True, timeout=280, check=True, cwd=ROOT
    )
    told = json.loads(done.stdout.splitlines()[-1])
    row = told["by_size"]["64KiB"]["read"]
    assert set(contenders) <= row.keys()
    assert all(row[name]["p50_us"] > 0 for name in contenders)
    assert row["tcp_digests"]["gbps"] > 0
    assert told["zero_copy_handover"]["64KiB"]["borrow_p50_us"] == row["shm_borrow"]["p50_us"]
    assert "mooncake" in told["absent"]


def test_contenders_that_do_not_exist_are_refused() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "messenger.py"), "--only", "pigeon"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "unknown contender pigeon; choose from plain_socket, memcpy, tcp" in done.stderr


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_picture_shows_whoever_was_there(tmp_path: Path, ending: str) -> None:
    from benchmarks.transfers.picture import draw

    row = {"tcp": {"gbps": 2.0, "p50_us": 100.0}, "memcpy": {"gbps": 9.0, "p50_us": 9.0}}
    picture = tmp_path / f"p.{ending}"
    draw({"by_size": {"64KiB": {"write": row}}}, picture)
    assert picture.stat().st_size > 5_000
