"""The soak itself, for some seconds: it runs, troubles and finds nothing; and what it judges by finds what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools.soak.__main__ import main
from tools.soak.shapes import applied, first_difference, random_rows
from tools.soak.watch import growth

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.transports("auto", "rdma")
def test_a_short_soak_finds_nothing(transport: str, patience: float) -> None:
    options = {"--transport": transport, "--seconds": 5 * patience, "--seed": 11, "--trouble-every-s": 0.5 * patience}
    options |= {"--peers": 4}
    if transport == "rdma":
        options |= {"--seconds": 45, "--slot-kib": 64, "--peers": 2, "--workers": 1, "--patience": patience}
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", *(str(word) for option in options.items() for word in option)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    report = json.loads(lines[-1])
    assert report["failures"] == []
    assert done.returncode == 0
    assert "seed 11" in lines[0]
    assert report["seed"] == 11
    assert report["operations"]
    assert report["gib_checked"] > 0
    assert sum(report["trouble"].values()) > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seconds", "-1"], "--seconds, --trouble-every-s and --patience must be above 0"),
        (["--workers", "0"], "--workers and --slot-kib must be at least 1"),
        (["--peers", "3"], "--peers must be above the number of transports"),
    ],
)
def test_flags_with_which_nothing_would_be_soaked_are_refused(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_shapes_stay_within_the_room_and_never_overlap_where_they_land() -> None:
    rng = np.random.default_rng(1)
    for room in (64, 1000, 65_536):
        for _ in range(200):
            rows = random_rows(rng, room)
            assert (rows[:, 2] > 0).all()
            assert (rows >= 0).all()
            assert (rows[:, :2] + rows[:, 2:] <= room).all()
            landed = rows[np.argsort(rows[:, 1])]
            assert (landed[1:, 1] >= landed[:-1, 1] + landed[:-1, 2]).all()


def test_a_wrong_byte_is_found_and_an_old_or_a_new_one_is_not() -> None:
    old, source = np.zeros(100, np.uint8), np.full(100, 7, np.uint8)
    new = applied(np.array([[0, 10, 20]]), source, old)
    half = old.copy()
    half[10:15] = 7
    assert first_difference(half, old, new) is None
    half[40] = 7
    assert first_difference(half, old, new) == "1 of 100 bytes are wrong, first at 40: [7, 0, 0, 0, 0, 0, 0, 0]"


def test_a_trend_is_a_leak_and_noise_is_none() -> None:
    noise = [{"rss_kib": 100_000 + 9_000 * (n % 2), "descriptors": 20 + n % 5, "threads": 9 + n % 3} for n in range(90)]
    assert growth("it", noise) == []
    leak = [sample | {"descriptors": 20 + n // 3} for n, sample in enumerate(noise)]
    assert growth("it", leak) == ["it: descriptors grew from 34 to 44; a growth of 6 is allowed"]
