"""All errors of this package.

FrontendError
├── FrontendConfigError     invalid value of FrontendConfig
├── KeysFileError           the file of API keys cannot be read or is invalid
├── ModelFilesError         the model folder lacks a usable tokenizer, configuration or chat template
├── HttpPortInUse           the HTTP address is in use (also rpc's AddressInUse)
├── WorkerLost              a worker's token stream could not be opened, or ended
├── ClientGone              the HTTP client closed its connection
└── ApiError                sent to the client as OpenAI's error object
    ├── InvalidRequest      400
    │   └── ContextLengthExceeded
    ├── Unauthorized        401
    ├── Forbidden           403
    ├── ModelNotServed      404
    ├── NoSuchNode          404
    ├── NoSuchPath          404
    │   └── EndpointNotServed
    ├── MethodNotAllowed    405
    ├── BodyTimeout         408
    ├── Conflict            409
    ├── BodyTooLarge        413
    ├── Overloaded          429, with Retry-After
    ├── QuotaExceeded       429, with Retry-After and x-ratelimit-*
    ├── GenerationFailed    500
    │   └── ClientTooSlow
    ├── ServiceUnavailable  503, with Retry-After
    └── RequestDeadline     504
"""

import math
from typing import Any, ClassVar, Final

from rpc.errors import AddressInUse


class FrontendError(Exception):
    """Base class of the package's errors."""


class FrontendConfigError(FrontendError, ValueError):
    """Invalid configuration value; the message names the field."""


class KeysFileError(FrontendError):
    """The file of API keys cannot be read or is invalid. The message names the entry and the field, never a value."""


class ModelFilesError(FrontendError):
    """The model folder lacks a file that the frontend needs, or that file is invalid."""


class HttpPortInUse(FrontendError, AddressInUse):
    """The HTTP address is already in use."""


class WorkerLost(FrontendError):
    """A worker's token stream could not be opened, or ended."""


class ClientGone(FrontendError):
    """The HTTP client closed its connection."""


_MOST_MESSAGE_CHARS: Final = 2000
_MOST_PARAM_CHARS: Final = 200


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


class ApiError(FrontendError):
    """Error that is sent to the client. `param` names the invalid field; `code` identifies the error for programs.

    Long messages and names of fields are cut, since they may contain what the client has sent.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.message = _shortened(message, _MOST_MESSAGE_CHARS)
        super().__init__(self.message)
        self.param = param and _shortened(param, _MOST_PARAM_CHARS)
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s
        self.request_id = ""  # set once the request has an id in the cluster

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return Retry-After in whole seconds, rounded up, and the request's id, if they are known."""
        headers = dict.fromkeys(("x-request-id", "x-moonpool-request-id"), self.request_id) if self.request_id else {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


class InvalidRequest(ApiError):
    """The request is invalid; repeating it unchanged fails again."""

    status = 400
    kind = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and new tokens together exceed the model's context length."""

    default_code = "context_length_exceeded"


class Unauthorized(ApiError):
    """The API key is missing, unknown or expired."""

    status = 401
    kind = "authentication_error"
    default_code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"www-authenticate": "Bearer"}


class Forbidden(ApiError):
    """The key is valid but lacks the required scope."""

    status = 403
    kind = "permission_error"
    default_code = "admin_only"


class ModelNotServed(ApiError):
    """No model of this name is served here."""

    status = 404
    kind = "invalid_request_error"
    default_code = "model_not_found"


class NoSuchNode(ApiError):
    """No node of this id has joined the cluster."""

    status = 404
    kind = "invalid_request_error"
    default_code = "no_such_node"


class NoSuchPath(ApiError):
    """The path does not exist."""

    status = 404
    kind = "invalid_request_error"


class EndpointNotServed(NoSuchPath):
    """The path is one of OpenAI's or vLLM's that Moonpool does not serve."""

    default_code = "endpoint_not_served"


class MethodNotAllowed(ApiError):
    """The path does not have this method."""

    status = 405
    kind = "invalid_request_error"


class Conflict(ApiError):
    """The action conflicts with the current state, such as a concurrent change or a node that the cluster needs."""

    status = 409
    kind = "invalid_request_error"
    default_code = "conflict"


class BodyTimeout(ApiError):
    """The client did not send the request's body in time."""

    status = 408
    kind = "invalid_request_error"
    default_code = "request_timeout"


class BodyTooLarge(ApiError):
    """The request's body exceeds the limit."""

    status = 413
    kind = "invalid_request_error"
    default_code = "request_too_large"


class Overloaded(ApiError):
    """The cluster cannot meet its objectives for this request now."""

    status = 429
    kind = "rate_limit_error"
    default_code = "overloaded"


class QuotaExceeded(ApiError):
    """The tenant's quota is exhausted; `code` names the limit."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, code: str, retry_after_s: float, quota_headers: dict[str, str]) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
        self._quota_headers = quota_headers

    def headers(self) -> dict[str, str]:
        return super().headers() | self._quota_headers


class GenerationFailed(ApiError):
    """The cluster accepted the request and could not finish it."""

    default_code = "generation_failed"


class ClientTooSlow(GenerationFailed):
    """The client read so slowly that its token buffer overflowed."""

    default_code = "client_too_slow"


class ServiceUnavailable(ApiError):
    """The request cannot be served now: the frontend is draining, or the cluster has no nodes for it."""

    status = 503
    default_code = "service_unavailable"


class RequestDeadline(ApiError):
    """The request did not end within its deadline."""

    status = 504
    kind = "timeout_error"
    default_code = "deadline_exceeded"
