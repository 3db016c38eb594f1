"""Output of one choice: token ids in; text, log-probabilities and finish reason out. Pure.

Stop strings are matched over the whole text, independent of its division into pieces. The match that ends first wins;
among matches that end together, the longest. Text that may still become a stop string is held back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from frontend.errors import GenerationFailed
from frontend.request import GenerationRequest
from frontend.tokenizer import Detokenizer
from jit.fast_dataclass import fast_dataclass
from moonpool_proto.v1 import worker_pb2

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Token that could occur at a position. `rank` 1 is the likeliest."""

    token_id: int
    data: bytes  # may be part of a character
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Token at a position, with its own log-probability and the likeliest candidates there.

    `own` is None for the first token of a prompt.
    """

    token_id: int
    data: bytes
    text_offset: int  # number of characters of the shown text before the token
    own: Candidate | None
    top: tuple[Candidate, ...]  # likeliest first


def score_token(token: worker_pb2.Token, num_top: int, token_bytes: TokenBytes, text_offset: int) -> ScoredToken:
    """Return a generated token with its log-probabilities. Raises GenerationFailed if the worker sent none."""
    reported = token.logprobs
    if not token.HasField("logprobs") or len(reported.top_ids) != len(reported.top_logprobs):
        raise GenerationFailed(f"token {token.index} came without its log-probabilities", code="no_logprobs")
    top = _candidates(reported.top_ids[:num_top], reported.top_logprobs[:num_top], token_bytes)
    data = token_bytes(token.token_id)
    return ScoredToken(
        token.token_id, data, text_offset, Candidate(token.token_id, data, reported.logprob, reported.rank), top
    )


@dataclass(frozen=True)
class PromptTokenScores:
    """Log-probabilities of a prompt's tokens; `text_offsets` has one entry per token.

    Raises GenerationFailed if the sizes of the worker's arrays do not match the prompt.
    """

    prompt_ids: NDArray[np.int32]
    reported: worker_pb2.PromptLogProbs
    num_top: int
    token_bytes: TokenBytes
    text_offsets: Sequence[int]

    def __post_init__(self) -> None:
        reported, num = self.reported, len(self.prompt_ids) - 1
        arrays = (
            (reported.logprobs, 1),
            (reported.ranks, 1),
            (reported.top_ids, reported.num_top),
            (reported.top_logprobs, reported.num_top),
        )
        if any(len(raw) != 4 * num * width for raw, width in arrays):
            raise GenerationFailed(
                "the worker's log-probabilities do not match the prompt's length", code="no_logprobs"
            )

    def tokens(self) -> list[ScoredToken]:
        """Decode the arrays into one ScoredToken per token.

        Slow for a long prompt: do not call it on the event loop.
        """
        reported, token_bytes = self.reported, self.token_bytes
        first, *rest = self.prompt_ids.tolist()
        shape = len(rest), reported.num_top
        rows = zip(
            rest,
            self.text_offsets[1:],
            np.frombuffer(reported.logprobs, "<f4").tolist(),
            np.frombuffer(reported.ranks, "<u4").tolist(),
            np.frombuffer(reported.top_ids, "<i4").reshape(shape)[:, : self.num_top].tolist(),
            np.frombuffer(reported.top_logprobs, "<f4").reshape(shape)[:, : self.num_top].tolist(),
            strict=True,
        )
        found = [ScoredToken(first, token_bytes(first), self.text_offsets[0], None, ())]
        for token_id, offset, logprob, rank, top_ids, top_logprobs in rows:
            own = Candidate(token_id, token_bytes(token_id), logprob, rank)
            found.append(ScoredToken(token_id, own.data, offset, own, _candidates(top_ids, top_logprobs, token_bytes)))
        return found


def _candidates(ids: Sequence[int], logprobs: Sequence[float], token_bytes: TokenBytes) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(token_id, token_bytes(token_id), logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1)
    )


class StopStrings:
    """Incremental search for several stop strings (Knuth-Morris-Pratt, one state each); linear in the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (text that can be sent, the stop string found or None). Do not feed text after a match."""
        if not self._patterns:
            return text, None
        window = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            matched = [pattern for pattern in self._patterns if pattern.advance(char)]
            if matched:
                stop = max(matched, key=lambda pattern: len(pattern.text)).text
                self._held = ""
                return window[: position - len(stop)], stop
        keep = len(window) - max(pattern.matched for pattern in self._patterns)
        self._held = window[keep:]
        return window[:keep], None

    def flush(self) -> str:
        """Return the text that was held back; call it once, when the text ends without a match."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Automaton of one pattern: its first `matched` characters are a suffix of the text so far."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallback[length - 1]
            length += text[index] == text[length]
            self._fallback[index] = length

    def advance(self, char: str) -> bool:
        """Take the next character; return True if the pattern ends with it."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Echo:
    """The prompt as shown before the answer."""

    text: str
    scores: PromptTokenScores | None  # None unless log-probabilities were requested


@fast_dataclass  # one is created per token
@dataclass(frozen=True, slots=True)
class OutputChunk:
    """New tokens, the text they complete and, in the last chunk, the finish reason.

    With a parser of reasoning, `text` is the content only.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the client's stop string or stop token; None for the model's end token
    scores: tuple[ScoredToken, ...] = ()
    echo: Echo | None = None  # only in a choice's first chunk
    reasoning: str = ""
    num_reasoning_tokens: int = 0

    @classmethod
    def joined(cls, steps: Sequence["OutputChunk"]) -> "OutputChunk":
        """Join successive chunks, at least one, into one."""
        if len(steps) == 1:
            return steps[0]
        return cls(
            tuple(chain.from_iterable(step.token_ids for step in steps)),
            "".join(step.text for step in steps),
            steps[-1].finish_reason,
            steps[-1].stop_reason,
            tuple(chain.from_iterable(step.scores for step in steps)),
            steps[0].echo,
            "".join(step.reasoning for step in steps),
            sum(step.num_reasoning_tokens for step in steps),
        )


