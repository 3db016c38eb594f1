"""Requests that a worker refuses: non-finite times, which its timers cannot handle."""

from __future__ import annotations

import math

import pytest

from moonpool_proto.v1.common_pb2 import Sampling
from moonpool_proto.v1.worker_pb2 import Submit
from worker.errors import RequestRefused
from worker.request import Request


def submit() -> Submit:
    sampling = Sampling(max_tokens=9, top_p=1.0)
    return Submit(request_id="r", prompt_ids=b"\x05\0\0\0" * 3, chain_seed=bytes(16), sampling=sampling, timeout_s=60.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["timeout_s", "idle_s"])
def test_a_request_whose_times_are_no_numbers_is_refused_by_name(name: str, seconds: float) -> None:
    asked = submit()
    setattr(asked, name, seconds)
    with pytest.raises(RequestRefused, match=rf"{name} must be a finite number of seconds, got -?(nan|inf)"):
        Request.from_proto(asked, vocab_size=64, max_model_len=64, block_tokens=8)
