"""Several models behind one frontend: names, aliases, who is asked, what is told of each."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from frontend import ServedModelConfig
from moonpool_proto.v1 import common_pb2, worker_pb2

COMPLETIONS = "/v1/completions"
BODY = {"prompt": list(range(10, 20)), "max_tokens": 1, "return_token_ids": True}
FINGERPRINTS = {"tiny": "aa11", "other": "bb22"}


@pytest.fixture
async def two(cluster: Any, start_front: Any, model_path: Path) -> AsyncIterator[Any]:
    """A frontend for "tiny", which is also "small", and "other"; both have workers."""
    nodes = cluster.conductor.cluster.nodes
    for status in list(nodes):
        status.node.model_fingerprint = FINGERPRINTS["tiny"]
        twin = nodes.add()
        twin.CopyFrom(status)
        twin.node.node_id += "-other"
        twin.node.model, twin.node.model_fingerprint = "other", FINGERPRINTS["other"]
        twin.node.max_model_len = 100
    cluster.conductor.cluster.ready_models[:] = ["other", "tiny"]
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    models = (ServedModelConfig(model_path, "tiny", ("small",)), ServedModelConfig(model_path, "other"))
    async with start_front(models=models) as front:
        yield front


@pytest.mark.parametrize(("asked", "model"), [(None, "tiny"), ("tiny", "tiny"), ("small", "tiny"), ("other", "other")])
async def test_a_request_goes_to_the_model_of_its_name_or_alias_and_without_one_to_the_first(
    cluster: Any, two: Any, asked: str | None, model: str
) -> None:
    status, body = await two.post(COMPLETIONS, BODY | ({"model": asked} if asked else {}))
    assert (status, body["model"]) == (200, asked or "tiny")
    assert [request.model for request in cluster.conductor.scheduled] == [model]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [20]}),
    ],
)
async def test_another_model_is_not_found_and_those_served_are_named(two: Any, path: str, body: dict[str, Any]) -> None:
    status, answer = await two.post(path, body | {"model": "gpt-4"})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert all(repr(name) in error["message"] for name in ("gpt-4", "tiny", "small", "other"))


async def test_every_name_is_listed_with_the_model_that_it_stands_for(two: Any) -> None:
    status, text = await two.get("/v1/models")
    cards = json.loads(text)["data"]
    assert status == 200
    assert [(card["id"], card["root"]) for card in cards] == [("tiny", "tiny"), ("small", "tiny"), ("other", "other")]
    for card in cards:
        assert card["moonpool"] == {
            "fingerprint": FINGERPRINTS[card["root"]],
            "block_tokens": 4,
            "kv_scale_group": 0,
            "stand_ins": [],
        }
    assert cards[0]["max_model_len"] != 100
    assert cards[2]["max_model_len"] == 100
    assert json.loads((await two.get("/v1/models/small"))[1]) == cards[1]


async def test_limits_are_the_models_own(two: Any) -> None:
    long = BODY | {"prompt": [20] * 120}
    assert (await two.post(COMPLETIONS, long | {"model": "tiny"}))[0] == 200
    status, body = await two.post(COMPLETIONS, long | {"model": "other"})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_metrics_tell_the_models_apart(two: Any) -> None:
    for name in ("small", "other", "other"):
        assert (await two.post(COMPLETIONS, BODY | {"model": name}))[0] == 200
    await two.quiet()
    _, text = await two.get("/metrics")
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="other"} 2.0' in text
    assert 'model_name="small"' not in text


async def test_readiness_names_the_model_that_has_no_place(cluster: Any, two: Any) -> None:
    await two.readiness(200)
    cluster.conductor.cluster.ready_models[:] = ["tiny"]
    _, text = await two.readiness(503)
    assert "'other'" in text
    assert "'tiny'" not in text


async def test_a_model_whose_blocks_differ_is_refused_and_the_others_are_served(cluster: Any, two: Any) -> None:
    for status in cluster.conductor.cluster.nodes:
        if status.node.model == "other":
            status.node.spec.CopyFrom(common_pb2.KvSpec(block_tokens=8))
    _, text = await two.readiness(503)
    assert "'other'" in text
    status, body = await two.post(COMPLETIONS, BODY | {"model": "other"})
    assert (status, body["error"]["code"]) == (503, "misconfigured")
    assert (await two.post(COMPLETIONS, BODY | {"model": "tiny"}))[0] == 200