class Output:
    """Detokeniser, stop string search and reasoning parser of one choice.

    Do not feed tokens after a chunk with a finish reason.
    """

    def __init__(self, request: GenerationRequest, detokenizer: Detokenizer, token_bytes: TokenBytes) -> None:
        """`token_bytes` returns a token's bytes, also for tokens whose text is not shown."""
        sampling = request.sampling
        self._request = request
        self._detokenizer = detokenizer
        self._token_bytes = token_bytes
        self._stops = StopStrings(sampling.stop)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._reasoning = request.text.reasoning.parser() if request.text.reasoning is not None else None
        self._prompt: tuple[list[str], list[int]] | None = None  # (shown text of each token, offset of each)
        self._num_tokens = 0
        self._num_chars = 0  # length of the text so far, including held-back text and the prompt if it is shown

    def read_prompt(self) -> None:
        """Detokenise a prompt that is shown. Call it before the first token is fed; for a long prompt, in a thread."""
        if self._prompt is None and self._request.shows_prompt:
            options, prompt_ids = self._request.text, self._request.prompt_ids.tolist()
            pieces = [self._detokenizer.feed(token_id) if options.echo else "" for token_id in prompt_ids]
            starts = _starts(pieces)
            if options.echo and options.hides_answer:
                pieces.append(self._detokenizer.flush())
            self._prompt = pieces, starts

    def feed(
        self,
        token: worker_pb2.Token,
        finish: FinishReason | None,
        prompt_logprobs: worker_pb2.PromptLogProbs | None = None,
    ) -> OutputChunk:
        """Take one token and return its chunk.

        With finish "stop" the token is a stop token: it counts, but its text is shown only if `include_stop` is set.
        `prompt_logprobs` is read with the first token only. Raises GenerationFailed if requested log-probabilities are
        missing.
        """
        echo = self._echo(prompt_logprobs) if self._num_tokens == 0 else None
        self._num_tokens += 1
        if self._request.text.hides_answer:
            return OutputChunk((), "", "length", echo=echo)
        num_top, offset = self._request.sampling.logprobs, self._num_chars
        scores = () if num_top is None else (score_token(token, num_top, self._token_bytes, offset),)
        text, stop = self._text(token, finish)
        stop_reason: int | str | None = stop
        if stop is not None:
            finish = "stop"
        elif finish == "stop" and token.token_id in self._stop_token_ids:
            stop_reason = token.token_id
        if self._reasoning is None:
            return OutputChunk((token.token_id,), text, finish, stop_reason, scores, echo)
        was_reasoning = self._reasoning.in_reasoning
        parsed = self._reasoning.feed(text, is_last=finish is not None)
        num_reasoning = int(was_reasoning or self._reasoning.in_reasoning)
        return OutputChunk(
            (token.token_id,), parsed.content, finish, stop_reason, scores, echo, parsed.reasoning, num_reasoning
        )

    def _text(self, token: worker_pb2.Token, finish: FinishReason | None) -> tuple[str, str | None]:
        """Return (text that can be sent, the stop string found or None)."""
        options, sampling = self._request.text, self._request.sampling
        is_stop_token = finish == "stop" and token.finish != worker_pb2.FINISH_COMPLETE
        text = self._detokenizer.feed(token.token_id) if options.include_stop or not is_stop_token else ""
        if finish is not None:
            text += self._detokenizer.flush()
        self._num_chars += len(text)
        if self._num_tokens <= sampling.min_tokens:
            return text, None
        text, stop = self._stops.feed(text)
        if stop is not None:
            return (text + stop if options.include_stop else text), stop
        return (text if finish is None else text + self._stops.flush()), None

    def _echo(self, prompt_logprobs: worker_pb2.PromptLogProbs | None) -> Echo | None:
        """Return the prompt if it is shown. A character that is incomplete at its end is completed by the answer."""
        self.read_prompt()
        if self._prompt is None:
            return None
        request, num_top = self._request, self._request.sampling.prompt_logprobs
        (pieces, offsets), self._prompt = self._prompt, None
        text = "".join(pieces)
        self._num_chars += len(text)
        if num_top is None:
            return Echo(text, None)
        reported = prompt_logprobs or worker_pb2.PromptLogProbs()
        return Echo(text, PromptTokenScores(request.prompt_ids, reported, num_top, self._token_bytes, offsets))


def _starts(pieces: Sequence[str]) -> list[int]:
    """Return the offset of each piece."""
    starts, length = [], 0
    for piece in pieces:
        starts.append(length)
        length += len(piece)
    return starts
