"""Plan of a replay: requests (prompts, lengths, seeds, arrival times) from trace rows. Pure and deterministic."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from loadtest.errors import PromptPlanError
from loadtest.tokens import TextBook, TokenIds
from traces import Trace, TraceRow


@dataclass(frozen=True)
class PlanSettings:
    """Settings of the plan. A `sampled_fraction` of the requests is sampled at `temperature`; the others are greedy."""

    tokens_per_block: int
    max_model_len: int
    bos: tuple[int, ...]
    seed: int = 0
    sampled_fraction: float = 0.5
    temperature: float = 0.8


@dataclass(frozen=True, eq=False)
class PlannedRequest:
    """Request ready to be sent.

    `arrival_s`: seconds of trace time after the first request. `prompt`: int32 token ids, including BOS. `block_ids`:
    the trace's ids of the prompt's full blocks, each `tokens_per_block` tokens. `overlong`: the prompt was truncated.
    `session`: name of its conversation in the trace; "" if it names none.
    """

    index: int
    arrival_s: float
    prompt: TokenIds
    block_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    overlong: bool
    session: str = ""


def plan_requests(trace: Trace, book: TextBook, settings: PlanSettings) -> list[PlannedRequest]:
    """Return one request per row, in order of arrival. Raises PromptPlanError if the settings leave no room."""
    tokens_per_block = settings.tokens_per_block
    least = 2 + len(settings.bos)
    if tokens_per_block < least:
        raise PromptPlanError(f"--tokens-per-block {tokens_per_block} is too small; expected at least {least}")
    if settings.max_model_len < 2 * tokens_per_block:
        raise PromptPlanError(
            f"a context of {settings.max_model_len} tokens has no room for prompts in blocks of {tokens_per_block}"
        )
    book.prepare(block_id for row in trace for block_id in row.hash_ids)
    first_ms = trace.rows[0].timestamp_ms if trace.rows else 0
    return [_plan(row, trace.block_tokens, first_ms, book, settings) for row in trace]


def scaled_prompt_tokens(input_length: int, trace_block: int, tokens_per_block: int) -> int:
    """Return the scaled prompt length.

    Full blocks stay full and a partial block stays partial (1 to tokens_per_block - 1 tokens), so that the prompt has
    as many full blocks as its row.
    """
    full, tail = divmod(input_length, trace_block)
    scaled_tail = round(tail * tokens_per_block / trace_block)
    return full * tokens_per_block + (min(max(scaled_tail, 1), tokens_per_block - 1) if tail else 0)


def scaled_output_tokens(output_length: int, trace_block: int, tokens_per_block: int) -> int:
    """Return the output length, scaled like the prompt, at least 1 token."""
    return max(1, round(output_length * tokens_per_block / trace_block))


def prompt_tokens(row: TraceRow, num_tokens: int, book: TextBook, settings: PlanSettings) -> TokenIds:
    """Return the first `num_tokens` tokens of the row's text, int32.

    BOS replaces the end of the first block, so that later blocks keep their alignment.
    """
    num_blocks = -(-num_tokens // settings.tokens_per_block)
    text = [book.block(block_id) for block_id in row.hash_ids[:num_blocks]]
    if settings.bos:
        bos = np.array(settings.bos, np.int32)
        text[0] = np.concatenate([bos, text[0][: settings.tokens_per_block - len(bos)]])
    ids = np.concatenate(text)[:num_tokens]
    ids.flags.writeable = False
    return ids


def _plan(row: TraceRow, trace_block: int, first_ms: int, book: TextBook, settings: PlanSettings) -> PlannedRequest:
    tokens_per_block = settings.tokens_per_block
    wanted_prompt = max(scaled_prompt_tokens(row.input_length, trace_block, tokens_per_block), len(settings.bos) + 1)
    wanted_output = scaled_output_tokens(row.output_length, trace_block, tokens_per_block)
    max_tokens = min(wanted_output, settings.max_model_len // 2)
    num_tokens = min(wanted_prompt, settings.max_model_len - max_tokens)
    draw = hashlib.blake2b(f"{settings.seed}:request:{row.index}".encode(), digest_size=16).digest()
    sampled = int.from_bytes(draw[8:], "little") / 2**64 < settings.sampled_fraction
    return PlannedRequest(
        index=row.index,
        arrival_s=(row.timestamp_ms - first_ms) / 1000,
        prompt=prompt_tokens(row, num_tokens, book, settings),
        block_ids=row.hash_ids[: num_tokens // tokens_per_block],
        max_tokens=max_tokens,
        temperature=settings.temperature if sampled else 0.0,
        # 31 bits, which every OpenAI-compatible server accepts.
        seed=int.from_bytes(draw[:8], "little") >> 33,
        overlong=wanted_prompt + wanted_output > settings.max_model_len,
        session=row.session,
    )
