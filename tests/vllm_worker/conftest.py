"""Tests of vLLM as an engine. Those that need vLLM run in its own environment (`make test-vllm`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from settings.worker import BUNDLED_MODEL
from tests.e2e.conftest import assert_refused, judge_of, moonpool, session, start_cluster

__all__ = ["assert_refused", "judge_of", "moonpool", "session", "start_cluster"]

HAS_VLLM = importlib.util.find_spec("vllm") is not None
if os.environ.get("REQUIRE_VLLM") and not HAS_VLLM:
    raise RuntimeError("REQUIRE_VLLM is set, and vLLM is not installed")
collect_ignore = (
    []
    if HAS_VLLM
    else [
        *("test_clients.py", "test_cluster.py", "test_connector.py", "test_engine_args.py", "test_event_subscriber.py"),
        *("test_handover.py", "test_keyed_sampler.py", "test_live_matrix.py", "test_runner.py", "test_stock.py"),
        *("test_tensor_parallel.py", "test_vllm_layouts.py"),
    ]
)


@pytest.fixture(scope="session")
def cluster(start_cluster: Callable[..., Any]) -> Iterator[Any]:
    """Two aggregated workers with vLLM: each takes about a minute of CPU to start, so all tests share them."""
    flags = ["--engine", "vllm", "--aggregated", "2", "--block-tokens", "32", "--capacity-tokens", "16384"]
    flags += ["--step-timeout", "60"]  # for a test in which an engine stands still
    with start_cluster(BUNDLED_MODEL, *flags) as running:
        yield running


@pytest.fixture(scope="session")
def judge(judge_of: Callable[[Path], Any]) -> Any:
    """The native engine with the same weights: is every token what the model would have said?"""
    return judge_of(BUNDLED_MODEL)
