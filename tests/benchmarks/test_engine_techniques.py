"""The server of the ablation gives the same tokens with every technique; its formats of weights are what they say."""

import queue
from typing import Any

import pytest
import torch

from benchmarks.quantisation import fp8, nf4
from benchmarks.techniques.batch_server import BatchServer
from benchmarks.techniques.workload import Technique
from engine import Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from worker.engine_loop import StepResult

pytestmark = pytest.mark.long

PROMPTS = {number: list(range(5 + number, 45 + 3 * number)) for number in range(5)}
ANSWERS = {0: 3, 1: 40, 2: 17, 3: 1, 4: 30}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    spec = RandomModelSpec(vocab=256, max_len=1024, scale=3.0, seed=3)
    return load_model(write_random_model(tmp_path_factory.mktemp("model"), spec), threads=1)


def served(model: Model, technique: Technique) -> tuple[dict[int, list[int]], BatchServer]:
    steps: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    server = BatchServer(model, technique, 70 * 16, steps.put)
    try:
        for number, prompt in PROMPTS.items():
            server.submit(number, prompt, ANSWERS[number])
        found: dict[int, list[int]] = {number: [] for number in PROMPTS}
        while any(len(tokens) < ANSWERS[number] for number, tokens in found.items()):
            for number, token in server.step_ended(steps.get(timeout=60)):
                found[number].append(token)
        return found, server
    finally:
        server.loop.close()


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[int, list[int]]:
    return served(model, Technique())[0]


@pytest.mark.parametrize(
    "changed", [{"batching": "apart"}, {"batching": "static"}, {"allocation": "pages"}, {"allocation": "reserve-max"}]
)
def test_tokens_are_the_same_without_a_technique(
    model: Model, expected: dict[int, list[int]], changed: dict[str, Any]
) -> None:
    found, server = served(model, Technique(**changed))
    assert found == expected
    assert {number: len(tokens) for number, tokens in found.items()} == ANSWERS
    if changed == {"allocation": "reserve-max"}:
        assert server.max_running == 2, "each may need 28 to 29 of the 70 pages"
    if changed == {"allocation": "pages"}:
        assert server.max_running > 2


def test_formats_keep_what_they_can_represent_and_round_the_rest() -> None:
    weights = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    for convert, levels in ((fp8, 256), (nf4, 16)):
        once = convert(weights)
        torch.testing.assert_close(convert(once), once, rtol=1e-5, atol=1e-6)
        assert not torch.equal(once, weights)
        rows = once if levels == 256 else once.reshape(-1, 64)
        assert max(len(row.unique()) for row in rows) <= levels
        assert 0 < (once - weights).abs().max() < (0.2 if levels == 256 else 0.6)
