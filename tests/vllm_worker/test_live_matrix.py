"""The live matrix of vLLM: every kind of request under every fault, equal to an undisturbed run or refused.

Endless windows are refused by the workers; siblings' KV is refused when a worker starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from settings.worker import BUNDLED_MODEL
from tests.live_matrix.faults import (
    Fault,
    FlippedBit,
    Hang,
    Kill,
    KillConductor,
    KillFrontend,
    KillPool,
    Partition,
)
from tests.live_matrix.requests import Kind, Sizes
from tests.live_matrix.runs import Bench, record, run
from tests.live_matrix.streams import clients
from tools.soak.namespaces import TwoHosts

__all__ = ["clients"]  # a fixture

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]  # four engines start

SIZES = Sizes(answer=480, prompt=60, context=0, arriving_prompt=1200)
PREFILL, DECODE = ["prefill-0", "prefill-1"], ["decode-0", "decode-1"]
POOLS = ["pool-0", "pool-1"]
KINDS = [kind for kind in Kind if kind != Kind.SIBLING]
FLAGS = ["--engine", "vllm", "--prefill-nodes", "2", "--decode-nodes", "2", "--pool-nodes", "2", "--hang-timeout", "0"]
FLAGS += ["--block-tokens", "32", "--capacity-tokens", "16384", "--vllm-args", "--enforce-eager"]
FAULTS: list[Fault] = [
    KillConductor("conductor", ["conductor"]),
    KillFrontend("frontend", ["frontend"]),
    Hang(list(zip(PREFILL, DECODE, strict=True))),
    Kill("decode", DECODE),
    Kill("prefill", PREFILL),
    KillPool("pool", POOLS),
    FlippedBit(POOLS),
]


def bench_of(cluster: Any) -> Bench:
    refusals = {Kind.ENDLESS: "unsupported"}
    return Bench(cluster, cluster.ready["model"], SIZES, KINDS, [*PREFILL, *DECODE], refusals=refusals)


@pytest.fixture(scope="module")
def bench(start_cluster: Callable[..., Any]) -> Iterator[Bench]:
    with start_cluster(BUNDLED_MODEL, *FLAGS) as cluster:
        yield bench_of(cluster)


@pytest.fixture(scope="module")
def sibling(moonpool: Callable[..., Any], assert_refused: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The cell of requests that would reuse a sibling's KV: no worker with vLLM starts with a profile of it."""
    profile = tmp_path_factory.mktemp("siblings") / "reuse.json"
    profile.write_text("{}")
    done = moonpool("serve", BUNDLED_MODEL, *FLAGS, "--reuse-profile", profile, "--port", "0")
    assert_refused(done, "--reuse-profile needs --engine transformer", "vllm")
    return "refused: at the start"


@pytest.mark.parametrize("fault", [pytest.param(one, id=one.name) for one in FAULTS])
async def test_answers_are_those_of_an_undisturbed_run_under(
    fault: Fault,
    bench: Bench,
    sibling: str,
    clients: aiohttp.ClientSession,
    record_property: Callable[[str, object], None],
) -> None:
    cells = await run(bench, fault, clients)
    record({**cells, Kind.SIBLING: sibling}, "vLLM", fault.name, record_property)


async def test_answers_are_those_of_an_undisturbed_run_under_a_partition(
    namespaces: None,
    start_cluster: Callable[..., Any],
    sibling: str,
    clients: aiohttp.ClientSession,
    record_property: Callable[[str, object], None],
) -> None:
    tcp = ["--transport", "tcp", "--push-timeout", "4"]
    with TwoHosts() as hosts, hosts.inside(0), start_cluster(BUNDLED_MODEL, *FLAGS, *tcp) as cluster:
        cells = await run(bench_of(cluster), Partition(hosts, DECODE), clients)
    record({**cells, Kind.SIBLING: sibling}, "vLLM", "partition", record_property)
