"""The live benchmark of dialogues: its ratio estimate, and the frontends that prefer each conductor."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.dialogues_live import reuse
from benchmarks.frontend.processes import frontend_preferring
from frontend.conductor import ConductorClient


def turn(dialogue: int, prompt_tokens: int, cached_tokens: int) -> Any:
    return SimpleNamespace(
        dialogue=dialogue, request=SimpleNamespace(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    )


def test_reuse_is_the_ratio_of_sums_and_its_interval_follows_from_the_dialogues_differences() -> None:
    even = reuse([turn(each, 100 * (each + 1), 90 * (each + 1)) for each in range(5) for _ in range(3)])
    assert (even.mean, even.low, even.high) == (pytest.approx(0.9),) * 3
    uneven = reuse([turn(each, 100, 80 + 5 * each) for each in range(5)])
    assert uneven.mean == pytest.approx(0.9)
    # Student's t with 4 degrees of freedom, 2.776, times the standard error of 80, 85, ... 100.
    assert uneven.high - uneven.mean == pytest.approx(2.776 * 0.0790569 / 5**0.5, rel=1e-3)


@pytest.mark.parametrize("conductors", [1, 2, 4])
async def test_the_named_frontend_prefers_the_conductor(conductors: int) -> None:
    targets = [f"unix:/c{number}.sock" for number in range(conductors)]
    names = [frontend_preferring(number, conductors) for number in range(conductors)]
    assert names.count("frontend") == 1
    clients = [ConductorClient(targets, asked_by=name) for name in names]
    assert [client.target for client in clients] == targets
    for client in clients:
        await client.close()
