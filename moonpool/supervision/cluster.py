"""One run of a whole cluster: start, announcement, supervision and stop."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moonpool.config import ServeConfig
from moonpool.errors import ConfigError
from moonpool.kernel_compilation import compile_missing
from moonpool.plan import Planner, RolePlan, describe
from moonpool.runtime.choice import ClusterRuntime
from moonpool.scaling.autoscaler import autoscale, parse_bounds
from moonpool.scaling.counts import workers
from moonpool.scaling.scaler import Scaler
from moonpool.supervision.hang_detection import guard
from moonpool.supervision.http_port import local_url, wait_http_ready
from moonpool.supervision.ready_file import READY_NAME, ReadyFile, ReadyModel, ready_nodes
from moonpool.supervision.service import SupervisorService
from moonpool.supervision.supervisor import Supervisor
from moonpool.supervision.terminal import TerminalView
from moonpool.supervision.threads import usable_cores

_STOP_GRACE_S = 0.2
_STANDBYS_AFTER_S = 2.0


class ClusterRun(TerminalView):
    """One run of `serve`: handles the supervisor's events, and gives it its orders."""

    def __init__(
        self, config: ServeConfig, run_dir: Path, listener: socket.socket | None, runtime: ClusterRuntime
    ) -> None:
        """`listener`: socket of the HTTP port; None without frontends."""
        super().__init__(sys.stderr, verbose=config.supervisor.verbose)
        self._config = config
        self._run_dir = run_dir
        self._joins = bool(config.runtime.join)
        self._listener = listener
        port = 0 if listener is None else int(listener.getsockname()[1])
        self._url = "" if self._joins else local_url(config.http.host, port, config.http.scheme)
        planner = Planner(config, run_dir=run_dir, port=port, cores=usable_cores(), conductor=runtime.conductor)
        plans = planner.cluster(runtime.found)
        self._standbys = planner.standbys()
        self._conductors = {plan.node_id: plan.target for plan in plans if plan.role == "conductor"}
        self._conductors |= {f"joined {target}": target for target in config.runtime.join}
        self._conductor = planner.conductor_targets[0]
        self._supervisor = Supervisor(plans, runtime=runtime, log_dir=run_dir, events=self)
        if runtime.outlives:
            self._supervisor.let_go()
        if config.supervisor.autoscale and config.policy.role_switching == "act":
            raise ConfigError("--autoscale and --role-switching act conflict, since both react to demand: omit one")
        self._groups = planner.groups
        self._bounds = parse_bounds(config.supervisor.autoscale, planner.groups)
        self._surplus = {  # workers that an earlier `serve` left running
            group: count
            for group, count in planner.initial_counts().items()
            if group not in self._bounds
            and sum(node_id.rpartition("-")[0] == group for node_id in runtime.found) > count
        }
        runtime.bind(lambda index: self._supervisor.add(planner.pool(index)))
        self._scaler = Scaler(
            self._supervisor, planner, conductor=self._conductor, startup_s=config.supervisor.startup_timeout_s
        )
        self._ready_paths = [run_dir / READY_NAME]
        if config.supervisor.ready_file is not None:
            self._ready_paths.append(config.supervisor.ready_file.absolute())
        self._up = False

    async def run(self) -> None:
        """Start all processes, announce the cluster, wait for a signal or a failure, and stop all."""
        self._remove_ready_files()
        stop = asyncio.Event()
        started_s = time.monotonic()
        with _signals(stop, self._supervisor):
            await _unless(stop, compile_missing(self.show))
            self.show(f"Starting {describe(self._config)}; logs in {self._run_dir}")
            try:
                async with self._supervisor:
                    try:
                        await _unless(stop, self._come_up())
                        if not stop.is_set():
                            self._announce(time.monotonic() - started_s)
                            await _unless(stop, self._stay_up())
                    finally:
                        self.show("Stopping")
                        self.stopping()
                        if self._listener is not None:  # the port is free once the frontends have ended
                            self._listener.close()
            finally:
                self._remove_ready_files()

    def on_change(self) -> None:
        """Update the ready files after restarts."""
        if self._up:
            try:
                self._write_ready_files()
            except OSError as error:
                self.show(f"cannot write the ready file: {error}")

    async def _come_up(self) -> None:
        """Wait until every process is ready and the API server has workers."""
        timeout_s = self._config.supervisor.startup_timeout_s
        deadline_s = time.monotonic() + timeout_s
        await self._supervisor.wait_ready(timeout_s)
        if self._joins:  # the joined cluster looks after its own processes
            return
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await self._supervisor.unless_failed(wait_http_ready(self._url))
        except TimeoutError:
            raise self._supervisor.startup_failure(
                "frontend", f"does not report a working cluster: {self._url}/ready is not 200 after {timeout_s:g} s"
            ) from None

    async def _stay_up(self) -> None:
        """Supervise the cluster and serve requests to change it. Raises RoleFailed when a process is given up."""
        timeout_s = self._config.supervisor.hang_timeout_s
        guarding = asyncio.create_task(
            guard(self._supervisor, conductors=self._conductors, url=self._url, timeout_s=timeout_s)
        )
        service = SupervisorService(self._scaler, self._supervisor)
        server = await service.serve(self._run_dir)
        if self._surplus:
            service.scale(self._surplus, force=True)
        scaling = asyncio.create_task(self._follow_demand(service))
        standing_by = asyncio.create_task(self._start_standbys())
        try:
            await self._supervisor.wait_failed()
        finally:
            for task in (guarding, scaling, standing_by):
                task.cancel()
            await asyncio.gather(guarding, scaling, standing_by, return_exceptions=True)
            await service.close()
            await server.stop(_STOP_GRACE_S)

    async def _start_standbys(self) -> None:
        """Start the frontends that stand by, late, so that they delay neither the start nor the first requests.

        If they cannot start, the cluster continues without them.
        """
        await asyncio.sleep(_STANDBYS_AFTER_S)
        for plan in self._standbys:
            self._supervisor.add(plan, on_trial=True)

    async def _follow_demand(self, service: SupervisorService) -> None:
        if self._bounds:
            await autoscale(
                self._bounds,
                self._groups,
                conductors=list(self._conductors.values()),
                present=lambda: {
                    group: len(node_ids)
                    for group, node_ids in workers(self._supervisor.states(), self._supervisor.plans()).items()
                },
                scale=service.scale,
                say=self.show,
            )

    def _announce(self, seconds: float) -> None:
        self._up = True
        self.started()
        self._write_ready_files()
        where = f"in the cluster of {self._conductor}" if self._joins else f"{self._url}/v1"
        print(f"Moonpool is ready: {where}  {_named(self._config)}  ({describe(self._config)})", flush=True)
        self.show(f"Ready after {seconds:.1f} s. Ctrl-C ends it.")

    def _write_ready_files(self) -> None:
        served = self._config.served
        ready = ReadyFile(
            url=self._url,
            model=served[0].name,
            supervisor_pid=os.getpid(),
            run_dir=str(self._run_dir),
            conductor=self._conductor,
            nodes=ready_nodes(self._supervisor.states(), self._supervisor.plans()),
            models=[ReadyModel(entry.name, list(entry.aliases), str(entry.path)) for entry in served],
        )
        for path in self._ready_paths:
            ready.write(path)

    def _remove_ready_files(self) -> None:
        self._up = False
        for path in self._ready_paths:
            path.unlink(missing_ok=True)


def _named(config: ServeConfig) -> str:
    names = [entry.name for entry in config.served]
    return ("model " if len(names) == 1 else "models ") + ", ".join(names)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until `stop` is set."""
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not working.done():
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return
    await working


@contextmanager
def _signals(stop: asyncio.Event, supervisor: Supervisor[RolePlan]) -> Iterator[None]:
    """Install handlers: the first signal requests a clean stop, the second one kills."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            supervisor.hurry()
        stop.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup has it ignored
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
