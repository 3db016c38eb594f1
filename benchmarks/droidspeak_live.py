"""A fine-tune reuses its base's KV on a live cluster: times of a prefill with and without, and a cascade of two agents.

The sender's prefill node and pool are on another host than the receiver's, so that KV and hidden states come over TCP.
Part of `benchmarks/droidspeak.py`.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp

from benchmarks.frontend.processes import BUNDLED, Served, cluster
from benchmarks.small_kv_live import AskedTurn, CompletionsClient
from moonpool_proto.v1.common_pb2 import JsonRequest
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import open_channel
from worker.policy.reuse_profile import ReuseProfile, save_reuse_profile

_NODES: Final = ("--pool-nodes", "2", "--prefill-nodes", "1", "--decode-nodes", "2")
"""Workers go to both hosts in turn: the sender's prefill node to the first, the receiver's to the second."""
_SENDERS: Final = ("prefill-0", "decode-0", "decode-1")
_RECEIVER: Final = "receiver"
_ANSWER_TOKENS: Final = 4
_HANDED_TOKENS: Final = 25  # of the first agent's answer


@dataclass(frozen=True)
class LiveContext:
    """Token ids of a context and of a question about it."""

    ids: list[int]
    question: list[int]


def prefill_times(
    receiver: Path, profile: ReuseProfile, work: Path, contexts: Sequence[LiveContext], trials: int
) -> dict[str, Any]:
    """Return the TTFTs of the receiver: for `trials` contexts that the sender has stored, and for as many others.

    `sender_extra_bytes` are the hidden states that the sender's workers have room for, `sender_kv_bytes` their KV.
    """
    with _siblings(receiver, profile, work) as served:
        return asyncio.run(_prefill_times(served, work, contexts, trials))


def cascade(
    receiver: Path, profile: ReuseProfile, work: Path, contexts: Sequence[LiveContext], trials: int
) -> dict[str, Any]:
    """Return the TTFTs of a second agent, the receiver, that is asked about what the first one read and answered.

    It is asked twice, once with a cache salt of its own, with which nothing is reused.
    """
    with _siblings(receiver, profile, work) as served:
        return asyncio.run(_cascade(served, contexts, trials))


@contextmanager
def _siblings(receiver: Path, profile: ReuseProfile, work: Path) -> Iterator[Served]:
    work.mkdir(parents=True)
    save_reuse_profile(profile, work / "reuse.json")
    tuned = f"{_RECEIVER}={receiver},prefill_nodes=1,decode_nodes=1"
    flags = ("--add-model", tuned, "--reuse-profile", str(work / "reuse.json"))
    with cluster(BUNDLED, work / "cluster", *_NODES, *flags) as served:
        yield served


@dataclass(frozen=True)
class _Agents:
    sender: CompletionsClient
    receiver: CompletionsClient

    @classmethod
    async def begin(cls, session: aiohttp.ClientSession, served: Served, context: LiveContext) -> "_Agents":
        """Ask both models once, so that all connections are open."""
        agents = cls(*(CompletionsClient(session, served.url, name) for name in (served.model, _RECEIVER)))
        for client in (agents.sender, agents.receiver):
            await client.ask(context.ids, _ANSWER_TOKENS, "warm-up")
        return agents


async def _prefill_times(served: Served, work: Path, contexts: Sequence[LiveContext], trials: int) -> dict[str, Any]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        agents = await _Agents.begin(session, served, contexts[0])
        sent, unseen = contexts[:trials], contexts[trials : 2 * trials]
        for context in sent:
            await agents.sender.ask(context.ids, 1)
        await agents.sender.stored()
        alone, reused = list[AskedTurn](), list[AskedTurn]()
        for pair in zip(unseen, sent, strict=True):
            for context, turns in zip(pair, (alone, reused), strict=True):
                turns.append(await agents.receiver.ask([*context.ids, *context.question], _ANSWER_TOKENS))
    states = await _states(work / "cluster")
    return {
        "alone_s": median(turn.ttft_s for turn in alone),
        "reused_s": median(turn.ttft_s for turn in reused),
        "reused_share": sum(turn.sibling for turn in reused) / sum(len(turn.prompt) for turn in reused),
        "wrongly_reused": sum(turn.sibling for turn in alone),
        "sender_extra_bytes": sum(states[name]["hidden_bytes"] for name in _SENDERS),
        "sender_kv_bytes": sum(states[name]["kv_bytes"] for name in _SENDERS),
        "trials": trials,
    }


async def _states(work: Path) -> dict[str, dict[str, Any]]:
    """Return what the sender's workers report of themselves."""
    found = {}
    for name in _SENDERS:
        target = json.loads((work / "ready.json").read_text())["nodes"][name]["target"]
        async with open_channel(target) as channel:
            reply = await WorkerStub(channel).State(JsonRequest(), timeout=60)
        found[name] = json.loads(reply.json)
    return found


async def _cascade(served: Served, contexts: Sequence[LiveContext], trials: int) -> dict[str, Any]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        agents = await _Agents.begin(session, served, contexts[-1])
        first, reused, alone = list[AskedTurn](), list[AskedTurn](), list[AskedTurn]()
        moved = {"reused": 0.0, "alone": 0.0}
        for number, context in enumerate(contexts[:trials]):
            first.append(await agents.sender.ask([*context.ids, *context.question], _HANDED_TOKENS))
            await agents.sender.stored()
            handed = [*first[-1].prompt, *first[-1].answer, *context.question]
            for way, turns, salt in (("reused", reused, ""), ("alone", alone, f"alone {number}")):
                before = await agents.receiver.moved()
                turns.append(await agents.receiver.ask(handed, _ANSWER_TOKENS, salt))
                await agents.receiver.stored()  # nodes report once a second
                after = await agents.receiver.moved()
                moved[way] += sum(after.get(path, 0.0) - before.get(path, 0.0) for path in ("fetch", "load"))
    return {
        "prompt_tokens": sum(len(turn.prompt) for turn in reused) / trials,
        "first_ttft_s": median(turn.ttft_s for turn in first),
        "second_ttft_s": median(turn.ttft_s for turn in reused),
        "second_ttft_alone_s": median(turn.ttft_s for turn in alone),
        "reused_share": sum(turn.sibling for turn in reused) / sum(len(turn.prompt) for turn in reused),
        "loaded_bytes": moved["reused"] / trials,
        "loaded_bytes_alone": moved["alone"] / trials,
        "trials": trials,
    }
