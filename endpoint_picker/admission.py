"""The conductor's judgement of a request before it reaches an endpoint.

A request is read as one of Moonpool's API servers reads it: by the same API keys, limits, templates and tokenizer. So
its tenant, objectives and chain keys are the same, and the conductor predicts what it will predict when that API server
asks for the placement. One thing can differ: an API server keeps the ids of the answers in a dialogue, and here all of
them are made from the text; where they differ, less of the prompt is found in the pool, and the prediction is longer.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from time import monotonic

from endpoint_picker.request import generation_path
from frontend.api.generate import PreparedAnswer, prepared_answer
from frontend.api.routes import GENERATION_ROUTES
from frontend.attempts import rejection_error, schedule_request
from frontend.config import FrontendConfig
from frontend.prepare import RequestContext
from frontend.service import Service
from frontend.tokenizer import Tokenizer
from rpc.control import ControlError
from telemetry.limited_log import LimitedLog

__all__ = ["AdmissionPreview"]

log = logging.getLogger(__name__)


class AdmissionPreview:
    """Reader of requests and client of the conductors. Lives on the event loop."""

    def __init__(self, config: FrontendConfig, tokenizers: Sequence[Tokenizer], limit_s: float) -> None:
        """`limit_s` bounds the time for one request, with its preparation."""
        self._service = Service(config, tokenizers)
        self._limit_s = limit_s
        self._unjudged = LimitedLog(log)

    async def start(self) -> None:
        """Start following the API keys and the cluster; an unreachable conductor is not an error."""
        await self._service.start()

    async def close(self) -> None:
        """Close all connections."""
        await self._service.close()

    async def check(self, path: str, headers: Mapping[str, str], body: bytes) -> bool:
        """Raise the error that the request's client would get from an API server now.

        Returns False if the conductor does not judge the request in time: the API server asks it again.
        """
        started_s = monotonic()
        try:
            async with asyncio.timeout(self._limit_s):
                prepared = await self._prepared(path, headers, body)
                if prepared is None:
                    return True
                call = schedule_request(prepared.requests[0], self._service.config.node_id)
                left_s = max(0.0, started_s + self._limit_s - monotonic())
                reply = await self._service.conductor.preview(call, deadline_s=left_s)
        except (TimeoutError, ControlError) as error:
            reason = str(error) or f"no judgement within {self._limit_s:g} s"
            self._unjudged.warning("", "requests are sent to endpoints unjudged: %s", reason)
            return False
        if reply.WhichOneof("result") == "rejection" and not reply.rejection.may_return:
            raise rejection_error(reply.rejection)
        return True

    async def _prepared(self, path: str, headers: Mapping[str, str], body: bytes) -> PreparedAnswer | None:
        """Return a generation request as an API server prepares it; None for another route."""
        route = GENERATION_ROUTES.get(generation_path(path))
        if route is None:
            return None
        caller = self._service.keys.of_headers(headers)
        arrival = RequestContext.of(headers, at_s=monotonic(), caller=caller)
        return await prepared_answer(self._service, route, body, arrival)
