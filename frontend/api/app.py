"""ASGI application: routes, error responses, and the trace span of each request."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.admin import AdminRoutes
from frontend.api.body import BodyReservation, read_body
from frontend.api.description_page import DescriptionPage
from frontend.api.generate import answer, given_request_id, parsed_body, prepared_answer
from frontend.api.messages.request import MessagesPrompt
from frontend.api.openapi import encoded_description
from frontend.api.request_base import RequestModel
from frontend.api.request_models import DetokenizeBody, TokenizeBody, named_as_by_client, parse
from frontend.api.routes import GENERATION_ROUTES, MESSAGES, GenerationRoute, error_body
from frontend.api.stream import DisconnectWatch, encode
from frontend.callers import ApiCaller, counts_in_quota
from frontend.console.routes import CONSOLE, ConsoleRoutes
from frontend.errors import ApiError, ClientGone, EndpointNotServed, MethodNotAllowed, NoSuchPath
from frontend.input_limits import InputLimits
from frontend.prepare import RequestContext
from frontend.service import ServedModel, Service
from rpc.gateway import ADMIN
from rpc.versions import package_version
from telemetry import exposition, tracing

_log = logging.getLogger(__name__)

_MODEL: Final = "/v1/models/"

B = TypeVar("B", bound=RequestModel)
MeteredWork = Callable[[B, RequestContext], Awaitable[tuple[Response, int]]]
Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI application for a started service."""
    app: ASGIApp = _App(service)
    if origins := service.config.http.cors_origins:
        app = CrossOriginMiddleware(app, origins)
    return TracingMiddleware(app) if tracing.is_on() else app


class _App:
    """ASGI application without a framework, whose routing and middleware would cost more than the routes' own work."""

    def __init__(self, service: Service) -> None:
        routes = _Routes(service)
        self._service = service
        self._turnstile = service.throttle
        self._any_model = routes.model
        self._sections: dict[str, ConsoleRoutes | AdminRoutes | DescriptionPage] = {
            CONSOLE: ConsoleRoutes(service),
            ADMIN: AdminRoutes(service),
            DescriptionPage.PATH: DescriptionPage(),
        }
        self._routes: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", routes.alive),
            "/live": ("GET", routes.alive),
            "/version": ("GET", routes.version),
            "/ready": ("GET", routes.ready),
            "/metrics": ("GET", routes.metrics),
            "/metrics/cluster": ("GET", routes.metrics),
            "/validate": ("GET", routes.validate),
            "/openapi.json": ("GET", routes.openapi),
            "/v1/models": ("GET", routes.models),
            **{path: ("POST", partial(routes.generate, route)) for path, route in GENERATION_ROUTES.items()},
            f"{MESSAGES}/count_tokens": ("POST", routes.count_tokens),
            "/tokenize": ("POST", routes.tokenize),
            "/detokenize": ("POST", routes.detokenize),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._turnstile.take()
        http = Request(scope, receive)
        try:
            response = await self._handler(http)(http)
        except ApiError as error:
            response = _refusal(http, error)
        except ClientGone:
            response = Response(status_code=499)  # nginx's status for a disconnected client, who does not receive it
        except Exception:
            _log.exception("%s %s failed", http.method, http.url.path)
            response = _refusal(http, ApiError("internal error", code="internal_error"))
        if self._service.draining:  # no client must send another request while the connection is being closed
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _handler(self, http: Request) -> Handler:
        path: str = http.scope["path"]
        for start, section in self._sections.items():
            if path.startswith(start) and (methods := section.methods(path)):
                is_fitting = http.method in methods or (http.method == "HEAD" and "GET" in methods)
                return section if is_fitting else partial(_no_such_method, ", ".join(methods))
        method, handler = self._routes.get(path) or self._routes.get(path.rstrip("/"), ("", _no_such_path))
        if not method and path.startswith(_MODEL):
            method, handler = "GET", self._any_model
        is_fitting = http.method == method or (http.method == "HEAD" and method == "GET")
        return handler if is_fitting or not method else partial(_no_such_method, method)


