"""Generation of the response to one request, streamed or whole."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.body import parse_body
from frontend.api.formatter import FormatterFactory, ResponseOptions, server_timing
from frontend.api.request_models import ChatBody, GenerationBody
from frontend.api.routes import GenerationRoute
from frontend.api.stream import DisconnectWatch, EventSource, EventStreamResponse, encode
from frontend.callers import ApiCaller, QuotaReservation
from frontend.errors import ApiError
from frontend.output import OutputChunk
from frontend.prepare import RequestContext
from frontend.request import GenerationRequest
from frontend.service import ServedModel, Service
from telemetry import logs

T = TypeVar("T")
_VALID_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_MANY_TOKENS: Final = 1024  # encoding more tokens at once would block the event loop
_STALLED_CLIENT_S: Final = 5.0  # the connection is closed this long after the request's deadline


@dataclass(frozen=True)
class PreparedAnswer:
    """A validated body, the format of its response, its model, and one request per choice."""

    body: GenerationBody
    form: FormatterFactory
    model: ServedModel
    requests: list[GenerationRequest]
    context: RequestContext
    wants_timing: bool  # the response includes the time breakdown


async def parsed_body(
    service: Service, read: Callable[[bytes], T], raw: bytes, caller: ApiCaller, *, takes_ids: bool = False
) -> T:
    """Return `read(raw)`; the body's limits are those of the model with the largest, which is not known yet.

    Raises InvalidRequest and BodyTooLarge.
    """
    limits = [model.preparer.limits for model in service.models]
    most = max(each.body_values(service.config.max_prompts, takes_ids=takes_ids) for each in limits)
    return await parse_body(read, raw, service.threads, tenant=caller.tenant, max_values=most)


async def prepared_answer(
    service: Service, route: GenerationRoute[Any], raw: bytes, arrival: RequestContext
) -> PreparedAnswer:
    """Parse and check a generation request, and prepare one request per choice. Raises ApiError."""
    body, form = await parsed_body(service, route.read, raw, arrival.caller, takes_ids=route.takes_ids)
    model = await service.admit(body.model)
    context = replace(arrival, slo_class=arrival.class_beside(body.slo_class), body_nbytes=len(raw))
    requests = await route.prepare(model.preparer, body, context)
    return PreparedAnswer(body, form, model, requests, context, arrival.wants_timing)


async def answer(
    service: Service,
    http: Request,
    prepared: PreparedAnswer,
    reservation: QuotaReservation,
    disconnect_watch: DisconnectWatch,
) -> Response:
    """Run the requests on their model and return the response.

    Closes the watch for the client's disconnect at the end. Raises ApiError only before the first byte of the response
    is sent.
    """
    body, model, requests, timing = prepared.body, prepared.model, prepared.requests, prepared.wants_timing
    headers = {"x-request-id": given_request_id(http) or requests[0].request_id} | reservation.headers()
    with logs.request(requests[0].request_id):
        session = service.open_session(model, requests, reservation)
        handed_over = False

        is_closed = False

        async def close() -> None:
            nonlocal is_closed
            was_closed, is_closed = is_closed, True
            await service.close_session(session)
            if isinstance(body, ChatBody) and not was_closed:
                service.prefill_next_turn(model, body, prepared.context, session.generations[0])

        try:
            shape = prepared.form(
                session.generations,
                body.model or model.name,  # the requested name: a request for an alias is answered with the alias
                ResponseOptions.of(body, model.preparer.form, timing=timing),
            )
            if sum(len(each.prompt_ids) for each in requests if each.shows_prompt) > _MANY_TOKENS:
                await service.threads.run(session.read_prompts, tenant=requests[0].tenant)
            if not body.stream:
                steps = await disconnect_watch.run(session.collect())
                prompts = requests if body.return_token_ids else []
                headers |= server_timing(session.generations) if timing else {}
                content = await _encoded(
                    service, requests[0].tenant, steps, lambda: encode(shape.whole(steps)), prompts
                )
                return Response(content, media_type="application/json", headers=headers)

            async def more() -> bytes:
                index, step = await session.next()
                return await _encoded(service, requests[0].tenant, [step], lambda: shape.events(index, step))

            # Await the first chunk before sending headers, so that an early error gets its HTTP status.
            first = await disconnect_watch.run(more())
            handed_over = True
            headers |= server_timing(session.generations) if timing else {}
            source = EventSource(
                more,
                failure=shape.failure,
                end=shape.end,
                is_over=lambda: session.is_over,
                aborts=[each.overflowed for each in session.generations],
                close=close,
                deadline_s=lambda: max(each.deadline_s for each in session.generations) + _STALLED_CLIENT_S,
            )
            return EventStreamResponse(
                first, source, disconnect_watch=disconnect_watch, request_id=requests[0].request_id, headers=headers
            )
        except ApiError as error:
            error.request_id = requests[0].request_id
            raise
        finally:
            if not handed_over:
                await asyncio.shield(_end(close, disconnect_watch))


async def _end(close: Callable[[], Awaitable[None]], disconnect_watch: DisconnectWatch) -> None:
    await disconnect_watch.close()
    await close()


async def _encoded(
    service: Service,
    tenant: str,
    steps: Sequence[OutputChunk],
    encode_steps: Callable[[], T],
    prompts: Sequence[GenerationRequest] = (),
) -> T:
    """Return `encode_steps()`, which encodes the steps and the returned `prompts`; in a thread if it is slow."""
    return await service.threads.run(encode_steps, tenant=tenant) if _takes_long(steps, prompts) else encode_steps()


def _takes_long(steps: Sequence[OutputChunk], prompts: Sequence[GenerationRequest]) -> bool:
    num_tokens = sum([len(prompt.prompt_ids) for prompt in prompts])
    for step in steps:
        num_tokens += len(step.token_ids)
        if step.echo is not None and step.echo.scores is not None:
            return True
    return num_tokens > _MANY_TOKENS


def given_request_id(http: Request) -> str:
    """Return the client's x-request-id, or "". Requests' ids inside the cluster cannot be chosen by clients."""
    given = http.headers.get("x-request-id", "")
    return given if _VALID_REQUEST_ID.fullmatch(given) else ""
