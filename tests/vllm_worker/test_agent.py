"""The KV agent of a stock vLLM: a real agent and pool; the test is vLLM's scheduler and its ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool import KvGroup, KvSpec
from tests.e2e.bare_roles import Role
from vllm_worker.agent_link import AgentFailed, AgentLink, copies_socket
from vllm_worker.agent_messages import DescribedModel
from vllm_worker.copy_channel import CopyReporter
from vllm_worker.kv_jobs import KvJob
from vllm_worker.served_vllm import REPLY_S as LONGEST_WAIT_S
from vllm_worker.served_vllm import ServedVllm

BLOCK = 32
SPEC = KvSpec((KvGroup("full", 0, (0, 1), 2, 16, "float32"),), BLOCK)
MODEL = DescribedModel(
    spec=SPEC.to_proto().SerializeToString(),
    fingerprint="00" * 16,
    computation="vllm 0.32 of a test",
    max_model_len=1024,
    vocab_size=1000,
    num_ranks=2,
)
REPLY_S = 20.0


@dataclass(frozen=True)
class Pools:
    """Targets of a conductor and of two pool nodes."""

    conductor: str
    own: str
    other: str


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("p")))

    def role(name: str, *command: str) -> Role:
        flags = ["--listen", f"unix:{folder}/{name}.sock", "--socket-dir", str(folder / name), "--node-id", name]
        return Role(name, [*command, *flags], folder / f"{name}.log")

    conductor = role("c", "conductor")
    nodes = [role(name, "pool-node", "--conductor", f"unix:{folder}/c.sock") for name in ("p", "q")]
    try:
        for each in (conductor, *nodes):
            each.start()
            each.wait_ready()
        yield Pools(conductor.target, *(node.target for node in nodes))
    finally:
        for each in (*nodes, conductor):
            each.kill()


class Vllm:
    """Scheduler and two ranks of a vLLM, whose KV of a token follows from its id and its position."""

    def __init__(self, name: str, **settings: Any) -> None:
        settings = {"block_tokens": BLOCK, "capacity_tokens": 40 * BLOCK, **settings}
        self.link = AgentLink.start(settings, MODEL, name)
        self.served = ServedVllm(self.link, BLOCK)
        self.ranks = [CopyReporter(str(copies_socket(name)), rank, 2) for rank in range(2)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.link.close()

    def begin(self, request: Any) -> KvJob | None:
        """The request's job, once the agent has replied."""
        deadline_s = time.monotonic() + REPLY_S
        while self.served.is_awaited(request):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)  # as vLLM's scheduler, which looks again in each step
        return self.served.job(request.request_id)

    def slots(self, job: KvJob) -> NDArray[np.float32]:
        """Return the content of a job's slots, [blocks, layers, heads, 2, tokens, head_dim]."""
        layout = self.ranks[0].layout
        every = self.ranks[0].slots[: int(np.prod(layout.shape)) * 4].view(np.float32).reshape(layout.shape)
        return every[list(job.slots)]

    def write(self, job: KvJob, ids: list[int]) -> None:
        """Copy the KV of `ids` to their slots, from the first token on that the job saves."""
        every = self.ranks[0].slots[: int(np.prod(self.ranks[0].layout.shape)) * 4].view(np.float32)
        every = every.reshape(self.ranks[0].layout.shape)
        for index in range(job.save_from, len(ids)):
            every[job.slots[index // BLOCK], :, :, :, index % BLOCK] = value(ids, index)

    def end(self, request: Any, *, error: str = "") -> None:
        """End a request whose KV is in its slots."""
        request.num_computed_tokens = len(request.all_token_ids) - 1
        job = self.served.ended(request)
        assert job is not None
        self.write(job, request.all_token_ids[: min(request.num_computed_tokens, len(job.slots) * BLOCK)])
        self.ranks[0].ended(job.number, error)
        self.ranks[1].ended(job.number, "")


def value(ids: list[int], index: int) -> float:
    return float(ids[index] * 1000 + index)


def request(name: str, ids: list[int], **fields: Any) -> Any:
    plain = {"lora_request": None, "mm_features": [], "pooling_params": None, "prompt_embeds": None, "cache_salt": None}
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=len(ids),
        num_computed_tokens=0,
        max_tokens=100,
        all_token_ids=list(ids),
        **{**plain, **fields},
    )


def ids_of(seed: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 1000, count).tolist()
    return found


@pytest.fixture
def start(pools: Pools) -> Iterator[Callable[..., Vllm]]:
    started: list[Vllm] = []

    def start(name: str, **settings: Any) -> Vllm:
        started.append(Vllm(f"{name}-{os.getpid()}", **{"pool": pools.own, **settings}))
        return started[-1]

    yield start
    for each in started:
        each.close()


def until_stored(vllm: Vllm, ids: list[int], num_tokens: int, **fields: Any) -> KvJob:
    """The job of a request that reuses so many tokens of `ids`: the store of an ended request takes a moment."""
    for attempt in range(400):
        again = request(f"until-{attempt}", ids, **fields)
        job = vllm.begin(again)
        vllm.served.ended(again)  # nothing is computed
        for rank in vllm.ranks if job is not None else ():
            rank.ended(job.number, "")
        if job is not None and job.load_tokens >= num_tokens:
            assert job.load_tokens == num_tokens
            return job
        time.sleep(0.01)
    raise AssertionError(f"the last job is {job}, and {num_tokens} tokens were to be reused")


def test_what_one_vllm_has_computed_another_loads_partial_block_and_answer_included(
    start: Callable[..., Vllm],
) -> None:
    one, other = start("one"), start("other")
    prompt, answer = ids_of(1, 70), ids_of(2, 99)
    asked = request("a", prompt)
    job = one.begin(asked)
    assert job is not None
    assert (job.load_tokens, len(job.slots)) == (0, 3 + 2)  # two to spare
    for token in answer:
        asked.all_token_ids.append(token)
        one.served.advanced("a", len(asked.all_token_ids))
    deadline_s = time.monotonic() + REPLY_S
    while len((one.served.job("a") or job).slots) < 6:  # the answer's further block
        one.served.advanced("a", len(asked.all_token_ids))
        assert time.monotonic() < deadline_s
    one.end(asked)
    whole = [*prompt, *answer]
    job = until_stored(other, [*whole, 1, 2, 3], len(whole) - 1)
    found = other.slots(job)
    for index in range(job.load_tokens):
        assert (found[index // BLOCK, :, :, :, index % BLOCK] == value(whole, index)).all()
    salted = other.begin(request("salted", whole, cache_salt="secret"))
    assert salted is not None
    assert salted.load_tokens == 0


def test_blocks_of_another_hosts_pool_are_found_through_a_conductor(start: Callable[..., Vllm], pools: Pools) -> None:
    there = start("there", pool=pools.other)
    ids = ids_of(21, 100)
    asked = request("a", ids)
    assert there.begin(asked) is not None
    there.end(asked)
    until_stored(there, [*ids, 1], 99)

    alone = start("alone")
    job = alone.begin(request("a", [*ids, 1]))
    assert job is not None
    assert job.load_tokens == 0

    here = start("here", conductor=["127.0.0.1:1", pools.conductor])  # the first conductor does not run
    job = until_stored(here, [*ids, 1], 99)
    found = here.slots(job)
    for index in range(99):
        assert (found[index // BLOCK, :, :, :, index % BLOCK] == value(ids, index)).all()


def test_without_a_conductor_that_answers_the_own_pool_is_used(start: Callable[..., Vllm]) -> None:
    vllm = start("unanswered", conductor="127.0.0.1:1")
    ids = ids_of(22, 100)
    asked = request("a", ids)
    assert vllm.begin(asked) is not None
    vllm.end(asked)
    until_stored(vllm, [*ids, 1], 99)


def test_kv_that_a_rank_could_not_copy_is_not_stored(start: Callable[..., Vllm]) -> None:
    vllm = start("errors")
    ids = ids_of(3, 100)
    asked = request("a", ids)
    assert vllm.begin(asked) is not None
    vllm.end(asked, error="no copy")
    asked = request("b", ids_of(4, 100))
    assert vllm.begin(asked) is not None
    vllm.end(asked)
    until_stored(vllm, [*ids_of(4, 100), 1], 99)  # the later one is stored
    job = vllm.begin(request("c", [*ids, 1]))
    assert job is not None
    assert job.load_tokens == 0


def test_a_job_that_comes_too_late_is_not_used() -> None:
    now_s, sent = [0.0], list[Any]()
    replies: list[list[Any]] = []

    def take() -> list[list[Any]]:
        taken = replies[:]
        replies.clear()
        return taken

    link = SimpleNamespace(has_ended=False, take=take, send=lambda *message: sent.append(message))
    served = ServedVllm(link, BLOCK, now_s=lambda: now_s[0])  # type: ignore[arg-type]
    asked = request("a", ids_of(5, 50))
    assert served.is_awaited(asked)
    now_s[0] = REPLY_S + 1
    assert served.is_awaited(asked)
    now_s[0] = LONGEST_WAIT_S + 1
    assert not served.is_awaited(asked)
    job = KvJob(number=7, slots=(1, 2), load_tokens=32, save_from=32, saves_layers=False)
    replies.append(["job", "a", job.to_fields()])
    assert not served.is_awaited(asked)
    assert served.job("a") is None
    assert served.ended(asked) is None
    assert [message[0] for message in sent] == ["begin", "cancel"]


def test_a_cancel_frees_the_slots_of_a_job_that_vllm_has_not_seen(start: Callable[..., Vllm]) -> None:
    link = start("crossing", capacity_tokens=6 * BLOCK).link
    ids = np.array(ids_of(6, 5 * BLOCK), "<i4").tobytes()  # needs more than half of the slots
    deadline_s = time.monotonic() + REPLY_S

    def reply() -> Any:
        while not (found := link.take()):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        return found[0][0]

    link.send("begin", "a", ids, "", 10)
    assert reply() == "job"
    link.send("begin", "b", ids, "", 10)
    assert reply() == "no job"
    link.send("cancel", "a")
    for attempt in range(1000):
        link.send("begin", f"b{attempt}", ids, "", 10)
        if reply() == "job":
            return
    raise AssertionError("the slots of the cancelled request are still in use")


@pytest.mark.parametrize(
    "fields",
    [{"lora_request": object()}, {"mm_features": [1]}, {"pooling_params": object()}, {"prompt_embeds": object()}],
    ids=lambda fields: next(iter(fields)),
)
def test_requests_whose_kv_depends_on_more_than_their_ids_are_left_to_vllm(fields: dict[str, Any]) -> None:
    sent: list[Any] = []
    link = SimpleNamespace(has_ended=False, take=list, send=lambda *message: sent.append(message))
    served = ServedVllm(link, BLOCK)  # type: ignore[arg-type]
    asked = request("a", ids_of(5, 50), **fields)
    assert not served.is_awaited(asked)
    assert served.job("a") is None
    assert served.ended(asked) is None
    assert sent == []


def test_a_request_never_waits_for_slots_and_those_of_ended_ones_are_free_again(start: Callable[..., Vllm]) -> None:
    vllm = start("full", capacity_tokens=8 * BLOCK)
    first, second = request("a", ids_of(6, 6 * BLOCK)), request("b", ids_of(7, 6 * BLOCK))
    assert vllm.begin(first) is not None
    assert vllm.begin(second) is None
    vllm.served.advanced("a", 9 * BLOCK)  # more than there are
    vllm.end(first)
    assert vllm.served.ended(second) is None
    until_stored(vllm, ids_of(6, 6 * BLOCK), 6 * BLOCK - 1)
    for number in range(10):  # cancelled, in all states
        asked = request(f"cancelled-{number}", ids_of(10 + number, 5 * BLOCK))
        for _ in range(number * 20):
            vllm.served.is_awaited(asked)
        job = vllm.served.ended(asked)
        if job is not None:
            for rank in vllm.ranks:
                rank.ended(job.number, "")
    deadline_s = time.monotonic() + REPLY_S
    while vllm.begin(asked := request(f"after-{time.monotonic()}", ids_of(30, 8 * BLOCK - 1))) is None:
        vllm.served.ended(asked)
        assert time.monotonic() < deadline_s


def test_without_its_agent_vllm_goes_on_alone(start: Callable[..., Vllm], caplog: pytest.LogCaptureFixture) -> None:
    vllm = start("killed")
    asked = request("a", ids_of(8, 100))
    job = vllm.begin(asked)
    assert job is not None
    vllm.link._process.kill()
    vllm.link._process.wait()
    assert vllm.begin(request("b", ids_of(9, 100))) is None
    assert "Moonpool's KV agent has ended" in caplog.text
    vllm.served.ended(asked)
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        vllm.ranks[0].ended(job.number, "")  # the copying thread logs it


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pool_byte": 1}, "pool_byte"),
        ({"pool": ""}, "--pool is required"),
        ({"capacity_tokens": 33}, "capacity"),
        ({"kv_storage": "int8"}, "kv_storage must be exact"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_settings_that_an_agent_does_not_have_end_the_start_by_name(
    settings: dict[str, Any], words: str, pools: Pools, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AgentFailed, match="did not start"):
        AgentLink.start({"pool": pools.own, "block_tokens": BLOCK, **settings}, MODEL, f"bad-{json.dumps(settings)}")
    assert words in " ".join(capfd.readouterr().err.replace("│", " ").split())
