"""Tests of what is written for GPUs, on one: `make gpu-proof`. They are marked `gpu`, and nothing else runs them."""

from pathlib import Path

import pytest

from tests.e2e.conftest import judge_of, session, start_cluster
from tests.worker.node_pair import greedy, model, model_path, prompt, start_pair
from tools.gpu_proof import missing_gpu

__all__ = ["greedy", "judge_of", "model", "model_path", "prompt", "session", "start_cluster", "start_pair"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def cuda() -> str:
    """The device. A test that is selected must run: without a GPU it fails."""
    missing = missing_gpu()
    if missing:
        pytest.fail(missing)
    return "cuda:0"
