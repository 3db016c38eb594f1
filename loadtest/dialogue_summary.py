"""From turns to the figures of dialogues.json. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from loadtest.dialogue_config import DialogueConfig
from loadtest.dialogue_record import TurnRecord, share_cached, share_of_history
from loadtest.record import Outcome
from loadtest.summary import percentiles, reasons
from loadtest.verify import Verification

_LAST_LINE = (
    "dialogues",
    "turns",
    "completed",
    "rejected",
    "failed",
    "unfinished",
    "share_cached",
    "share_of_history",
    "ttft_s",
    "wrong_tokens",
    "interrupted",
)


def summarise_dialogues(
    config: DialogueConfig, turns: Sequence[TurnRecord], *, verification: Verification | None
) -> dict[str, Any]:
    """The figures. The first turns are left out of the shares: they have no history."""
    completed = [t for t in turns if t.completed]
    ended = Counter(t.request.outcome for t in turns)
    return {
        "dialogues": len({t.dialogue for t in turns}),
        "planned_turns": config.num_dialogues * config.turns,
        "turns": len(turns),
        **{outcome.value: ended[outcome] for outcome in Outcome},
        "prompt_tokens": sum(t.request.prompt_tokens for t in completed),
        "cached_tokens": sum(t.request.cached_tokens for t in completed),
        "output_tokens": sum(t.request.output_tokens for t in completed),
        "share_cached": share_cached(turns),
        "share_of_history": share_of_history(turns),
        "ttft_s": percentiles(t.request.ttft_s for t in completed),
        "first_ttft_s": percentiles(t.request.ttft_s for t in completed if not t.turn),
        "later_ttft_s": percentiles(t.request.ttft_s for t in completed if t.turn),
        "tbt_s": percentiles(interval for t in completed for interval in t.request.intervals_s),
        "cut_dialogues": len({t.dialogue for t in completed if t.dropped_messages}),
        "by_turn": by_turn(turns),
        "verified_turns": verification.verified_requests if verification else 0,
        "wrong_tokens": verification.wrong_tokens if verification else None,
        "verification": verification.as_json() if verification else None,
        "reasons": reasons([t.request for t in turns]),
    }


def by_turn(turns: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """A row per turn over all dialogues that got there: means of tokens, shares, and TTFT's percentiles."""
    rows = []
    ordered = sorted((t for t in turns if t.completed), key=lambda t: t.turn)
    for turn, group in groupby(ordered, key=lambda t: t.turn):
        same = list(group)
        rows.append(
            {
                "turn": turn + 1,
                "dialogues": len(same),
                "prompt_tokens": _mean([t.request.prompt_tokens for t in same]),
                "cached_tokens": _mean([t.request.cached_tokens for t in same]),
                "output_tokens": _mean([t.request.output_tokens for t in same]),
                "share_cached": share_cached(same),
                "share_of_history": share_of_history(same),
                "ttft_s": percentiles(t.request.ttft_s for t in same),
            }
        )
    return rows


def last_line(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What a script wants to know, as the last line of output."""
    return {name: figures[name] for name in _LAST_LINE}


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 2)
