"""One run of the live matrix: all kinds of requests under one fault, compared with undisturbed ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.live_matrix.faults import Fault
from tests.live_matrix.requests import Asked, Kind, Phase, Sizes, requests_of, storing
from tests.live_matrix.streams import Answer, Stream, all_ended

MID_ANSWER_TOKENS = 8
MAX_ROUNDS = 6  # until every kind has been hit
BEGINS_WITHIN_S = 120.0
BAD = ("WRONG", "LOST")


@dataclass
class Bench:
    """A running cluster and what its answers must be.

    `model`: the served name that is asked. `sender`: that of its sibling; "" if there is none. `forgetful`: the workers
    that are restarted when KV is to be in the pools alone. `refusals`: codes of the errors by which kinds are refused.
    """

    cluster: Any
    model: str
    sizes: Sizes
    kinds: Sequence[Kind]
    forgetful: Sequence[str]
    sender: str = ""
    refusals: Mapping[Kind, str] = field(default_factory=dict)
    expected: dict[str, Answer] = field(default_factory=dict)
    exact: dict[str, Answer] = field(default_factory=dict)  # of requests with a context, without the sibling's KV
    num_rounds: int = 0

    def stream(self, session: aiohttp.ClientSession, asked: Asked, salt: str, may_ask_again: int = 0) -> Stream:
        """Begin to stream an answer. KV is shared within a salt only."""
        options = {"model": self.model, "cache_salt": salt}
        return Stream(session, self.cluster.url, asked, options, may_ask_again=may_ask_again)

    async def compute_contexts(self, session: aiohttp.ClientSession, all_asked: Sequence[Asked], salt: str) -> None:
        """Have the sibling compute and store the contexts of the requests."""
        contexts = [asked.context for asked in all_asked if asked.context]
        options = {"model": self.sender, "cache_salt": salt, "max_tokens": 1}
        await asyncio.gather(*(self.cluster.complete(session, context, **options) for context in contexts))
        if contexts:
            await self.cluster.validate()  # everything is stored

    async def answers(self, session: aiohttp.ClientSession, all_asked: Sequence[Asked], salt: str) -> dict[str, Answer]:
        """Return the undisturbed answers by the requests' names."""
        streams = [self.stream(session, asked, salt) for asked in all_asked]
        await all_ended(streams)
        lost = [f"{stream.asked.name}: {stream.lost}" for stream in streams if stream.lost]
        assert not lost, lost
        return {stream.asked.name: stream.answer for stream in streams}

    async def learn(self, session: aiohttp.ClientSession) -> None:
        """Get the undisturbed answers, unless they are known."""
        if self.expected:
            return
        all_asked = [asked for kind in self.kinds for asked in requests_of(kind, self.sizes)]
        with_context = [asked for asked in all_asked if asked.context]
        for number in range(MAX_ROUNDS):  # on a busy machine the first pushes may be late, and requests placed again
            salt = f"undisturbed {number}"
            await self.compute_contexts(session, with_context, salt)
            expected = await self.answers(session, all_asked, salt)
            served = {name: answer for name, answer in expected.items() if not answer.error}
            reused = all(served[asked.name].sibling_tokens for asked in with_context if asked.name in served)
            if reused and all(answer.attempts <= 1 for answer in served.values()):
                break
        else:
            raise AssertionError(f"without a fault, requests were placed again or reused no KV, {MAX_ROUNDS} times")
        exact = await self.answers(session, with_context, "without sibling")
        for asked in all_asked:
            answer, name = expected[asked.name], asked.name
            refusal = self.refusals.get(asked.kind, "")
            assert answer.error == refusal, f"{name}: error {answer.error!r}, expected {refusal!r}"
            if asked.phase == Phase.ANSWERING and not refusal:
                assert answer.num_tokens > 10 * MID_ANSWER_TOKENS, f"{name} has {answer.num_tokens} tokens"
            if asked.context and not refusal:
                assert answer.difference(exact[name]), f"{name}: the sibling's KV changes nothing"
        self.expected, self.exact = expected, exact


