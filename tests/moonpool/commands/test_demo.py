import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvpool.ssd.folder import on_disk
from moonpool.commands.demo import shortcomings, ssd_folder

GOOD: dict[str, Any] = {
    "failed": 0,
    "rejected": 0,
    "wrong_tokens": 0,
    "digest_mismatches": 0,
    "reuse_by_tier": {"dram": {"tokens": 5}, "ssd": {"tokens": 3}},
    "interrupted": False,
    "verified_requests": 100,
    "prefix_hit_rate": 0.36,
    "ideal_prefix_hit_rate": 0.367,
    "kv_bytes_moved": 10,
}


def test_a_good_run_has_no_shortcomings() -> None:
    assert shortcomings(GOOD) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"failed": 1}, "failed is 1"),
        ({"rejected": 2}, "rejected is 2"),
        ({"wrong_tokens": 3}, "wrong_tokens is 3"),
        ({"wrong_tokens": None}, "wrong_tokens is None"),
        ({"digest_mismatches": 1}, "digest_mismatches is 1"),
        ({"reuse_by_tier": {"dram": {"tokens": 5}, "ssd": {"tokens": 0}}}, "from the pool's SSD"),
        ({"reuse_by_tier": None}, "from the pool's SSD"),
        ({"interrupted": True}, "interrupted"),
        ({"verified_requests": 49}, "verified_requests is 49"),
        ({"prefix_hit_rate": 0.33}, "prefix_hit_rate is 0.330"),
        ({"prefix_hit_rate": None}, "prefix_hit_rate is 0.000"),
        ({"ideal_prefix_hit_rate": None}, "ideal"),
        ({"kv_bytes_moved": 0}, "kv_bytes_moved is 0"),
        ({"kv_bytes_moved": None}, "kv_bytes_moved is 0"),
    ],
)
def test_each_shortcoming_is_named(changed: dict[str, Any], named: str) -> None:
    (problem,) = shortcomings({**GOOD, **changed})
    assert named in problem


def test_the_pools_folder_is_new_and_goes_with_the_demo(tmp_path: Path) -> None:
    with ssd_folder(tmp_path) as folder:
        (folder / "left-by-one-that-was-killed").touch()
        with ssd_folder(tmp_path) as again:
            assert (again, list(again.iterdir())) == (folder, [])
    assert list(tmp_path.iterdir()) == []


def test_the_pools_folder_is_never_in_memory() -> None:
    if on_disk(Path("/dev/shm")) or not on_disk(Path("/var/tmp")):
        pytest.skip("no folder in memory, or none on a disk, is known here")
    out = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with ssd_folder(out) as folder:
            assert folder.parent == Path("/var/tmp")
    finally:
        shutil.rmtree(out)
