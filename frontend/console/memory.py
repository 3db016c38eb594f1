"""The front door's own part of a request's path: the last answers that it gave, with where their time went."""

import time
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Final

from frontend.request import Facts, GenerationRequest

__all__ = ["RequestMemory", "told"]

_MOST: Final = 1024


class RequestMemory:
    """The last answers by id: how each went, never what it said."""

    def __init__(self, clock: Callable[[], float] = time.time, most: int = _MOST) -> None:
        """`clock` tells seconds since 1970."""
        self._clock = clock
        self._most = most
        self._ended: dict[str, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def ended(self, request: GenerationRequest, facts: Facts, outcome: str) -> None:
        """An answer is over."""
        self._ended.pop(request.request_id, None)
        self._ended[request.request_id] = told(request, facts, outcome, self._clock())
        if len(self._ended) > self._most:
            del self._ended[next(iter(self._ended))]

    def find(self, request_id: str) -> Mapping[str, Any] | None:
        """What is remembered of it, as JSON."""
        return self._ended.get(request_id)


def told(request: GenerationRequest, facts: Facts, outcome: str, now_s: float) -> Mapping[str, Any]:
    """How far an answer is: plain data. Parts of TTFT and of the hand-off are in seconds; null where there is none."""
    since_s = monotonic() - request.arrival_s
    return {
        "request_id": request.request_id,
        "at_s": now_s - since_s,
        "model": request.model,
        "outcome": outcome,
        "seconds": since_s,
        "attempts": facts.attempts,
        "prompt_tokens": len(request.prompt_ids),
        "generated": len(facts.token_ids),
        "cached_tokens": facts.cached_tokens,
        "cached_from": {
            "memory": facts.cached_dram_tokens,
            "ssd": facts.cached_ssd_tokens,
            "remote": facts.cached_remote_tokens,
        },
        "prefill": facts.prefill_node,
        "decode": facts.decode_node,
        "tokenize_s": request.tokenize_s,
        "schedule_s": facts.schedule_s,
        "ttft": None if facts.ttft is None else dict(facts.ttft.parts()),
        "handoff": None if facts.handoff is None else dict(facts.handoff.parts()),
        "tbt_s": facts.mean_tbt_s or None,
    }