class _Routes:
    """Handlers of all routes. If keys are configured, all but the operators' routes require an API key."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def count_tokens(self, http: Request) -> Response:
        async def work(body: TokenizeBody, arrival: RequestContext) -> tuple[Response, int]:
            with named_as_by_client(MessagesPrompt.CHAT_FIELDS):
                ids = await self._service.models.find(body.model).preparer.tokens(body, arrival)
            return _json({"input_tokens": len(ids)}), len(ids)

        def read(raw: bytes) -> TokenizeBody:
            return parse(MessagesPrompt, raw).to_tokenize()

        return await self._metered(http, read, InputLimits.text_body_nbytes, work)

    async def tokenize(self, http: Request) -> Response:
        async def work(body: TokenizeBody, arrival: RequestContext) -> tuple[Response, int]:
            model = self._service.models.find(body.model)
            ids = await model.preparer.tokens(body, arrival)
            limit = model.preparer.max_model_len

            def build() -> Response:
                strings = model.tokenizer.tokens(ids) if body.return_token_strs else None
                return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

            response = await self._service.threads.run(build, tenant=arrival.caller.tenant)
            return response, len(ids)

        return await self._metered(http, partial(parse, TokenizeBody), InputLimits.text_body_nbytes, work)

    async def detokenize(self, http: Request) -> Response:
        async def work(body: DetokenizeBody, arrival: RequestContext) -> tuple[Response, int]:
            model = self._service.models.find(body.model)
            return _json({"prompt": await model.preparer.text(body.tokens, arrival)}), len(body.tokens)

        return await self._metered(http, partial(parse, DetokenizeBody), InputLimits.ids_body_nbytes, work)

    async def models(self, http: Request) -> Response:
        self._caller(http)
        cards = [self._card(name, model) for model in self._service.models for name in model.config.names]
        return _json({"object": "list", "data": cards})

    async def model(self, http: Request) -> Response:
        self._caller(http)
        name = http.scope["path"].removeprefix(_MODEL)
        return _json(self._card(name, self._service.models.find(name)))

    async def alive(self, http: Request) -> Response:
        return _json({"status": "ok"})

    async def version(self, http: Request) -> Response:
        return _json({"version": package_version()})

    async def ready(self, http: Request) -> Response:
        reason = "draining" if self._service.draining else self._service.cluster.not_ready()
        if reason is None:
            return _json({"status": "ready"})
        return _json({"status": "not ready", "reason": reason}, status=503)

    async def metrics(self, http: Request) -> Response:
        keys, settings, authorization = self._service.keys, self._service.config.http, http.headers.get("authorization")
        if settings.metrics_need_admin:
            keys.admin(authorization)
        is_cluster = http.url.path.rstrip("/").endswith("/cluster")
        registry = self._service.cluster_metrics if is_cluster else self._service.metrics
        shows_tenants = settings.metrics_show_tenants or keys.is_admin(authorization)
        text, content_type = exposition(registry, http.headers.get("accept", ""), shows_tenants=shows_tenants)
        return Response(text, headers={"content-type": content_type})

    async def validate(self, http: Request) -> Response:
        if self._service.keys.has_admin:
            self._service.keys.admin(http.headers.get("authorization"))
        return _json(self._service.validate())

    async def openapi(self, http: Request) -> Response:
        description = partial(encoded_description, asks_for_key=self._service.keys.are_required)
        return Response(await asyncio.to_thread(description), media_type="application/json")

    async def generate(self, route: GenerationRoute[Any], http: Request) -> Response:
        at_s, caller = monotonic(), self._caller(http)
        reservation = self._service.quotas.enter(caller)
        disconnect_watch: DisconnectWatch | None = None
        try:
            arrival = RequestContext.of(http.headers, at_s=at_s, caller=caller, span=span_of(http))
            with self._service.body_budget.place(caller.tenant) as place:
                raw = await self._read(http, place, InputLimits.any_body_nbytes)
                disconnect_watch = DisconnectWatch(http.receive)
                answering = await disconnect_watch.run(prepared_answer(self._service, route, raw, arrival))
            reservation.reserve(answering.requests)
            return await answer(self._service, http, answering, reservation, disconnect_watch)
        except BaseException as error:
            # No effect if the session has settled it
            reservation.leave(used_tokens=0, counts=counts_in_quota(error))
            if disconnect_watch is not None:
                await disconnect_watch.close()
            raise

    async def _metered(
        self, http: Request, read: Callable[[bytes], B], max_nbytes: Callable[[InputLimits], int], work: MeteredWork[B]
    ) -> Response:
        """Return the response of `work` on the body that `read` returns.

        The caller's quota is charged a request and the tokens that `work` returns.
        """
        at_s, caller = monotonic(), self._caller(http)
        reservation = self._service.quotas.enter(caller)
        disconnect_watch: DisconnectWatch | None = None
        try:
            with self._service.body_budget.place(caller.tenant) as place:
                raw = await self._read(http, place, max_nbytes)
                disconnect_watch = DisconnectWatch(http.receive)

                async def worked() -> tuple[Response, int]:
                    body = await parsed_body(self._service, read, raw, caller)
                    return await work(body, RequestContext(at_s, caller, body_nbytes=len(raw)))

                response, num_tokens = await disconnect_watch.run(worked())
            reservation.leave(used_tokens=num_tokens, counts=True)
            response.headers.update(reservation.headers())
            return response
        except BaseException as error:
            reservation.leave(used_tokens=0, counts=counts_in_quota(error))
            raise
        finally:
            if disconnect_watch is not None:
                await disconnect_watch.close()

    async def _read(self, http: Request, place: BodyReservation, max_nbytes: Callable[[InputLimits], int]) -> bytes:
        """Return the request's body. Its limit is that of the model with the largest, which is not known yet."""
        most = max(max_nbytes(model.preparer.limits) for model in self._service.models)
        return await read_body(http, place, max_nbytes=most, timeout_s=self._service.config.body_timeout_s)

    def _caller(self, http: Request) -> ApiCaller:
        return self._service.keys.of_headers(http.headers)

    def _card(self, name: str, model: ServedModel) -> dict[str, object]:
        """Return a model's card under one of its names; `root` is its main name."""
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "moonpool",
            "root": model.name,
            "parent": None,
            "max_model_len": model.preparer.max_model_len or None,
            "moonpool": {
                "fingerprint": service.cluster.fingerprint(model.name) or None,
                "block_tokens": service.config.block_tokens,
                "kv_scale_group": service.cluster.kv_scale_group(model.name),
                "stand_ins": service.cluster.engines(model.name),
            },
        }


