"""Join tokens over gRPC: each call shows one, and a server with tokens answers nobody who shows none of its own."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from rpc.join_tokens import JoinTokens

__all__ = ["TokenChannel", "TokensOnly"]

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in its stubs only

_KEY: Final = "authorization"
_SCHEME: Final = "Bearer "
_LOG_EVERY_S: Final = 10.0
_WHAT_TO_DO: Final = "set join_token_file (MOONPOOL_JOIN_TOKEN_FILE) to the cluster's file of tokens"
_NONE_SHOWN: Final = f"this cluster asks its members for a join token, and none was shown: {_WHAT_TO_DO}"
_UNKNOWN: Final = f"the join token that was shown is none of those accepted here: {_WHAT_TO_DO} as it is now"

_log = logging.getLogger(__name__)


class TokensOnly(grpc.aio.ServerInterceptor):
    """Refuses calls without a known token before anything of them is read, whatever method they name."""

    def __init__(self, tokens: JoinTokens) -> None:
        self._tokens = tokens
        self._num_untold = 0
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
        """A handler of streams: else gRPC would read a single message of up to 256 MiB first."""

        async def refuse(requests: Any, context: Any) -> None:
            self._tell(str(context.peer()), reason)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _tell(self, peer: str, reason: str) -> None:
        """A line in ten seconds, however many try."""
        now_s = time.monotonic()
        if now_s < self._next_line_s:
            self._num_untold += 1
            return
        more = f"; {self._num_untold} more since the last such line" if self._num_untold else ""
        self._num_untold, self._next_line_s = 0, now_s + _LOG_EVERY_S
        _log.warning("refused a call from %s: %s%s", peer, reason, more)


class TokenChannel(grpc.aio.Channel):
    """`channel`, each of whose calls shows the token that is the newest when it begins."""

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
