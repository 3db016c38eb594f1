"""Hints of the client: what it expects of a request, under our names, Dynamo's and Anthropic's.

Hints are checked as strictly as all other fields. Two hints that contradict each other are an error, since neither can
be preferred.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal, Protocol

from pydantic import ConfigDict, Field, field_validator

from frontend.api.request_base import MAX_PRIORITY, MAX_TOKEN_ID, RequestModel
from frontend.errors import InvalidRequest
from frontend.request import NO_HINTS, RequestHints

MAX_HINT_S: Final = 86_400.0  # longest pause and lifetime: a day
_LEAST_LIFETIME_S: Final = 60.0
_PAUSES: Final = 3.0  # lifetime in announced pauses, if the client announces only the pause
_TTL_S: Final = {"5m": 300.0, "1h": 3600.0}


class CacheControl(RequestModel):
    """Anthropic's cache_control: the prompt will be used again within `ttl` after each use. Default: five minutes."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def lifetime_s(self) -> float:
        """Lifetime in seconds."""
        return _TTL_S[self.ttl or "5m"]


class AgentHints(RequestModel):
    """Dynamo's nvext.agent_hints. A higher `priority` is served first, contrary to vLLM's and our own field."""

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    osl: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    strict_priority: int | None = None
    speculative_prefill: bool | None = None

    @field_validator("strict_priority")
    @classmethod
    def _has_no_tiers(cls, value: int | None) -> int | None:
        if value:
            raise ValueError("is not supported: use priority, which orders the tenant's own requests")
        return value


class NvExt(RequestModel):
    """Dynamo's extension object; its other fields are ignored."""

    agent_hints: AgentHints | None = None
    cache_control: CacheControl | None = None


class Hints(RequestModel):
    """Our own hints, all optional."""

    model_config = ConfigDict(extra="forbid")
    expected_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    pause_s: Annotated[float, Field(ge=0, le=MAX_HINT_S)] | None = None
    lifetime_s: Annotated[float, Field(gt=0, le=MAX_HINT_S)] | None = None
    prefill_next_turn: bool | None = None


class HintedBody(Protocol):
    """Fields of a body that contain hints."""

    priority: int | None
    hints: Hints | None
    nvext: NvExt | None

    def cache_controls(self) -> Iterator[CacheControl]:
        """Yield all cache_control objects of the body."""


def priority_of(body: HintedBody) -> int:
    """Return the priority, lower values first. Raises InvalidRequest if the body has two that differ."""
    dynamo = body.nvext.agent_hints.priority if body.nvext and body.nvext.agent_hints else None
    if dynamo is None:
        return body.priority or 0
    if body.priority is not None and body.priority != -dynamo:
        raise InvalidRequest(
            f"priority is {body.priority} and nvext.agent_hints.priority {dynamo}, which means {-dynamo} here because "
            "Dynamo serves higher values first: give one of them",
            param="nvext.agent_hints.priority",
        )
    return -dynamo


def prefills_next_turn(body: HintedBody) -> bool:
    """Return True if the known part of the next prompt is to be computed after the answer.

    Raises InvalidRequest if the body contradicts itself.
    """
    own = body.hints.prefill_next_turn if body.hints else None
    dynamo = body.nvext.agent_hints.speculative_prefill if body.nvext and body.nvext.agent_hints else None
    if own is not None and dynamo is not None and own != dynamo:
        raise InvalidRequest(
            f"hints.prefill_next_turn is {_json(own)} and nvext.agent_hints.speculative_prefill {_json(dynamo)}: give "
            "one of them",
            param="nvext.agent_hints.speculative_prefill",
        )
    return bool(own or dynamo)


def _json(value: bool) -> str:
    return "true" if value else "false"


def hints_of(body: HintedBody) -> RequestHints:
    """Return what the client expects. Raises InvalidRequest if the body contradicts itself."""
    own = body.hints
    osl = body.nvext.agent_hints.osl if body.nvext and body.nvext.agent_hints else None
    tokens = own.expected_output_tokens if own else None
    if tokens is not None and osl is not None and tokens != osl:
        raise InvalidRequest(
            f"hints.expected_output_tokens is {tokens} and nvext.agent_hints.osl {osl}: give one of them",
            param="nvext.agent_hints.osl",
        )
    pause_s = (own.pause_s if own else None) or 0.0
    lifetime_s = own.lifetime_s if own else None
    if lifetime_s is not None and lifetime_s < pause_s:
        raise InvalidRequest(
            f"hints.lifetime_s must be at least hints.pause_s ({pause_s:g}), got {lifetime_s:g}",
            param="hints.lifetime_s",
        )
    if lifetime_s is None:
        lifetime_s = _longest_s(body.cache_controls())
        if pause_s:
            lifetime_s = min(max(lifetime_s, _LEAST_LIFETIME_S, _PAUSES * pause_s), MAX_HINT_S)
    found = RequestHints(tokens or osl or 0, pause_s, lifetime_s)
    return NO_HINTS if found == NO_HINTS else found


def _longest_s(controls: Iterable[CacheControl]) -> float:
    return max((control.lifetime_s for control in controls), default=0.0)
