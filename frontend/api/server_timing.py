"""Where a request's time went, as told to those who ask: a response header, and a part of `moonpool` in the answer."""

from collections.abc import Sequence
from typing import Any, Final

from frontend.driver import Generation
from frontend.request import Facts
from frontend.timing import Handoff, Ttft

__all__ = ["server_timing", "timing_of"]

_DIGITS: Final = 9  # of a second: the parts still sum to the whole


def server_timing(generations: Sequence[Generation]) -> dict[str, str]:
    """The header Server-Timing (W3C), in milliseconds: of the first answer, as far as is known when headers go out."""
    facts = generations[0].facts
    told = _metrics("", "ttft", facts.ttft) + _metrics("handoff-", "handoff", facts.handoff)
    return {"server-timing": ", ".join(told)} if told else {}


def timing_of(facts: Facts) -> dict[str, Any]:
    """In seconds; None where the request had no hand-off."""
    return {"ttft": _told(facts.ttft), "handoff": _told(facts.handoff)}


def _told(parts: Ttft | Handoff | None) -> dict[str, float] | None:
    if parts is None:
        return None
    told = {f"{name}_s": round(seconds, _DIGITS) for name, seconds in parts.parts().items()}
    return {**told, "whole_s": round(parts.whole_s, _DIGITS)}


def _metrics(prefix: str, whole: str, parts: Ttft | Handoff | None) -> list[str]:
    if parts is None:
        return []
    told = {**{prefix + name: seconds for name, seconds in parts.parts().items()}, whole: parts.whole_s}
    return [f"{name};dur={1000 * seconds:.3f}" for name, seconds in told.items()]
