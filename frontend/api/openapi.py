"""OpenAPI description of the API, generated from the models that validate requests."""

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from frontend.api import request_models, response_models
from frontend.api.messages import request as messages_request
from frontend.api.messages import response as messages_response
from frontend.api.request_models import CLASS_NAME
from frontend.api.responses.request import ResponsesBody
from frontend.api.responses.response import ResponsesResponse
from frontend.api.stream import encode
from frontend.sessions import MAX_SESSION_CHARS, PARENT_HEADERS, SESSION_HEADERS

_ERRORS: Final = {
    400: "The request is invalid; `param` names the invalid field.",
    401: "The API key is missing or invalid.",
    403: "The tenant may not use this class of objectives.",
    404: "The model does not exist.",
    405: "The method is not allowed for this path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Over the tenant's quota, or the cluster cannot meet its objectives now; retry after the time in Retry-After.",
    500: "The cluster accepted the request and could not finish it.",
    503: "The request cannot be served now.",
    504: "The request did not end within its deadline.",
}
_GENERATION: Final = (400, 401, 403, 404, 405, 408, 413, 429, 500, 503, 504)
_TEXT: Final = (400, 401, 404, 405, 408, 413, 429, 503)
_HEADERS: Final = [
    *(
        {
            "name": name,
            "in": "header",
            "required": False,
            "description": f"Objective in milliseconds, at most a day: {what}.",
            "schema": {"type": "number", "minimum": 0.001, "maximum": 24 * 3600 * 1000},
        }
        for name, what in (("x-slo-ttft-ms", "time to the first token"), ("x-slo-tpot-ms", "time between tokens"))
    ),
    {
        "name": "x-slo-class",
        "in": "header",
        "required": False,
        "description": "Class of objectives; same as the field slo_class.",
        "schema": {"type": "string", "pattern": CLASS_NAME},
    },
    *(
        {
            "name": name,
            "in": "header",
            "required": False,
            "description": f"Id of the request's session{of}; same as the field {field}.",
            "schema": {"type": "string", "maxLength": MAX_SESSION_CHARS},
        }
        for names, of, field in (
            (SESSION_HEADERS, "", "session_id"),
            (PARENT_HEADERS, "'s parent", "parent_session_id"),
        )
        for name in names
    ),
    {
        "name": "x-moonpool-timing",
        "in": "header",
        "required": False,
        "description": "1: return the time breakdown in the header Server-Timing and in moonpool.timing.",
        "schema": {"type": "string", "enum": ["0", "1"]},
    },
]
_NAME: Final = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]


_BODIES: Final = (
    request_models.CompletionBody,
    request_models.ChatBody,
    request_models.TokenizeBody,
    request_models.DetokenizeBody,
    ResponsesBody,
    messages_request.MessagesBody,
    messages_request.MessagesPrompt,
)
_ANSWERS: Final = (
    response_models.CompletionResponse,
    response_models.ChatCompletion,
    response_models.ChatChunk,
    response_models.ModelList,
    response_models.Tokenized,
    response_models.Detokenized,
    response_models.Status,
    response_models.SelfCheck,
    response_models.Version,
    response_models.ErrorResponse,
    ResponsesResponse,
    messages_response.MessageResponse,
    messages_response.CountedTokens,
    messages_response.AnthropicError,
)


@cache
def encoded_description(*, asks_for_key: bool) -> bytes:
    """Return what is served at /openapi.json. The first call takes a fraction of a second."""
    return encode(describe(asks_for_key=asks_for_key))


