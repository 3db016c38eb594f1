"""A frontend whose model or block size is not the workers': said clearly, everywhere, and only then."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontend import ServedModelConfig
from frontend.cluster import configuration_mismatch
from moonpool_proto.v1 import common_pb2, conductor_pb2, worker_pb2
from rpc.versions import named, own_software, package_version

COMPLETIONS = "/v1/completions"
BODY = {"prompt": list(range(10, 20)), "max_tokens": 1, "return_token_ids": True}


def worker(model: str = "tiny", block_tokens: int = 4) -> conductor_pb2.Node:
    spec = common_pb2.KvSpec(block_tokens=block_tokens)
    return conductor_pb2.Node(node_id="p0", role=common_pb2.ROLE_PREFILL, model=model, spec=spec)


POOL = conductor_pb2.Node(node_id="pool-0", role=common_pb2.ROLE_POOL)


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        ([worker(block_tokens=8)], ["block_tokens 4", "have 8", "'p0'"]),
        ([worker("other"), POOL, worker("more")], ["'tiny'", "'more', 'other'"]),
    ],
)
def test_a_misfit_names_both_values(nodes: list[conductor_pb2.Node], named: list[str]) -> None:
    said = configuration_mismatch(nodes, "tiny", 4, was_served=False)
    assert said is not None
    assert all(name in said for name in named)


@pytest.mark.parametrize("nodes", [[], [POOL], [worker()], [worker("other", 8), worker()]])
def test_workers_of_other_models_pool_nodes_and_nobody_are_no_misfit(nodes: list[conductor_pb2.Node]) -> None:
    assert configuration_mismatch(nodes, "tiny", 4, was_served=False) is None


def test_workers_of_another_model_of_the_frontend_are_no_misfit_but_strangers_are() -> None:
    assert (
        configuration_mismatch([worker("other")], "tiny", 4, was_served=False, frontend_models=("tiny", "other"))
        is None
    )
    said = configuration_mismatch(
        [worker("other"), worker("more")], "tiny", 4, was_served=False, frontend_models=("tiny", "other")
    )
    assert said is not None
    assert "'more'" in said
    assert "'other'" not in said


def test_a_model_that_lost_its_workers_is_no_misfit() -> None:
    assert configuration_mismatch([worker("other")], "tiny", 4, was_served=True) is None


async def test_another_block_size_is_told_by_readiness_log_and_requests(
    cluster: Any, start_front: Any, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    async with start_front(block_tokens=8) as front:
        _, ready = await front.readiness(503)
        assert "block_tokens 8" in ready
        assert "have 4" in ready
        status, body = await front.post(COMPLETIONS, BODY)
        assert (status, body["error"]["code"]) == (503, "misconfigured")
        assert "block_tokens 8" in body["error"]["message"]
        assert cluster.conductor.scheduled == []
        assert (await front.get("/live"))[0] == 200
    said = [line for line in log_lines() if "have 4" in line["message"]]
    assert [line["level"].lower() for line in said] == ["error"]


async def test_a_conductor_of_a_version_that_cannot_be_spoken_with_is_told_by_both_names(
    cluster: Any, start_front: Any
) -> None:
    cluster.conductor.cluster.software.CopyFrom(common_pb2.Software(version="9.0.0", wire=9, oldest_wire=8))
    async with start_front() as front:
        status, body = await front.post(COMPLETIONS, BODY)
        assert (status, body["error"]["code"]) == (503, "misconfigured")
        for text in (body["error"]["message"], (await front.readiness(503))[1]):
            assert "Moonpool 9.0.0 (wire 9), which needs wire 8 or newer" in text
            assert named(own_software()) in text
        assert json.loads((await front.get("/version"))[1]) == {"version": package_version()}


async def test_another_model_is_told_by_readiness_and_requests(
    cluster: Any, start_front: Any, model_path: Path
) -> None:
    async with start_front(models=(ServedModelConfig(model_path, "mine"),)) as front:
        assert "'mine'" in (await front.readiness(503))[1]
        status, body = await front.post(COMPLETIONS, BODY)
        assert (status, body["error"]["code"]) == (503, "misconfigured")
        assert "'tiny'" in body["error"]["message"]


async def test_workers_that_joined_since_the_last_look_are_looked_at_before_a_request_is_placed(
    cluster: Any, start_front: Any
) -> None:
    nodes = list(cluster.conductor.cluster.nodes)
    cluster.conductor.cluster = conductor_pb2.ClusterReply()
    async with start_front(block_tokens=8, cluster_interval_s=60.0) as front:
        cluster.conductor.cluster = conductor_pb2.ClusterReply(ready_models=["tiny"], nodes=nodes)
        status, body = await front.post(COMPLETIONS, BODY)
        assert (status, body["error"]["code"]) == (503, "misconfigured")


async def test_a_misfit_that_is_put_right_is_over(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    for status in cluster.conductor.cluster.nodes:
        status.node.spec.block_tokens = 8
    await front.readiness(503)
    for status in cluster.conductor.cluster.nodes:
        status.node.spec.block_tokens = 4
    await front.readiness(200)
    assert (await front.post(COMPLETIONS, BODY))[0] == 200
