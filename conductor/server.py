"""The conductor's process: puts service, policy and pool side together and runs them until told to stop."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.policy.events import Tick
from conductor.pools import Pools
from conductor.registry import Registry
from conductor.service import ConductorService
from messenger.control import start_server
from moonpool_proto.v1.conductor_pb2_grpc import add_ConductorServicer_to_server

__all__ = ["ConductorConfig", "serve_conductor"]

log = logging.getLogger(__name__)
_STOP_GRACE_S = 0.2


async def serve_conductor(config: ConductorConfig, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """Serve until `stop`; `on_ready(target)` is called once nodes can join.

    Nothing is kept over a restart: workers join again and say what they hold, pool nodes send their directories.
    Raises messenger's AddressInUse or BindFailed.
    """
    incarnation = secrets.randbits(63)
    core = Core(config)
    pools = Pools(core, incarnation, config.copy_timeout_s)
    service = ConductorService(core, Registry(), pools, incarnation)
    try:
        server = await start_server(config.listen, lambda s: add_ConductorServicer_to_server(service, s))
        ticking = asyncio.create_task(_tick(core, config.tick_s), name="conductor tick")
        try:
            pools.following.open()
            log.info("conductor listens at %s", server.target)
            on_ready(server.target)
            await stop.wait()
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await server.stop(_STOP_GRACE_S)
    finally:
        await pools.close()
        core.close()


async def _tick(core: Core, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        for decision in core.handle(Tick()):
            log.warning("released: %s", decision)
        core.flush()
