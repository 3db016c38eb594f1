"""A cluster whose model is given by its Hugging Face id, without a network: every role uses the hub's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine import load_model
from tests.hub_server import store_snapshot

ID = "org/random"


@pytest.fixture(scope="module")
def cluster(
    random_model: Path, start_cluster: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    home = tmp_path_factory.mktemp("home")
    store_snapshot(home / "hub", ID, random_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        with start_cluster(Path(ID), "--add-model", f"twin={random_model}", "--block-tokens", "8") as running:
            yield running


async def test_the_model_is_served_under_its_id_with_the_fingerprint_of_its_weights(
    cluster: Any, random_model: Path, session: aiohttp.ClientSession
) -> None:
    async with session.get(f"{cluster.url}/v1/models") as response:
        served = {each["id"]: each["moonpool"]["fingerprint"] for each in (await response.json())["data"]}
    fingerprint = load_model(random_model, threads=1).fingerprint
    assert served == {ID: fingerprint, "twin": fingerprint}


async def test_the_same_model_in_a_local_folder_answers_alike(
    cluster: Any, random_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    prompt = [int(token) for token in np.random.default_rng(1).integers(10, 2000, 64)]
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
    first = await cluster.complete(session, prompt, **options, model=ID)
    second = await cluster.complete(session, prompt, **options, model="twin")
    assert second.token_ids == first.token_ids
    assert not judge_of(random_model).wrong_tokens(first)
    await cluster.validate()