async def run(bench: Bench, fault: Fault, session: aiohttp.ClientSession) -> dict[Kind, str]:
    """Return the matrix's cells of a fault, by kind. Raises AssertionError if the fault did not hit every kind."""
    await bench.learn(session)
    cells = dict[Kind, str]()
    waiting = set(bench.kinds) - bench.refusals.keys()  # to be hit
    for number in range(MAX_ROUNDS):
        kinds = [*bench.kinds[number:], *bench.kinds[:number]]  # a later round delays others
        by_kind, in_progress = await _round(bench, fault, session, kinds, number)
        for kind, streams in by_kind.items():
            cells[kind] = worst([cells.get(kind, ""), *(_outcome(bench, stream) for stream in streams)])
            if cells[kind].startswith(BAD) or (kind in in_progress and fault.hit(streams)):
                waiting.discard(kind)
        if not waiting:
            return {kind: cells[kind] for kind in bench.kinds}
    raise AssertionError(f"{fault.name} hit no request of {sorted(waiting)} in {MAX_ROUNDS} rounds")


def record(cells: Mapping[Kind, str], engine: str, fault: str, record_property: Callable[[str, object], None]) -> None:
    """Write the cells into the JUnit report, for `.ci/report_tests.py`. Raises AssertionError for a defect."""
    for kind, outcome in cells.items():
        record_property(f"live matrix: {engine}: {fault}: {kind}", outcome)
    defects = [outcome for outcome in cells.values() if outcome.startswith(BAD)]
    assert not defects, "\n".join(defects)


async def _round(
    bench: Bench, fault: Fault, session: aiohttp.ClientSession, kinds: Sequence[Kind], number: int
) -> tuple[dict[Kind, list[Stream]], set[Kind]]:
    """Disturb requests of these kinds once. Return their streams, which have ended, and the kinds of which the fault
    found answers in progress; the cluster has healed.
    """
    bench.num_rounds += 1  # no round finds the KV of an earlier one
    salt, cluster = f"round {bench.num_rounds}", bench.cluster
    all_asked = [asked for kind in kinds for asked in requests_of(kind, bench.sizes)]
    await bench.compute_contexts(session, all_asked, salt)
    answering = [asked for asked in all_asked if asked.phase == Phase.ANSWERING]
    arriving = [asked for asked in all_asked if asked.phase == Phase.ARRIVING]
    if fault.needs_stored_kv:
        await _store(bench, session, arriving, salt)
    again = int(fault.breaks_connections)
    streams = [bench.stream(session, asked, salt, again) for asked in answering]
    try:
        async with asyncio.timeout(BEGINS_WITHIN_S):
            await asyncio.gather(*(stream.reach(MID_ANSWER_TOKENS) for stream in streams))
        if not fault.arrives_after:
            later = [bench.stream(session, asked, salt, again) for asked in arriving]
            streams += later
            await fault.moment(cluster, number, [one for one in later if one.asked.kind not in bench.refusals])
        in_progress = {one.asked.kind for one in streams if one.asked.phase == Phase.ANSWERING and not one.is_over}
        try:
            await fault.strike(cluster, number)
            if fault.arrives_after:
                streams += [bench.stream(session, asked, salt, again) for asked in arriving]
            await all_ended(streams)
        finally:
            await fault.heal(cluster, session)
    finally:
        for stream in streams:
            stream.task.cancel()
    await cluster.validate()
    return {kind: [stream for stream in streams if stream.asked.kind == kind] for kind in kinds}, in_progress


async def _store(bench: Bench, session: aiohttp.ClientSession, all_asked: Sequence[Asked], salt: str) -> None:
    """Bring the prompts' KV into the pools, and have the workers forget it."""
    await bench.answers(session, [storing(asked) for asked in all_asked], salt)
    await bench.cluster.validate()
    killed = {name: bench.cluster.kill(name) for name in bench.forgetful}
    for name, pid in killed.items():
        await bench.cluster.wait_restarted(name, pid)


def _outcome(bench: Bench, stream: Stream) -> str:
    """Return the cell of one request."""
    answer, name = stream.answer, stream.asked.name
    if stream.lost:
        return f"LOST: {name}: {stream.lost}"
    expected, how = bench.expected[name], ""
    if expected.sibling_tokens and not answer.sibling_tokens:
        expected, how = bench.exact[name], ", without the sibling"
    if difference := expected.difference(answer):
        return f"WRONG: {name}: {difference} ({answer.attempts} attempts, {answer.sibling_tokens} sibling tokens)"
    if answer.error:
        return f"refused: {answer.error}"
    if stream.num_breaks:
        return "equal, asked again"
    return f"equal{how}, resumed" if answer.attempts > 1 else f"equal{how}"


def worst(outcomes: Sequence[str]) -> str:
    """Return the outcome that says most about a cell: defects, then what a request went through."""
    order = (*BAD, "refused", "equal, asked again", "equal, without the sibling", "equal, resumed", "equal")
    return min(
        filter(None, outcomes), key=lambda text: next(n for n, start in enumerate(order) if text.startswith(start))
    )
