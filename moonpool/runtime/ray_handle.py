"""A role's actor, as supervision calls it: Ray's errors become ours. Knows no placement."""

import asyncio
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RayTaskError

from moonpool.runtime.ray_life import ActorAway, ActorLost

_POLL_S = 0.1
_START_S = 120.0


class Handle:
    """An actor's handle, with Ray's errors as ours. It outlives the actor's processes: Ray restarts those."""

    def __init__(self, actor: Any, *, named: bool = False) -> None:
        self._actor = actor
        self._named = named
        self.dead = False

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments, **named)
        except RayActorError as error:
            self.dead = isinstance(error, ActorUnschedulableError)  # of others, Ray brings it back
            kind = ActorLost if self.dead else ActorAway
            raise kind(f"its Ray actor died: {' '.join(str(error).split())}") from error
        except RayTaskError as error:
            raise ActorLost(f"its Ray actor failed: {error.cause!r}") from error
        except RayError as error:
            raise ActorLost(f"Ray failed: {error}") from error

    async def call_back(self, method: str, *arguments: Any, **named: Any) -> Any:
        """As `call`, of an actor that may just be on its way back."""
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    try:
                        return await self.call(method, *arguments, **named)
                    except ActorAway:
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self.dead = self.dead or self._named  # by its name the same is found again, if there is one
            raise ActorLost(f"its Ray actor did not come up within {_START_S:g} s") from None

    async def follow(self, number: int, after: int, wait_s: float) -> tuple[int, list[tuple[str, Any]]]:
        next_one, events = await self.call("follow", number, after, wait_s)
        return next_one, events

    async def signal(self, *, kill: bool) -> None:
        await self.call("signal", kill=kill)

    def kill(self, *, for_good: bool = False) -> None:
        """Blocks while Ray's head is away."""
        ray.kill(self._actor, no_restart=for_good)
