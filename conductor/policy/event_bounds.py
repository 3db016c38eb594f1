"""Bounds of the numbers in events: a value out of bounds is replaced by the nearest one within.

The policy relies on these ranges, except for measurements, which `reports.learn` rejects and counts. The bounds keep
every sum and product of the policy, in tokens, bytes and nanoseconds, far within 64 bits.
"""

from dataclasses import replace
from math import isfinite
from typing import Any, Final, TypeVar

from conductor.policy.events import (
    NO_QUEUE_KEY,
    CopyFinished,
    Event,
    Held,
    NodeJoined,
    NodeReported,
    NodeView,
    QueueKey,
    RequestArrived,
    RequestCompleted,
)

__all__ = ["MOST_NS", "MOST_S", "MOST_TOKENS", "clamp_event", "to_ns"]

MOST_TOKENS: Final = 1 << 31
MOST_S: Final = 1e6  # of any prediction: eleven days
MOST_NS: Final = 10**15
_MOST_BYTES: Final = 1 << 50
_MOST_PRIORITY: Final = 1 << 31
_MOST_VIRTUAL_NS: Final = 1 << 60
_OUTCOMES: Final = frozenset({"finished", "failed", "cancelled", "retry", "rejected"})
T = TypeVar("T", int, float)
D = TypeVar("D", RequestArrived, RequestCompleted, CopyFinished, Held, NodeView)


def clamp_event(event: Event) -> Event:
    """Return the event itself if all its numbers are within bounds, otherwise a copy with bounded numbers."""
    match event:
        case RequestArrived():
            return _arrival(event)
        case NodeReported():
            return _report(event)
        case RequestCompleted():
            return _completion(event)
        case CopyFinished():
            return _within(event, {"nbytes": _MOST_BYTES}, ("seconds",))
        case NodeJoined(node):
            names = (
                "capacity_tokens",
                "max_model_len",
                "max_batch",
                "kv_bytes_per_token",
                "block_tokens",
                "chunk_tokens",
            )
            view = _within(node, dict.fromkeys(names, MOST_TOKENS), ())
            view = view if view.block_tokens else replace(view, block_tokens=1)
            return event if view is node else NodeJoined(view)
    return event


def to_ns(seconds: float) -> int:
    """Convert predicted seconds to nanoseconds, bounded so that thousands of them can be added in 64 bits."""
    if -MOST_S < seconds < MOST_S:
        return round(seconds * 1e9)
    return round(max(-MOST_S, min(seconds, MOST_S)) * 1e9)


def _arrival(event: RequestArrived) -> RequestArrived:
    if (
        0 < event.prompt_tokens <= MOST_TOKENS
        and 0 <= event.max_new_tokens <= MOST_TOKENS
        and 0 <= event.generated < event.prompt_tokens
        and -_MOST_PRIORITY <= event.priority <= _MOST_PRIORITY
        and 0 <= event.ttft_objective_s < MOST_S
        and 0 <= event.tbt_objective_s < MOST_S
        and 0 <= event.waited_s < MOST_S
    ):
        return event
    prompt_tokens = min(max(1, event.prompt_tokens), MOST_TOKENS)
    return replace(
        _within(event, {"max_new_tokens": MOST_TOKENS}, ("ttft_objective_s", "tbt_objective_s", "waited_s")),
        prompt_tokens=prompt_tokens,
        generated=min(max(0, event.generated), prompt_tokens - 1),
        priority=min(max(-_MOST_PRIORITY, event.priority), _MOST_PRIORITY),
    )


def _completion(event: RequestCompleted) -> RequestCompleted:
    if (
        0 <= event.generated <= MOST_TOKENS
        and 0 <= event.cached_tokens <= MOST_TOKENS
        and 0 <= event.ttft_s < MOST_S
        and 0 <= event.mean_tbt_s < MOST_S
        and 0 <= event.slow_tbt_s < MOST_S
        and event.outcome in _OUTCOMES
    ):
        return event
    counts = {"generated": MOST_TOKENS, "cached_tokens": MOST_TOKENS}
    event = _within(event, counts, ("ttft_s", "mean_tbt_s", "slow_tbt_s"))
    return event if event.outcome in _OUTCOMES else replace(event, outcome="failed")


def _report(event: NodeReported) -> NodeReported:
    held = tuple([_held(one) for one in event.held])
    return event if held == event.held else replace(event, held=held)


def _held(held: Held) -> Held:
    names = ("committed_tokens", "remaining_prefill_tokens", "prompt_tokens", "max_new_tokens")
    held = _within(held, dict.fromkeys(names, MOST_TOKENS), ())
    turn = _turn(held.turn)
    return held if turn is held.turn else replace(held, turn=turn)


def _turn(turn: QueueKey) -> QueueKey:
    if turn is NO_QUEUE_KEY:
        return turn
    found = QueueKey(
        _between(turn.level, _MOST_PRIORITY),
        turn.account,
        _between(turn.start_ns, _MOST_VIRTUAL_NS),
        _between(turn.priority, _MOST_PRIORITY),
        *(_between(seconds, MOST_S) if isfinite(seconds) else 0.0 for seconds in _turn_times(turn)),
    )
    return turn if found == turn else found


def _turn_times(turn: QueueKey) -> tuple[float, float, float]:
    return turn.waited_s, turn.due_in_s, turn.ages_in_s


def _between(value: T, most: T) -> T:
    return min(max(-most, value), most)


def _is_time(seconds: float) -> bool:
    return 0 <= seconds < MOST_S


def _within(value: D, counts: dict[str, int], times: tuple[str, ...]) -> D:
    """Bound counts to 0..bound and times to 0..MOST_S; NaN and negative times become 0."""
    changed: dict[str, Any] = {
        name: min(max(0, getattr(value, name)), most)
        for name, most in counts.items()
        if not 0 <= getattr(value, name) <= most
    }
    for name in times:
        seconds = getattr(value, name)
        if not _is_time(seconds):
            changed[name] = MOST_S if isfinite(seconds) and seconds > 0 else 0.0
    return replace(value, **changed) if changed else value
