"""The live matrix of the native engine: every kind of request under every fault, equal to an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine import LayerSpan, load_model
from engine.random_model import RandomModelSpec, write_random_model
from tests.e2e.conftest import TOKENIZER
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
from tests.worker.sibling_reference import write_profile
from tools.soak.namespaces import TwoHosts

pytestmark = pytest.mark.long

__all__ = ["clients"]  # a fixture

SIZES = Sizes(answer=800, prompt=60, context=608, arriving_prompt=2400)
PREFILL, DECODE = [f"receiver-prefill-{n}" for n in range(2)], [f"receiver-decode-{n}" for n in range(2)]
POOLS = ["pool-0", "pool-1"]
SPAN = LayerSpan(1, 2)
FAULTS: list[Fault] = [
    Kill("decode", DECODE),
    KillConductor("conductor", ["conductor"]),
    KillFrontend("frontend", ["frontend"]),
    Kill("prefill", PREFILL),
    KillPool("pool", POOLS),
    Hang(list(zip(PREFILL, DECODE, strict=True))),
    FlippedBit(POOLS),
]
IN_CI = ("kill decode", "kill conductor")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """Arguments of a cluster of two models, of which one reuses the other's KV."""
    folder = tmp_path_factory.mktemp("siblings")
    sender, receiver = (
        write_random_model(
            folder / name,
            RandomModelSpec(layers=6, hidden=128, vocab=2048, max_len=4096, scale=3.0, seed=seed),
            tokenizer=TOKENIZER,
        )
        for name, seed in (("sender", 5), ("receiver", 6))
    )
    models = load_model(sender, threads=1), load_model(receiver, threads=1)
    profile = write_profile(folder / "reuse.json", *models, [SPAN])
    added = f"receiver={receiver},prefill_nodes=2,decode_nodes=2"
    nodes = ["--prefill-nodes", "1", "--decode-nodes", "1", "--pool-nodes", "2", "--hang-timeout", "0"]
    # The leases of a killed process hold blocks for up to twice their length.
    return [sender, *nodes, "--add-model", added, "--reuse-profile", str(profile), "--lease", "10"]


def bench_of(cluster: Any) -> Bench:
    return Bench(cluster, "receiver", SIZES, list(Kind), [*PREFILL, *DECODE], sender="sender")


@pytest.fixture(scope="module")
def bench(flags: list[str | Path], start_cluster: Callable[..., Any]) -> Iterator[Bench]:
    with start_cluster(*flags) as cluster:
        yield bench_of(cluster)


@pytest.mark.parametrize("fault", [pytest.param(one, id=one.name) for one in FAULTS if one.name in IN_CI])
async def test_answers_are_those_of_an_undisturbed_run_in_ci_too_under(
    fault: Fault, bench: Bench, clients: aiohttp.ClientSession, record_property: Callable[[str, object], None]
) -> None:
    record(await run(bench, fault, clients), "native", fault.name, record_property)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [pytest.param(one, id=one.name) for one in FAULTS])
async def test_answers_are_those_of_an_undisturbed_run_under(
    fault: Fault, bench: Bench, clients: aiohttp.ClientSession, record_property: Callable[[str, object], None]
) -> None:
    record(await run(bench, fault, clients), "native", fault.name, record_property)


@pytest.mark.nightly
async def test_answers_are_those_of_an_undisturbed_run_under_a_partition(
    namespaces: None,
    flags: list[str | Path],
    start_cluster: Callable[..., Any],
    clients: aiohttp.ClientSession,
    record_property: Callable[[str, object], None],
) -> None:
    tcp = ["--transport", "tcp", "--push-timeout", "2"]
    with TwoHosts() as hosts, hosts.inside(0), start_cluster(*flags, *tcp) as cluster:
        cells = await run(bench_of(cluster), Partition(hosts, DECODE), clients)
    record(cells, "native", "partition", record_property)
