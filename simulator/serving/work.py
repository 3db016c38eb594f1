"""One request on its way through the simulated cluster, and what became of it. Data; the nodes change it."""

from dataclasses import dataclass, field
from enum import StrEnum

from conductor.policy.decisions import Holder
from simulator.serving.clock import NS
from simulator.serving.workload import Job
from worker.policy.turns import ALWAYS_NEXT, Key, Turn

__all__ = ["End", "Work", "slowest_tenth_s"]


class End(StrEnum):
    """How a request can end: each does in exactly one way."""

    FINISHED = "finished"
    REJECTED = "rejected"  # at arrival
    WITHHELD = "withheld"  # after its prefill, which was in vain: nobody saw its first token


@dataclass(slots=True, eq=False)
class Work:
    """A request as the nodes know it. Times are virtual ns, 0 = not yet."""

    job: Job
    turn: Turn = ALWAYS_NEXT
    prefill_node: str = ""
    decode_node: str = ""
    holders: tuple[Holder, ...] = ()
    helpers: tuple[str, ...] = ()  # prefill nodes that may compute some of its chunks
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    reused_tokens: int = 0
    computed: int = 0  # prompt tokens that are there, reused ones included
    prefill_s: float = 0.0  # of compute, so far
    generated: int = 0
    committed_tokens: int = 0
    loaded: bool = False
    reserved: bool = False
    asks_again: bool = False  # its first token is withheld until the conductor was asked once more
    first_token_ns: int = 0
    sent_ns: int = 0  # when all KV will have arrived at the decode node
    last_token_ns: int = 0
    end: End | None = None
    end_ns: int = 0
    reason: str = ""  # why it was rejected
    intervals: list[tuple[int, int]] = field(default_factory=list)  # (ns between two tokens, how often in a row)

    @property
    def key(self) -> Key:
        """What it goes by in line."""
        return self.job.name, 0

    @property
    def ttft_s(self) -> float:
        return (self.first_token_ns - self.job.arrival_ns) / NS

    @property
    def mean_tbt_s(self) -> float:
        count = sum(times for _, times in self.intervals)
        return sum(ns * times for ns, times in self.intervals) / count / NS if count else 0.0

    @property
    def tbt_s(self) -> float:
        """The request's time between tokens as objectives mean it; 0 for answers of one token."""
        return slowest_tenth_s(self.intervals)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed for it and not reused."""
        return self.computed - self.reused_tokens if self.computed else 0


def slowest_tenth_s(intervals: list[tuple[int, int]]) -> float:
    """Mean of the longest tenth of (ns, times) intervals, rounded up to whole ones: TBT in Mooncake's evaluation."""
    count = sum(times for _, times in intervals)
    if not count:
        return 0.0
    wanted = left = -(-count // 10)
    total = 0
    for ns, times in sorted(intervals, reverse=True):
        taken = min(times, left)
        total, left = total + ns * taken, left - taken
        if not left:
            break
    return total / wanted / NS
