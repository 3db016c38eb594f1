from typing import Any

import pytest

from moonpool.demo import shortcomings

GOOD: dict[str, Any] = {
    "failed": 0,
    "rejected": 0,
    "wrong_tokens": 0,
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
