"""Messages between vLLM's scheduler and the KV agent beside it. No I/O.

Messages are msgpack arrays on a stream socket, a kind and its fields:

    scheduler -> agent   ["model", fields of DescribedModel]              first, once
                         ["begin", request, ids, salt, max_tokens]     a request that may reuse KV; ids as int32 bytes
                         ["grow", job, count]                          its answer needs more slots
                         ["end", job, ids, num_tokens]                 vLLM has ended it; the answer's ids, and how many
                                                                       tokens have KV. The ranks report the end as well
                         ["cancel", request]                           vLLM no longer waits for the reply to "begin",
                                                                       and will not use a job that is under way
    agent -> scheduler   ["ready"]
                         ["job", request, fields of KvJob]             the reused KV is in the slots
                         ["no job", request]                           vLLM computes and keeps it without the agent
                         ["slots", job, slots]                         more slots for an answer; none: there are none
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgpack

AGENT_SOCKET: Final = "KV_AGENT_SOCKET"
"""Variable with the number of the descriptor that the agent inherits."""
COPIES_SOCKET_NAME: Final = "copies.sock"
SPARE_BLOCKS: Final = 2
"""Slots that a request has beyond its tokens, if there are any: an answer's KV that finds no slot is not stored."""
MAX_MESSAGE_NBYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """vLLM's model, as far as its KV is concerned."""

    spec: bytes  # KvSpec, serialised
    fingerprint: str
    computation: str
    max_model_len: int
    vocab_size: int
    num_ranks: int


def pack(*message: Any) -> bytes:
    """Return a message's bytes."""
    packed: bytes = msgpack.packb(message)
    return packed


def unpacker() -> msgpack.Unpacker:
    """Return an unpacker of a stream of messages. It raises msgpack's errors and ValueError for other bytes."""
    return msgpack.Unpacker(max_buffer_size=MAX_MESSAGE_NBYTES)
