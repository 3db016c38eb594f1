"""Turns on the wire, where times are relative to when they are told: clocks of two hosts have nothing in common."""

from __future__ import annotations

from math import isfinite

from moonpool_proto.v1 import conductor_pb2
from worker.policy.turns import Turn

__all__ = ["turn_from_proto", "turn_to_proto"]


def turn_from_proto(message: conductor_pb2.Turn, now_s: float) -> Turn:
    """As told at `now_s`. A message that nobody filled in is the turn of one that has just come.

    What is no time counts as none: among others' times it could not be put in order.
    """
    waited_s, due_in_s, ages_in_s = (
        told if isfinite(told) else 0.0 for told in (message.waited_s, message.due_in_s, message.ages_in_s)
    )
    return Turn(
        arrived_s=now_s - waited_s,
        due_s=now_s + due_in_s,
        ages_s=now_s + ages_in_s,
        level=message.level,
        account=message.account,
        start_ns=message.start_ns,
        priority=message.priority,
    )


def turn_to_proto(turn: Turn, now_s: float) -> conductor_pb2.Turn:
    """To be told at `now_s`."""
    return conductor_pb2.Turn(
        level=turn.level,
        account=turn.account,
        start_ns=turn.start_ns,
        priority=turn.priority,
        waited_s=now_s - turn.arrived_s,
        due_in_s=turn.due_s - now_s,
        ages_in_s=turn.ages_s - now_s,
    )
