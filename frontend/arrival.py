"""What came with a generation request beside its body: when, whose, and the objectives that its headers ask for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from frontend.api.fields import CLASS_NAME
from frontend.errors import InvalidRequest
from frontend.keys import Caller
from telemetry.tracing import OFF, Span

__all__ = ["Arrival"]

_NUMBER: Final = re.compile(r"\d{1,20}(\.\d{1,20})?")  # what float() takes besides is no way to write milliseconds
_LEAST_MS: Final = 0.001
_LARGEST_MS: Final = 24 * 3600 * 1000.0


@dataclass(frozen=True)
class Arrival:
    """`at_s` is of the monotonic clock; objectives of 0 are those that the cluster's record gives the request."""

    at_s: float
    caller: Caller
    ttft_objective_s: float = 0.0
    tpot_objective_s: float = 0.0
    slo_class: str = ""
    wants_timing: bool = False  # where its time went is told with its answer
    span: Span = OFF

    @classmethod
    def of(cls, headers: Mapping[str, str], *, at_s: float, caller: Caller, span: Span = OFF) -> "Arrival":
        """Reads x-slo-ttft-ms, x-slo-tpot-ms, x-slo-class and x-moonpool-timing. Raises InvalidRequest."""
        ttft_s, tpot_s = (_milliseconds(headers, name) for name in ("x-slo-ttft-ms", "x-slo-tpot-ms"))
        return cls(at_s, caller, ttft_s, tpot_s, _class_name(headers), _wants_timing(headers), span)

    def class_beside(self, in_body: str | None) -> str:
        """The class that the request asks for, in its header or its body. Raises InvalidRequest if they differ."""
        if in_body is None or not self.slo_class or in_body == self.slo_class:
            return in_body or self.slo_class
        raise InvalidRequest(
            f"slo_class is {in_body!r} and the header x-slo-class {self.slo_class!r}: give one, or the same twice",
            param="slo_class",
        )


def _milliseconds(headers: Mapping[str, str], name: str) -> float:
    """In seconds; 0 where the header is not there."""
    text = headers.get(name)
    if text is None:
        return 0.0
    value = float(text) if _NUMBER.fullmatch(text.strip()) else 0.0
    if not _LEAST_MS <= value <= _LARGEST_MS:
        raise InvalidRequest(
            f"{name} is {text[:40]!r}: expected milliseconds, from {_LEAST_MS:g} to {_LARGEST_MS:.0f} (a day)",
            param=name,
        )
    return value / 1000


def _class_name(headers: Mapping[str, str]) -> str:
    text = headers.get("x-slo-class", "")
    if text and not re.fullmatch(CLASS_NAME, text):
        raise InvalidRequest(
            f"x-slo-class is {text[:80]!r}: expected a name of letters, digits, _ . and -, at most 64 of them",
            param="x-slo-class",
        )
    return text


def _wants_timing(headers: Mapping[str, str]) -> bool:
    text = headers.get("x-moonpool-timing", "0")
    if text not in ("0", "1"):
        raise InvalidRequest(f"x-moonpool-timing is {text[:40]!r}: expected 1 or 0", param="x-moonpool-timing")
    return text == "1"