def _json(value: object, *, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


async def _no_such_path(http: Request) -> Response:
    path = http.url.path.rstrip("/")
    if what := next((what for end, what in _NOT_SERVED.items() if path.endswith(end)), None):
        raise EndpointNotServed(
            f"{http.method} {http.url.path} is not served: Moonpool generates text and has no {what}; use a server for "
            "it beside this one"
        )
    raise NoSuchPath(f"{http.method} {http.url.path}: Not Found")


async def _no_such_method(allowed: str, http: Request) -> Response:
    error = MethodNotAllowed(f"{http.method} {http.url.path}: Method Not Allowed")
    response = _refusal(http, error)
    response.headers["allow"] = "GET, HEAD" if allowed == "GET" else allowed
    return response


def _refusal(http: Request, error: ApiError) -> Response:
    response = _json(error_body(http.url.path, error), status=error.status)
    response.headers.update(error.headers())
    if given := given_request_id(http):
        response.headers["x-request-id"] = given
    return response


_NOT_SERVED: Final = {  # by the end of the path
    "/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/rerank": "reranking",
    "/score": "scoring of pairs",
    "/classify": "classification",
    "/moderations": "moderation",
    "/audio/speech": "speech",
    "/audio/transcriptions": "transcription",
    "/audio/translations": "translation of speech",
    "/images/generations": "images",
    "/images/edits": "images",
    "/images/variations": "images",
    "/files": "files",
    "/batches": "batches of requests (`moonpool trace replay` sends many)",
    "/messages/batches": "batches of requests",
}
_KEY: Final = "moonpool.span"


_EXPOSED: Final = ("x-request-id", "x-moonpool-request-id", "retry-after", "server-timing", "traceparent")


class CrossOriginMiddleware:
    """ASGI middleware that lets pages of other origins call the API, but not operators' routes and pages (CORS)."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._shared = CORSMiddleware(
            app, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=_EXPOSED
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and not scope["path"].startswith((ADMIN, CONSOLE))
        await (self._shared if is_api else self._app)(scope, receive, send)


class TracingMiddleware:
    """ASGI middleware that traces generation requests. The response's `traceparent` header names the span."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATION_ROUTES:
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        span = tracing.receive(
            f"{method} {path}", Headers(scope=scope), http__request__method=method, http__route=path, url__path=path
        )
        if not span.is_on:
            await self._app(scope, receive, send)
            return
        scope[_KEY] = span

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["traceparent"] = span.traceparent
                span.note(http__response__status_code=message["status"])
                if message["status"] >= 500:
                    span.fail(f"HTTP {message['status']}")
            await send(message)

        with span:
            await self._app(scope, receive, send_traced)


def span_of(http: Request) -> tracing.Span:
    """Return the request's span; OFF if it is not traced."""
    span: tracing.Span = http.scope.get(_KEY, tracing.OFF)
    return span
