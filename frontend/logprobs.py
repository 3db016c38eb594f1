"""Tokens with their log-probabilities, as told to clients: ids, bytes, places in the text. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from frontend.errors import GenerationFailed
from moonpool_proto.v1 import worker_pb2

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could stand in a place. `rank` 1 is the likeliest."""

    token_id: int
    data: bytes  # its text in UTF-8; may be part of a character
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True)
class PromptScores:
    """A prompt's tokens, one `text_offsets` each. Raises GenerationFailed when the worker's arrays do not fit them."""

    prompt_ids: NDArray[np.int32]
    told: worker_pb2.PromptLogProbs
    num_top: int
    token_bytes: TokenBytes
    text_offsets: Sequence[int]

    def __post_init__(self) -> None:
        told, num = self.told, len(self.prompt_ids) - 1
        arrays = ((told.logprobs, 1), (told.ranks, 1), (told.top_ids, told.num_top), (told.top_logprobs, told.num_top))
        if any(len(raw) != 4 * num * width for raw, width in arrays):
            raise GenerationFailed("the prompt's log-probabilities do not fit the prompt", code="no_logprobs")

    def tokens(self) -> list[Scored]:
        """One by one. For a long prompt this takes a while: not on the event loop."""
        told, token_bytes = self.told, self.token_bytes
        first, *rest = self.prompt_ids.tolist()
        shape = len(rest), told.num_top
        rows = zip(
            rest,
            self.text_offsets[1:],
            np.frombuffer(told.logprobs, "<f4").tolist(),
            np.frombuffer(told.ranks, "<u4").tolist(),
            np.frombuffer(told.top_ids, "<i4").reshape(shape)[:, : self.num_top].tolist(),
            np.frombuffer(told.top_logprobs, "<f4").reshape(shape)[:, : self.num_top].tolist(),
            strict=True,
        )
        found = [Scored(first, token_bytes(first), self.text_offsets[0], None, ())]
        for token_id, offset, logprob, rank, top_ids, top_logprobs in rows:
            own = Candidate(token_id, token_bytes(token_id), logprob, rank)
            found.append(Scored(token_id, own.data, offset, own, _candidates(top_ids, top_logprobs, token_bytes)))
        return found


def _candidates(ids: Sequence[int], logprobs: Sequence[float], token_bytes: TokenBytes) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(token_id, token_bytes(token_id), logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1)
    )
