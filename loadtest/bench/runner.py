"""Run of a benchmark, from prompts to results; warm-up requests are excluded."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import numpy as np
import uvloop
from rich.console import Console

from loadtest.bench.config import BenchConfig
from loadtest.bench.dialects import BenchDialect, BenchRequest
from loadtest.bench.prompts import (
    Prompt,
    arrival_times,
    custom_prompts,
    random_prompts,
    repeated_prefixes,
    sharegpt_prompts,
)
from loadtest.config import server_root
from loadtest.errors import ServerUnreachable, ServerUnusable, TokenizerMismatch
from loadtest.http import RetryPolicy, allow_many_connections, open_session
from loadtest.model_folder import local_model_folder
from loadtest.progress import ProgressDisplay, background, interrupts, show_tally
from loadtest.record import RequestRecord, SendOutcome
from loadtest.sender import LoadPlan, SendTally, send_share
from loadtest.senders import choose_senders, open_senders, send_watched, start_soon
from loadtest.server import ServerInfo, check_tokenizer, discover
from loadtest.tokens import ModelTokens, load_model_tokens
from loadtest.validity import clock_from, invalid_reasons
from loadtest.verify import paced_notice

_AGAIN_S = 0.5


async def warm_up(load: LoadPlan, *, count: int, ready_s: float, stop: asyncio.Event) -> None:
    """Repeat the load's first request until it is answered, at most for `ready_s` seconds, then send it `count` times.

    `ready_s` 0 skips the readiness check. Returns early when `stop` is set. Raises ServerUnusable if no request is
    answered in time or a warm-up request fails.
    """
    deadline = time.monotonic() + ready_s
    while ready_s > 0 and not stop.is_set():
        trial = await _send(load, 1, stop)
        if _problem(trial) == "":
            break
        if time.monotonic() >= deadline:
            raise ServerUnusable(f"the server was not ready within {ready_s:g} s: a request {_problem(trial)}")
        await asyncio.sleep(_AGAIN_S)
    if count and not stop.is_set() and (problem := _problem(await _send(load, count, stop))):
        raise ServerUnusable(f"a warm-up request {problem}")


async def _send(load: LoadPlan, count: int, stop: asyncio.Event) -> list[RequestRecord]:
    copies = [replace(load.requests[0], index=index, arrival_s=0.0) for index in range(count)]
    clock = clock_from(time.monotonic())
    return await send_share(replace(load, requests=copies, retry=None), clock=clock, stop=stop, tally=SendTally(count))


def _problem(records: Sequence[RequestRecord]) -> str:
    """Describe how the first failed request ended; "" if none failed. Requests cancelled by the user do not count."""
    ended = (r for r in records if r.outcome not in (SendOutcome.COMPLETED, SendOutcome.UNFINISHED))
    return next((f"was {record.outcome.value}: {record.reason}" for record in ended), "")


_ASK_DEADLINE_S = 15.0
_READY_POLL_S = 0.5


@dataclass(frozen=True)
class BenchResult:
    """Result of one load. `records` are in order of sending; `invalid_reasons` is empty for a valid run."""

    model: str
    records: Sequence[RequestRecord] = field(repr=False)
    invalid_reasons: Sequence[str]
    senders: int
    interrupted: bool
    notices: Sequence[str]


@dataclass(frozen=True)
class Target:
    """Server under test, as discovered.

    `as_text`: prompts are sent as text, because the endpoint takes chat messages or the server is not known to use the
    local tokenizer.
    """

    server: ServerInfo
    tokens: ModelTokens
    as_text: bool
    notices: tuple[str, ...]


def run_bench(config: BenchConfig, tokenizer: Path, console: Console | None = None) -> BenchResult:
    """Send the load and return its records; after Ctrl-C, those so far. Raises ReplayError.

    `tokenizer`: folder or Hugging Face id of the model whose tokenizer is used. `console` None disables output.
    """
    allow_many_connections()
    tokens = load_tokenizer(tokenizer)
    with ProgressDisplay(console) as display, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, tokens, display))


def load_tokenizer(path: Path) -> ModelTokens:
    """Read the tokenizer of a folder or a Hugging Face id. Raises ModelUnavailable or TokenizerUnusable."""
    flag = "--tokenizer"
    return load_model_tokens(local_model_folder(path, flag=flag, weights=False), flag=flag)


async def _run(config: BenchConfig, tokens: ModelTokens, display: ProgressDisplay) -> BenchResult:
    stop = asyncio.Event()
    with interrupts(stop):
        target = await find_target(config, tokens)
        requests = plan(config, target)
        await prepare(config, target, requests, stop)
        return await measure(config, target, requests, stop, display, "bench")


async def find_target(config: BenchConfig, tokens: ModelTokens) -> Target:
    """Query the server's models and compare its tokenizer with the local one. Raises ServerUnusable."""
    async with open_session(api_key=config.api_key, headers=dict(config.headers)) as session:
        server = await _ready_server(config, session)
        notice = ""
        try:
            notice = await check_tokenizer(session, server, tokens, deadline_s=_ASK_DEADLINE_S, flag="--tokenizer")
        except TokenizerMismatch:
            if config.tokenizer is not None:
                raise
            notice = (
                "prompts are made with the bundled model's tokenizer, which differs from the server's; give the "
                "server's with --tokenizer"
            )
    # A server with a different tokenizer would read the ids as different text, or reject them.
    return Target(
        server,
        tokens,
        config.chat or bool(notice),
        (*paced_notice(server.stand_ins), *([notice] if notice else [])),
    )


