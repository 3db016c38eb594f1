"""Next-turn prefill: after a chat's answer, compute what is known of the next turn's prompt and not stored yet.

The next prompt contains the answer as the chat template renders it in the history, which may differ from what was
generated: many templates drop an answer's reasoning. The KV of prompt and answer then ends where the rendering begins
to differ. What the next prompt begins with is what two renderings have in common that differ in the next message only.
Dynamo calls this hint `speculative_prefill`.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from frontend.api.formatter import ToolCallFormatter
from frontend.api.hints import prefills_next_turn
from frontend.api.request_base import MAX_PRIORITY
from frontend.api.request_models import ChatBody, ChatMessage
from frontend.errors import ApiError, InvalidRequest, ServiceUnavailable
from frontend.generation import RequestSession
from frontend.request import GenerationRequest, RequestHints, SamplingParams, TextOptions
from frontend.tool_formats import ToolFormat
from frontend.tools import reads_calls, tool_specs
from kvpool import chain_keys
from telemetry.tracing import OFF

_log = logging.getLogger(__name__)

MOST_AT_ONCE: Final = 8  # per frontend; further ones are dropped, because a later turn computes its prompt itself
LEAST_NEW_TOKENS: Final = 64  # in whole blocks; fewer, such as what opens the next message, are no request's worth
_CONTENTS: Final = ("a", "b")  # of the next message, in two renderings
NextTurnOutcome = Literal["computed", "covered", "dropped", "failed"]


def wants_next_turn(body: ChatBody) -> bool:
    """Return True if the next turn's prompt is to be computed in advance.

    Raises InvalidRequest if the request's answer is not one message that the next turn's history will contain.
    """
    if not prefills_next_turn(body):
        return False
    if body.num_choices > 1:
        raise InvalidRequest(
            f"prefill_next_turn needs one answer that the next turn continues, got n = {body.num_choices}", param="n"
        )
    if body.continue_final_message or body.add_generation_prompt is False:
        raise InvalidRequest(
            "prefill_next_turn needs an answer that is a message of its own: omit continue_final_message and "
            "add_generation_prompt",
            param="hints.prefill_next_turn",
        )
    return True


def next_prefix(
    body: ChatBody, text: str, form: ToolFormat, read: Callable[[Sequence[ChatMessage]], Sequence[int]]
) -> NDArray[np.int32]:
    """Return the token ids with which the prompt after the answer `text` begins, whatever its next message says.

    After calls of tools, which have the format `form`, their results are expected, else a message of the user. `read`
    returns a chat's token ids.
    """
    one, other = (
        np.array(read([*body.messages, *_next_turn(body, text, form, content)]), np.int32) for content in _CONTENTS
    )
    return one[: common_length(one, other)]


def _next_turn(body: ChatBody, text: str, form: ToolFormat, content: str) -> list[ChatMessage]:
    """Return the answer and the messages after it, whose content is `content`.

    Ids of calls are new each time: the client's are not known here, and a template may render them.
    """
    message: dict[str, Any] = {"content": text}
    if reads_calls(body):
        message = ToolCallFormatter(form, tool_specs(body)).message(text)
    calls = message.get("tool_calls", ())
    after = [{"role": "tool", "tool_call_id": call["id"], "content": content} for call in calls]
    values = [{"role": "assistant", **message}, *(after or [{"role": "user", "content": content}])]
    return [ChatMessage.model_validate(value) for value in values]


def common_length(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the number of equal leading ids."""
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter


def prefix_request(answered: GenerationRequest, ids: NDArray[np.int32], timeout_s: float) -> GenerationRequest:
    """Return the request that computes `ids` for the tenant of `answered`, after all other requests of it."""
    now_s = monotonic()
    return replace(
        answered,
        request_id=f"{answered.request_id}-next",
        prompt_ids=ids,
        chain=chain_keys(answered.chain_seed, ids, answered.block_tokens),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, seed=0),
        arrival_s=now_s,
        deadline_s=now_s + timeout_s,
        tokenize_s=0.0,
        ttft_objective_s=0.0,
        tpot_objective_s=0.0,
        priority=MAX_PRIORITY,
        place=b"",
        previous_tokens=0,
        text=TextOptions(),
        wants_receipt=False,
        hints=RequestHints(0, answered.hints.pause_s, answered.hints.lifetime_s),
        prefills_next_turn=False,
        span=OFF,
    )


class NextTurnPrefills:
    """Next-turn prefills of one frontend, at most `MOST_AT_ONCE` at a time. None is repeated after a failure."""

    def __init__(self, count: Callable[[NextTurnOutcome], None]) -> None:
        """`count` is called once per answer."""
        self._count = count
        self._num_running = 0
        self._sessions: set[RequestSession] = set()
        self._is_closed = False

    def may_begin(self) -> bool:
        """Return True if another one may begin now; else count one as dropped."""
        if not self._is_closed and self._num_running < MOST_AT_ONCE:
            return True
        self._count("dropped")
        return False

    async def run(
        self,
        prepare: Callable[[], Awaitable[GenerationRequest | None]],
        begin: Callable[[GenerationRequest], RequestSession],
        close: Callable[[RequestSession], Awaitable[None]],
    ) -> None:
        """Prepare a request, and run it to its end. No request: the next prompt's known blocks are stored already.

        `begin` opens a session that `close` closes in any case; it may raise ApiError.
        """
        self._num_running += 1
        outcome: NextTurnOutcome = "failed"
        try:
            request = await prepare()
            if request is None:
                outcome = "covered"
            elif self._is_closed:
                outcome = "dropped"
            else:
                await self._compute(begin(request), close)
                outcome = "computed"
        except ApiError as error:
            _log.info("the next turn's prompt was not computed in advance: %s", error)
        finally:
            self._num_running -= 1
            self._count(outcome)

    async def _compute(self, session: RequestSession, close: Callable[[RequestSession], Awaitable[None]]) -> None:
        self._sessions.add(session)
        try:
            await session.collect()
        finally:
            self._sessions.discard(session)
            await close(session)

    def end(self) -> None:
        """End all that run, and begin no more: the frontend drains, and no client waits for them."""
        self._is_closed = True
        for session in self._sessions:
            session.end(ServiceUnavailable("the frontend is shutting down", code="draining", retry_after_s=1.0))
