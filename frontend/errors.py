"""Every error this package raises; nothing else lives here.

FrontendError
├── ConfigError             a value of FrontendConfig that cannot be right
├── KeysFileError           the file of API keys cannot be read, or says what cannot be
├── ModelFolderError        the model folder lacks a usable tokenizer, configuration or chat template
├── PortInUse               somebody already listens at the HTTP address (also messenger's AddressInUse)
├── WorkerLost              a worker's token stream could not be opened, or ended
├── ClientGone              the HTTP client closed its connection
└── ApiError                told to the client in OpenAI's shape
    ├── InvalidRequest      400
    │   └── ContextLengthExceeded
    ├── Unauthorized        401
    ├── Forbidden           403
    ├── ModelNotFound       404
    ├── NoSuchNode          404
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
from typing import Any, ClassVar

from rpc.errors import AddressInUse


class FrontendError(Exception):
    """Root of the package's errors."""


class ConfigError(FrontendError, ValueError):
    """A configuration value that cannot be right; names the field."""


class KeysFileError(FrontendError):
    """The file of API keys cannot be read, or says what cannot be; names the entry and the field, never a value."""


class ModelFolderError(FrontendError):
    """The model folder lacks, or has broken, what the front door needs of it."""


class PortInUse(FrontendError, AddressInUse):
    """Somebody already listens at the HTTP address."""


class WorkerLost(FrontendError):
    """A worker's token stream could not be opened, or ended."""


class ClientGone(FrontendError):
    """The HTTP client closed its connection; there is nobody to tell."""


class ApiError(FrontendError):
    """An error that the client is told. `param` names the field at fault; `code` is for programs."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s
        self.request_id = ""  # in the cluster, once it has one

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, rounded up, and the request's id, where they are known."""
        headers = dict.fromkeys(("x-request-id", "x-moonpool-request-id"), self.request_id) if self.request_id else {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


class InvalidRequest(ApiError):
    """The request cannot be served as it stands; repeating it changes nothing."""

    status = 400
    kind = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and new tokens together exceed what the model can hold."""

    default_code = "context_length_exceeded"


class Unauthorized(ApiError):
    """No API key, or a wrong one."""

    status = 401
    kind = "authentication_error"
    default_code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"www-authenticate": "Bearer"}


class Forbidden(ApiError):
    """The key is known, and may not do this."""

    status = 403
    kind = "permission_error"
    default_code = "admin_only"


class ModelNotFound(ApiError):
    """No model of this name is served here."""

    status = 404
    kind = "invalid_request_error"
    default_code = "model_not_found"


class NoSuchNode(ApiError):
    """No node of this id has joined the cluster."""

    status = 404
    kind = "invalid_request_error"
    default_code = "no_such_node"


class Conflict(ApiError):
    """It cannot be done as things stand: somebody was faster, or the cluster needs what would go."""

    status = 409
    kind = "invalid_request_error"
    default_code = "conflict"


class BodyTimeout(ApiError):
    """The client did not send its request's body in time."""

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
    """The tenant has asked for as much as it may for now; `code` says of what."""

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
    """The client read so slowly that its buffer of tokens was full."""

    default_code = "client_too_slow"


class ServiceUnavailable(ApiError):
    """Nothing can serve the request now: draining, or no nodes."""

    status = 503
    default_code = "service_unavailable"


class RequestDeadline(ApiError):
    """The request did not end within its deadline."""

    status = 504
    kind = "timeout_error"
    default_code = "deadline_exceeded"