def describe(*, asks_for_key: bool) -> dict[str, Any]:
    """Return the description of the API."""
    paths = {
        "/v1/completions": _post(
            "Continue prompts",
            request_models.CompletionBody,
            response_models.CompletionResponse,
            _GENERATION,
            _chunks(response_models.CompletionResponse),
        ),
        "/v1/chat/completions": _post(
            "Answer a chat",
            request_models.ChatBody,
            response_models.ChatCompletion,
            _GENERATION,
            _chunks(response_models.ChatChunk),
        ),
        "/v1/responses": _post("Answer items", ResponsesBody, ResponsesResponse, _GENERATION, _events("response.…")),
        "/v1/messages": _post(
            "Answer messages",
            messages_request.MessagesBody,
            messages_response.MessageResponse,
            _GENERATION,
            _events("message_start, content_block_delta and others"),
            error=messages_response.AnthropicError,
        ),
        "/v1/messages/count_tokens": _post(
            "Number of a prompt's tokens",
            messages_request.MessagesPrompt,
            messages_response.CountedTokens,
            _TEXT,
            error=messages_response.AnthropicError,
        ),
        "/tokenize": _post(
            "Token ids of a text or chat", request_models.TokenizeBody, response_models.Tokenized, _TEXT
        ),
        "/detokenize": _post("Text of token ids", request_models.DetokenizeBody, response_models.Detokenized, _TEXT),
        "/v1/models": _get("List the served models", response_models.ModelList, (401, 405)),
        "/v1/models/{name}": _get("One model", response_models.ModelCard, (401, 404, 405)) | {"parameters": _NAME},
        "/health": _get("Liveness of the process", response_models.Status, (405,)),
        "/live": _get("Liveness of the process", response_models.Status, (405,)),
        "/version": _get("Version of Moonpool", response_models.Version, (405,)),
        "/ready": _get("Readiness of the cluster", response_models.Status, (405,)),
        "/validate": _get("Self-check of the process's resources", response_models.SelfCheck, (405,)),
        "/metrics": {"get": _operation("Prometheus metrics", _media("text/plain", {"type": "string"}), (405,))},
        "/metrics/cluster": {
            "get": _operation("Metrics of the whole cluster", _media("text/plain", {"type": "string"}), (405,))
        },
        "/openapi.json": {
            "get": _operation("This description", _media("application/json", {"type": "object"}), (405,))
        },
    }
    paths["/ready"]["get"]["responses"]["503"] = _response("The cluster cannot serve.", response_models.Status)
    if asks_for_key:
        for path, item in paths.items():
            if path.startswith("/v1/") or path.endswith("tokenize"):
                _operation_of(item)["security"] = [{"key": []}]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        paths[path]["parameters"] = _HEADERS
    components: dict[str, Any] = {"schemas": _schemas()}
    if asks_for_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Moonpool", "version": "1"},  # version of the API
        "paths": paths,
        "components": components,
    }


def _schemas() -> dict[str, Any]:
    """Return the JSON schemas of all requests and responses by name."""
    both = [(model, "validation") for model in (*_BODIES, *_ANSWERS)]
    _, schema = models_json_schema(both, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    definitions: dict[str, Any] = schema["$defs"]
    for body in (
        *(request_models.CompletionBody, request_models.ChatBody),
        *(ResponsesBody, messages_request.MessagesBody, messages_request.MessagesPrompt),
    ):
        properties = definitions[body.__name__]["properties"]
        for name, neutral in body.UNSUPPORTED.items():
            properties.setdefault(name, {"enum": [*neutral, None], "description": "Not supported."})
    return definitions


def _post(
    summary: str,
    body: type[BaseModel],
    answer: type[BaseModel],
    errors: Iterable[int],
    stream: dict[str, Any] | None = None,
    *,
    error: type[BaseModel] = response_models.ErrorResponse,
) -> dict[str, Any]:
    content = _media("application/json", _ref(answer)) | (stream or {})
    operation = _operation(summary, content, errors, error)
    operation["requestBody"] = {"required": True, "content": _media("application/json", _ref(body))}
    return {"post": operation}


def _chunks(model: type[BaseModel]) -> dict[str, Any]:
    text = f"A {model.__name__} or an ErrorAnswer as JSON; of the last event [DONE]."
    return _stream({"data": {"type": "string", "description": text}})


def _events(names: str) -> dict[str, Any]:
    data = {"type": "string", "description": "The event as JSON; its type is the event's name."}
    return _stream({"event": {"type": "string", "description": f"Name: {names}."}, "data": data})


def _stream(fields: dict[str, Any]) -> dict[str, Any]:
    one = {"type": "object", "properties": fields, "required": list(fields)}
    return _media("text/event-stream", one | {"description": "One server-sent event."})


def _get(summary: str, answer: type[BaseModel], errors: Iterable[int]) -> dict[str, Any]:
    return {"get": _operation(summary, _media("application/json", _ref(answer)), errors)}


def _operation(
    summary: str,
    content: dict[str, Any],
    errors: Iterable[int],
    error: type[BaseModel] = response_models.ErrorResponse,
) -> dict[str, Any]:
    failures = {str(status): _response(_ERRORS[status], error) for status in errors}
    return {"summary": summary, "responses": {"200": {"description": "The answer.", "content": content}, **failures}}


def _operation_of(item: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = item.get("post") or item["get"]
    return operation


def _response(description: str, answer: type[BaseModel]) -> dict[str, Any]:
    return {"description": description, "content": _media("application/json", _ref(answer))}


def _media(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {name: {"schema": schema}}


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