async def _ready_server(config: BenchConfig, session: aiohttp.ClientSession) -> ServerInfo:
    deadline = time.monotonic() + config.ready_check_timeout_s
    name, url = config.served_model_name or config.model, server_root(config.base_url)
    while True:
        try:
            return await discover(session, url, model=name, deadline_s=_ASK_DEADLINE_S, needs_list=False)
        except ServerUnreachable:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_READY_POLL_S)


def plan(config: BenchConfig, target: Target) -> list[BenchRequest]:
    """Return the requests in order of arrival, determined by the configuration alone. Raises DatasetUnusable."""
    rng = np.random.default_rng(config.seed)
    prompts = _prompts(config, target, rng)
    due = arrival_times(len(prompts), rate=config.request_rate, burstiness=config.burstiness, rng=rng)
    seeds = rng.integers(0, 2**31, len(prompts))
    return [
        BenchRequest(
            index=index,
            arrival_s=float(due[index]),
            prompt=prompt.ids,
            block_ids=(),
            max_tokens=prompt.output_tokens,
            temperature=float(config.sampling.get("temperature", math.nan)),
            seed=int(seeds[index]),
            overlong=False,
            text=prompt.text,
        )
        for index, prompt in enumerate(prompts)
    ]


def _prompts(config: BenchConfig, target: Target, rng: np.random.Generator) -> list[Prompt]:
    if config.dataset_name == "random":
        return list(random_prompts(config, target.tokens, rng, as_text=target.as_text))
    if config.dataset_name == "prefix_repetition":
        return list(repeated_prefixes(config, target.tokens, rng, as_text=target.as_text))
    return {"sharegpt": sharegpt_prompts, "custom": custom_prompts}[config.dataset_name](config, target.tokens, rng)


async def prepare(config: BenchConfig, target: Target, requests: Sequence[BenchRequest], stop: asyncio.Event) -> None:
    """Wait for the server to be ready if configured, and send the warm-up requests. Raises ServerUnusable."""
    load = _load(config, target, requests[:1])
    await warm_up(load, count=config.num_warmups, ready_s=config.ready_check_timeout_s, stop=stop)


async def measure(
    config: BenchConfig,
    target: Target,
    requests: Sequence[BenchRequest],
    stop: asyncio.Event,
    display: ProgressDisplay,
    stage: str,
) -> BenchResult:
    """Send the requests, wait for all of them to end and return the result."""
    load = _load(config, target, requests)
    senders = config.senders or choose_senders(requests, speed=1.0, cores=os.cpu_count() or 1)
    senders = min(senders, len(requests), config.max_concurrency or senders)
    tally = SendTally(len(requests))
    async with open_senders(load, senders) as opened, background(show_tally(stage, tally, display)):
        evidence = await send_watched(opened, load, start=start_soon(), stop=stop, tally=tally)
    for record in evidence.records:
        if record.outcome is SendOutcome.COMPLETED and not record.output_tokens:
            record.output_tokens = len(target.tokens.encode_all([record.text])[0])
    # At an infinite rate there are no send times to keep.
    lag_bound = config.max_send_lag_s if math.isfinite(config.request_rate) else math.inf
    return BenchResult(
        model=target.server.model,
        records=evidence.records,
        invalid_reasons=invalid_reasons(evidence, max_send_lag_s=lag_bound),
        senders=senders,
        interrupted=evidence.interrupted,
        notices=target.notices,
    )


def _load(config: BenchConfig, target: Target, requests: Sequence[BenchRequest]) -> LoadPlan:
    # As in vLLM, random prompts always generate their full output length.
    to_the_end = config.ignore_eos or config.dataset_name == "random"
    extra = {**config.sampling, **config.extra_body}
    return LoadPlan(
        server=target.server,
        requests=requests,
        timeout_s=config.request_timeout_s,
        dialect=BenchDialect(config.path, config.chat, to_the_end, extra, config.keep_text),
        limit=config.max_concurrency,
        retry=RetryPolicy() if config.on_429 == "retry" else None,
        api_key=config.api_key,
        headers=config.headers,
        keep_connections=True,
    )
