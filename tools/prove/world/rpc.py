"""The simulated `grpc` and `grpc.aio`: the real modules, but for servers and channels, over the simulated network.

`rpc_client` and `rpc_server` describe what they do; there is no TLS, and there are no Unix sockets. Serializers are
called, and their bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import grpc as real
import grpc.aio

from tools.prove.world.rpc_client import Channel
from tools.prove.world.rpc_server import SimServer

_ESCAPES = ("insecure_channel", "secure_channel", "server")  # would use real threads and sockets


def _insecure_channel(
    target: str, options: Iterable[tuple[str, Any]] | None = None, compression: Any = None, interceptors: Any = None
) -> Channel:
    return Channel(target, options or ())


def _server(
    migration_thread_pool: Any = None,
    handlers: Sequence[Any] | None = None,
    interceptors: Sequence[Any] | None = None,
    options: Iterable[tuple[str, Any]] | None = None,
    maximum_concurrent_rpcs: int | None = None,
    compression: Any = None,
) -> SimServer:
    return SimServer(handlers or (), interceptors or (), options or ())


def _module(original: ModuleType, **replaced: Any) -> ModuleType:
    module = ModuleType(original.__name__, original.__doc__)
    module.__dict__.update({name: value for name, value in vars(original).items() if name not in _ESCAPES})
    module.__dict__.update(replaced)
    return module


aio = _module(real.aio, insecure_channel=_insecure_channel, server=_server)
grpc = _module(real, aio=aio)

REPLACED = {"grpc": grpc, "grpc.aio": aio}
"""For `imports.install`."""
