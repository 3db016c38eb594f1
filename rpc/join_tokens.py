"""Join tokens, by which the cluster's processes authenticate each other, and their use on gRPC calls.

A file holds one token per line; empty lines and lines beginning with # are ignored. It is read again when it changes. A
process sends the first token and accepts all of them, so that a new token can be distributed everywhere before any
process sends it. No error or log line contains a token.
"""

import hashlib
import hmac
import logging
import os
import stat
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from rpc.errors import InvalidArgument

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


FEWEST_CHARS: Final = 16
MOST_CHARS: Final = 512
LOOK_EVERY_S: Final = 1.0
_MOST_NBYTES: Final = 64 << 10

_log = logging.getLogger(__name__)


class JoinTokens:
    """Tokens of the file at `path`, as last read successfully. Raises InvalidArgument if the file is unusable."""

    def __init__(self, path: Path, look_every_s: float = LOOK_EVERY_S) -> None:
        self.path = path
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._content = _read(path)
        self._tokens = _parse(path, self._content)
        self._hashes = [_hash(token) for token in self._tokens]
        self._trouble = ""
        self._next_look_s = time.monotonic() + look_every_s

    def newest(self) -> str:
        """Token to send with a call that begins now."""
        with self._lock:
            self._check_file()
            return self._tokens[0]

    def knows(self, token: str) -> bool:
        """Return True if the token is valid; takes constant time."""
        shown = _hash(token)
        with self._lock:
            self._check_file()
            found = False
            for known in self._hashes:
                found |= hmac.compare_digest(shown, known)
            return found

    def _check_file(self) -> None:
        """Check the file for changes, at a limited rate: there may be thousands of calls per second."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self._look_every_s
        try:
            content = _read(self.path)
            tokens = self._tokens if content == self._content else _parse(self.path, content)
        except InvalidArgument as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.error("keeping the previous join tokens: %s", error)
            return
        self._trouble = ""
        if tokens is not self._tokens:
            self._content, self._tokens = content, tokens
            self._hashes = [_hash(token) for token in tokens]
            _log.info("accepting %d join tokens from %s", len(tokens), self.path)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_NBYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"cannot read join_token_file {path}: {error.strerror}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise InvalidArgument(f"join_token_file {path} must not be accessible to other users: run chmod 600 {path}")
    if len(content) > _MOST_NBYTES:
        raise InvalidArgument(f"join_token_file {path} must have one token per line and at most {_MOST_NBYTES} bytes")
    return content


def _parse(path: Path, content: bytes) -> list[str]:
    tokens = []
    for number, raw in enumerate(content.split(b"\n"), 1):
        line = raw.strip()
        if not line or line.startswith(b"#"):
            continue
        is_plain = all(0x21 <= byte <= 0x7E for byte in line)
        if not is_plain or not FEWEST_CHARS <= len(line) <= MOST_CHARS:
            raise InvalidArgument(
                f"join_token_file {path}, line {number} must be one token of {FEWEST_CHARS} to {MOST_CHARS} ASCII "
                "characters without spaces (create one with openssl rand -hex 32)"
            )
        tokens.append(line.decode("ascii"))
    if not tokens:
        raise InvalidArgument(
            f"join_token_file {path} must contain one token per line: create one with openssl rand -hex 32"
        )
    return tokens


_KEY: Final = "authorization"
_SCHEME: Final = "Bearer "
_LOG_EVERY_S: Final = 10.0
_WHAT_TO_DO: Final = "set join_token_file (MOONPOOL_JOIN_TOKEN_FILE) to the cluster's token file"
_NONE_SHOWN: Final = f"this cluster requires a join token, and the call has none: {_WHAT_TO_DO}"
_UNKNOWN: Final = f"the join token of the call is not accepted here: {_WHAT_TO_DO} in its current form"


class TokensOnly(grpc.aio.ServerInterceptor):
    """Interceptor that rejects calls without a valid token before reading them, whatever their method."""

    def __init__(self, tokens: JoinTokens) -> None:
        self._tokens = tokens
        self._num_unlogged = 0
        self._next_line_s = 0.0

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        metadata: Any = handler_call_details.invocation_metadata
        shown = [value for key, value in metadata or () if key == _KEY]
        if len(shown) == 1 and isinstance(shown[0], str) and shown[0].startswith(_SCHEME):
            if self._tokens.knows(shown[0].removeprefix(_SCHEME)):
                return await continuation(handler_call_details)
            return self._refusing(_UNKNOWN)
        return self._refusing(_NONE_SHOWN)

    def _refusing(self, reason: str) -> "Handler":
        """Return a streaming handler that rejects the call; with a unary one gRPC would first read up to 256 MiB."""

        async def refuse(requests: Any, context: Any) -> None:
            self._log_rejection(str(context.peer()), reason)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log_rejection(self, peer: str, reason: str) -> None:
        """Log a rejection, at most once in ten seconds."""
        now_s = time.monotonic()
        if now_s < self._next_line_s:
            self._num_unlogged += 1
            return
        more = f"; {self._num_unlogged} more since the last such line" if self._num_unlogged else ""
        self._num_unlogged, self._next_line_s = 0, now_s + _LOG_EVERY_S
        _log.warning("refused a call from %s: %s%s", peer, reason, more)


class TokenChannel(grpc.aio.Channel):
    """Channel wrapper that adds the newest token to each call."""

    def __init__(self, channel: grpc.aio.Channel, tokens: JoinTokens) -> None:
        self._channel = channel
        self._tokens = tokens

    def unary_unary(self, *method: Any, **how: Any) -> Any:
        return self._showing(self._channel.unary_unary(*method, **how))

    def unary_stream(self, *method: Any, **how: Any) -> Any:
        return self._showing(self._channel.unary_stream(*method, **how))

    def stream_unary(self, *method: Any, **how: Any) -> Any:
        return self._showing(self._channel.stream_unary(*method, **how))

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        return self._showing(self._channel.stream_stream(*method, **how))

    def _showing(self, method: Any) -> Callable[..., Any]:
        def begin(*request: Any, metadata: Any = None, **how: Any) -> Any:
            shown = (_KEY, _SCHEME + self._tokens.newest())
            return method(*request, metadata=(*(metadata or ()), shown), **how)

        return begin

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> "TokenChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
