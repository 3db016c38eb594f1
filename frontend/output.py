"""One choice's output: token ids in, text with finish reason out. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from frontend.detokenizer import Detokenizer
from frontend.logprobs import PromptScores, Scored, TokenBytes, scored
from frontend.request import GenerationRequest
from frontend.stops import StopStrings
from moonpool_proto.v1 import worker_pb2

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Echo:
    """The prompt as told before the answer."""

    text: str
    scores: PromptScores | None  # where log-probabilities were asked for


@dataclass(frozen=True)
class Step:
    """What the client gets at once: new tokens, the text they complete and, in the last one, why it ends."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the client's stop string or stop token; None for the model's own end
    scores: tuple[Scored, ...] = ()
    echo: Echo | None = None  # in a choice's first step

    @classmethod
    def joined(cls, steps: Sequence["Step"]) -> "Step":
        """Successive steps, one at least, as one."""
        if len(steps) == 1:
            return steps[0]
        return cls(
            tuple(chain.from_iterable(step.token_ids for step in steps)),
            "".join(step.text for step in steps),
            steps[-1].finish_reason,
            steps[-1].stop_reason,
            tuple(chain.from_iterable(step.scores for step in steps)),
            steps[0].echo,
        )


class Output:
    """Detokenises and looks for stop strings. After a Step with a finish reason nothing may be fed any more."""

    def __init__(self, request: GenerationRequest, detokenizer: Detokenizer, token_bytes: TokenBytes) -> None:
        """`token_bytes` gives a token's bytes whether or not its text is shown."""
        sampling = request.sampling
        self._request = request
        self._detokenizer = detokenizer
        self._token_bytes = token_bytes
        self._stops = StopStrings(sampling.stop)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._prompt: tuple[list[str], list[int]] | None = None  # (text of each token as told, where it begins)
        self._num_tokens = 0
        self._num_chars = 0  # of the text so far, with what is held back and with the prompt where that is shown

    def read_prompt(self) -> None:
        """Make the text of a prompt that is told, before the first token is fed: for a long one in a thread."""
        if self._prompt is None and self._request.tells_prompt:
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
    ) -> Step:
        """Take one token. With finish "stop" it is a stop token: it counts, its text is not shown unless asked for.

        `prompt_logprobs` is looked at with the first token only. Raises GenerationFailed when log-probabilities that
        were asked for are missing.
        """
        echo = self._echo(prompt_logprobs) if self._num_tokens == 0 else None
        self._num_tokens += 1
        if self._request.text.hides_answer:
            return Step((), "", "length", echo=echo)
        num_top, offset = self._request.sampling.logprobs, self._num_chars
        scores = () if num_top is None else (scored(token, num_top, self._token_bytes, offset),)
        text, stop = self._text(token, finish)
        if stop is not None:
            return Step((token.token_id,), text, "stop", stop, scores, echo)
        is_own_stop = finish == "stop" and token.token_id in self._stop_token_ids
        return Step((token.token_id,), text, finish, token.token_id if is_own_stop else None, scores, echo)

    def _text(self, token: worker_pb2.Token, finish: FinishReason | None) -> tuple[str, str | None]:
        """(text that can go out, the stop string found or None)"""
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
        """The prompt, if it is to be told; what it ends with of a character is completed by the answer."""
        self.read_prompt()
        if self._prompt is None:
            return None
        request, num_top = self._request, self._request.sampling.prompt_logprobs
        (pieces, offsets), self._prompt = self._prompt, None
        text = "".join(pieces)
        self._num_chars += len(text)
        if num_top is None:
            return Echo(text, None)
        told = prompt_logprobs or worker_pb2.PromptLogProbs()
        return Echo(text, PromptScores(request.prompt_ids, told, num_top, self._token_bytes, offsets))


def _starts(pieces: Sequence[str]) -> list[int]:
    """Where each piece begins."""
    starts, length = [], 0
    for piece in pieces:
        starts.append(length)
        length += len(piece)
    return starts
