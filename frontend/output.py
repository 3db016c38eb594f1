"""One choice's output: token ids in, text with finish reason out. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from frontend.detokenizer import Detokenizer
from frontend.stops import StopStrings

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Step:
    """What the client gets at once: new tokens, the text they complete and, in the last one, why it ends."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the client's stop string or stop token; None for the model's own end

    def __add__(self, later: "Step") -> "Step":
        return Step(self.token_ids + later.token_ids, self.text + later.text, later.finish_reason, later.stop_reason)


class Output:
    """Detokenises and looks for stop strings. After a Step with a finish reason nothing may be fed any more."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop)
        self._stop_token_ids = frozenset(stop_token_ids)

    def feed(self, token_id: int, finish: FinishReason | None) -> Step:
        """Take one token. With finish "stop" the token is a stop token: it counts, its text is not shown."""
        text = "" if finish == "stop" else self._detokenizer.feed(token_id)
        if finish is not None:
            text += self._detokenizer.flush()
        out, matched = self._stops.feed(text)
        if matched is not None:
            return Step((token_id,), out, "stop", matched)
        if finish is None:
            return Step((token_id,), out)
        stop_reason = token_id if finish == "stop" and token_id in self._stop_token_ids else None
        return Step((token_id,), out + self._stops.flush(), finish, stop_reason)
