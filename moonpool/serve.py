"""`moonpool serve`: checks everything that can be checked, starts the cluster, watches it until it is told to stop."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from moonpool.child import ChildPlan
from moonpool.config import ServeConfig
from moonpool.errors import ConfigError
from moonpool.http_port import claim_port, local_url, wait_http_ready
from moonpool.model_folder import check_model_folder
from moonpool.plan import RolePlan, describe, plan_cluster
from moonpool.ready_file import ReadyFile, ReadyModel, ready_nodes
from moonpool.run_dir import RunDirLock, default_run_dir, make_run_dir
from moonpool.startup_view import TerminalView
from moonpool.supervisor import Supervisor
from moonpool.threads import usable_cores

READY_NAME = "serve.json"


def serve(config: ServeConfig) -> int:
    """Run the cluster until SIGINT or SIGTERM; 0 after a clean stop. Raises MoonpoolError when it cannot run."""
    for entry in config.served:
        check_model_folder(entry.path)
    ready_file = config.supervisor.ready_file
    if ready_file is not None and not ready_file.absolute().parent.is_dir():
        raise ConfigError(f"the ready file's folder {ready_file.absolute().parent} does not exist")
    port = claim_port(config.http.host, config.http.port)
    run_dir = make_run_dir(config.supervisor.run_dir or default_run_dir(str(port)))
    with RunDirLock(run_dir):
        asyncio.run(_Cluster(config, run_dir, port).run())
    return 0


class _Cluster(TerminalView):
    """One run of `serve`: the supervisor's listener, and what it is told to do."""

    def __init__(self, config: ServeConfig, run_dir: Path, port: int) -> None:
        super().__init__(sys.stderr, verbose=config.supervisor.verbose)
        self._config = config
        self._run_dir = run_dir
        self._url = local_url(config.http.host, port)
        self._plans = plan_cluster(config, run_dir=run_dir, port=port, cores=usable_cores())
        self._supervisor = Supervisor([child_plan(plan, run_dir) for plan in self._plans], log_dir=run_dir, events=self)
        self._ready_paths = [run_dir / READY_NAME]
        if config.supervisor.ready_file is not None:
            self._ready_paths.append(config.supervisor.ready_file.absolute())
        self._up = False

    async def run(self) -> None:
        """Start all, announce, wait for a signal or a failure, end all."""
        self._remove_ready_files()
        stop = asyncio.Event()
        started_s = time.monotonic()
        with _signals(stop, self._supervisor):
            self.show(f"Starting {describe(self._config)}; logs in {self._run_dir}")
            try:
                async with self._supervisor:
                    try:
                        await _unless(stop, self._come_up())
                        if not stop.is_set():
                            self._announce(time.monotonic() - started_s)
                            await _unless(stop, self._supervisor.wait_failed())
                    finally:
                        self.show("Stopping")
                        self.stopping()
            finally:
                self._remove_ready_files()

    def on_change(self) -> None:
        """Keep the ready files true over restarts."""
        if self._up:
            try:
                self._write_ready_files()
            except OSError as error:
                self.show(f"cannot write the ready file: {error}")

    async def _come_up(self) -> None:
        """Until every process is ready and the front door has workers behind it."""
        timeout_s = self._config.supervisor.startup_timeout
        deadline_s = time.monotonic() + timeout_s
        await self._supervisor.wait_ready(timeout_s)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await self._supervisor.unless_failed(wait_http_ready(self._url))
        except TimeoutError:
            raise self._supervisor.startup_failure(
                "frontend", f"does not report a working cluster: {self._url}/ready is not 200 after {timeout_s:g} s"
            ) from None

    def _announce(self, seconds: float) -> None:
        self._up = True
        self.started()
        self._write_ready_files()
        print(
            f"Moonpool is ready: {self._url}/v1  {_named(self._config)}  ({describe(self._config)})",
            flush=True,
        )
        self.show(f"Ready after {seconds:.1f} s. Ctrl-C ends it.")

    def _write_ready_files(self) -> None:
        targets = {plan.node_id: plan.target for plan in self._plans}
        served = self._config.served
        ready = ReadyFile(
            url=self._url,
            model=served[0].name,
            supervisor_pid=os.getpid(),
            run_dir=str(self._run_dir),
            conductor=targets["conductor"],
            nodes=ready_nodes(
                self._supervisor.states(), targets, {plan.node_id: plan.model for plan in self._plans}
            ),
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


def child_plan(plan: RolePlan, run_dir: Path) -> ChildPlan:
    """The command that runs a planned role: its settings go into a file, for no key may show in a process list."""
    settings = run_dir / f"{plan.node_id}.yaml"
    settings.touch(mode=0o600)
    settings.chmod(0o600)
    settings.write_text(yaml.safe_dump(plan.settings, sort_keys=False), encoding="utf-8")
    argv = (sys.executable, "-m", "moonpool", plan.command, "--config", str(settings))
    return ChildPlan(plan.node_id, plan.command, argv, plan.env, plan.tier, plan.stop_grace_s)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """`work` to its end, or until `stop` is set."""
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
def _signals(stop: asyncio.Event, supervisor: Supervisor) -> Iterator[None]:
    """The first signal asks for a clean stop, the second kills."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            supervisor.hurry()
        stop.set()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it is to be ignored
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
