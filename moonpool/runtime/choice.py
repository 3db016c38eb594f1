"""Which runtime a cluster runs in, from its configuration; opened and closed here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from moonpool.config import ServeConfig
from moonpool.plan import RolePlan
from moonpool.runtime.interface import Runtime
from moonpool.runtime.processes import Processes


class ClusterRuntime(Runtime[RolePlan], Protocol):
    """A runtime of whole clusters."""

    @property
    def conductor(self) -> str:
        """The conductor's address where nodes lie on several hosts; empty on one machine."""
        ...

    @property
    def found(self) -> tuple[str, ...]:
        """Node ids of workers that run already, and are taken over."""
        ...

    @property
    def outlives(self) -> bool:
        """Whether nodes are to go on when `serve` ends."""
        ...

    def bind(self, add_pool: Callable[[int], None]) -> None:
        """Called once, before the first launch: `add_pool(index)` has the pool node of a further host started."""


@contextmanager
def chosen_runtime(config: ServeConfig, run_dir: Path) -> Iterator[ClusterRuntime]:
    """Raises RayUnusable. What the runtime itself started is ended on exit."""
    if not config.runtime.is_ray:
        yield Processes(run_dir)
        return
    from moonpool.runtime.ray_session import ray_session

    with ray_session(config, run_dir) as runtime:
        yield runtime
