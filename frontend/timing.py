"""Where the time to a request's first token went, and that of the hand-off after it. Pure.

Each part is a duration on the clock of the one process that spent it; what none can see by itself, the ways between
them, is what is left of the whole, which the front door measures: so the parts sum to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from moonpool_proto.v1 import worker_pb2

__all__ = ["Handoff", "Ttft"]

_UNIT: Final = "_s"


class _Parts:
    """A whole, in seconds, and fields that sum to it."""

    def parts(self) -> Mapping[str, float]:
        """The parts by name, without their unit, in order of time."""
        return {each.name.removesuffix(_UNIT): getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    @property
    def whole_s(self) -> float:
        """All parts together."""
        return sum(self.parts().values())


@dataclass(frozen=True)
class Ttft(_Parts):
    """From a request's arrival at the front door to its first token there."""

    tokenize_s: float  # receiving, checking and tokenising it
    sibling_s: float  # a prompt's further answers: until its first one had a token
    schedule_s: float  # asking for a place, for every attempt until then
    lost_s: float  # attempts that came to nothing, from their placement to the next one's
    queue_s: float  # the rest is of the attempt that gave the token. On the prefill node, until the prompt's first step
    load_s: float  # reused KV
    prefill_s: float  # that step to the token
    delivery_s: float  # what is left: to the worker and back, and between the front door's own threads

    @classmethod
    def of(
        cls,
        whole_s: float,
        timing: worker_pb2.Timing,
        *,
        tokenize_s: float,
        sibling_s: float,
        schedule_s: float,
        lost_s: float,
    ) -> "Ttft":
        """`timing` came with the token."""
        before_s = tokenize_s + sibling_s + schedule_s + lost_s
        left_s = whole_s - before_s - timing.queue_s - timing.load_s - timing.prefill_s
        return cls(
            tokenize_s,
            sibling_s,
            schedule_s,
            lost_s,
            timing.queue_s,
            timing.load_s,
            timing.prefill_s,
            left_s,
        )


@dataclass(frozen=True)
class Handoff(_Parts):
    """From the prefill node's token to the decode node's first one, as both come to the front door."""

    tail_s: float  # until the last KV was pushed
    join_s: float  # until the first step on the decode node: its verification, its place in the batch
    step_s: float  # that step
    delivery_s: (
        float  # what is left: the Commit's way, and what this token took to the front door more than the first one
    )

    @classmethod
    def of(cls, gap_s: float, timing: worker_pb2.HandoffTiming) -> "Handoff":
        """`timing` came with the second token."""
        left_s = gap_s - timing.tail_s - timing.join_s - timing.step_s
        return cls(timing.tail_s, timing.join_s, timing.step_s, left_s)
