"""Tokens with their log-probabilities, as told to clients: ids, bytes, places in the text. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from frontend.errors import GenerationFailed
from moonpool_proto.v1 import worker_pb2

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True)
class Candidate:
    """A token that could stand in a place. `rank` 1 is the likeliest."""

    token_id: int
    data: bytes  # its text in UTF-8; may be part of a character
    logprob: float
    rank: int


@dataclass(frozen=True)
class Scored:
    """A token in its place: what it was among those that could stand there. The first of a prompt has no `own`."""

    token_id: int
    data: bytes
    text_offset: int  # characters of the shown text before it
    own: Candidate | None
    top: tuple[Candidate, ...]  # likeliest first


def scored(token: worker_pb2.Token, num_top: int, token_bytes: TokenBytes, text_offset: int) -> Scored:
    """A generated token. Raises GenerationFailed when the worker has not told what it was asked for."""
    told = token.logprobs
    if not token.HasField("logprobs") or len(told.top_ids) != len(told.top_logprobs):
        raise GenerationFailed(f"token {token.index} came without its log-probabilities", code="no_logprobs")
    top = _candidates(told.top_ids[:num_top], told.top_logprobs[:num_top], token_bytes)
    data = token_bytes(token.token_id)
    return Scored(token.token_id, data, text_offset, Candidate(token.token_id, data, told.logprob, told.rank), top)


def scored_prompt(
    prompt_ids: NDArray[np.int32],
    told: worker_pb2.PromptLogProbs | None,
    num_top: int,
    token_bytes: TokenBytes,
    text_offsets: Sequence[int],
) -> list[Scored]:
    """A prompt's tokens, one `text_offsets` each. Raises GenerationFailed when the worker's arrays do not fit them."""
    num = len(prompt_ids) - 1
    ids = prompt_ids.tolist()
    first = Scored(ids[0], token_bytes(ids[0]), text_offsets[0], None, ())
    if num == 0:
        return [first]
    told = told or worker_pb2.PromptLogProbs()
    logprobs, ranks = np.frombuffer(told.logprobs, "<f4"), np.frombuffer(told.ranks, "<u4")
    top_ids, top_logprobs = np.frombuffer(told.top_ids, "<i4"), np.frombuffer(told.top_logprobs, "<f4")
    fits = len(logprobs) == len(ranks) == num and len(top_ids) == len(top_logprobs) == num * told.num_top
    if not fits:
        raise GenerationFailed("the prompt's log-probabilities do not fit the prompt", code="no_logprobs")
    shape = num, told.num_top
    rows = zip(
        ids[1:],
        text_offsets[1:],
        logprobs.tolist(),
        ranks.tolist(),
        top_ids.reshape(shape)[:, :num_top].tolist(),
        top_logprobs.reshape(shape)[:, :num_top].tolist(),
        strict=True,
    )
    rest = [
        Scored(
            token_id,
            data := token_bytes(token_id),
            offset,
            Candidate(token_id, data, logprob, rank),
            _candidates(row_ids, row_logprobs, token_bytes),
        )
        for token_id, offset, logprob, rank, row_ids, row_logprobs in rows
    ]
    return [first, *rest]


def _candidates(ids: Sequence[int], logprobs: Sequence[float], token_bytes: TokenBytes) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(token_id, token_bytes(token_id), logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1)
    )
