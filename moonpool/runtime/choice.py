"""Choice of a cluster's runtime by its configuration."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from moonpool.config import ServeConfig
from moonpool.plan import RolePlan
from moonpool.runtime.interface import Runtime
from moonpool.runtime.processes import Processes


class ClusterRuntime(Runtime[RolePlan], Protocol):
    """Runtime of a whole cluster."""

    @property
    def conductor(self) -> str:
        """The conductor's address if nodes run on several hosts; empty on one machine."""
        ...

    @property
    def found(self) -> tuple[str, ...]:
        """Node ids of running workers that are adopted."""
        ...

    @property
    def outlives(self) -> bool:
        """True if nodes keep running when `serve` ends."""
        ...

    def bind(self, add_pool: Callable[[int], None]) -> None:
        """Set the function that starts the pool node of another host; called once, before the first launch."""


@contextmanager
def chosen_runtime(config: ServeConfig, run_dir: Path, listener: socket.socket | None) -> Iterator[ClusterRuntime]:
    """Yield the configured runtime; processes that it started are stopped on exit. Raises RayUnusable.

    `listener`: socket of the HTTP port, which frontends inherit.
    """
    if not config.runtime.is_ray:
        yield Processes(run_dir, listener)
        return
    from moonpool.runtime.ray_session import ray_session

    with ray_session(config, run_dir, listener) as runtime:
        yield runtime
