import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonpool.errors import RoleFailed, StartupFailed
from moonpool.supervision.restart import RestartPolicy
from moonpool.supervision.supervisor import NodeState, Supervisor, SupervisorEvents

Plan = Callable[..., Any]
Start = Callable[..., Supervisor[Any]]
FAST = RestartPolicy(first_delay_s=0.01, max_delay_s=0.05, healthy_after_s=60.0, startup_attempts=3)


class Recorder(SupervisorEvents):
    """Keeps what was told, and lets a test wait for it."""

    def __init__(self) -> None:
        self.ready: list[NodeState] = []
        self.exits: list[tuple[str, str, float | None]] = []
        self.lines: list[tuple[str, str]] = []
        self.left: list[NodeState] = []
        self.happened = asyncio.Event()

    def on_ready(self, state: NodeState, seconds: float) -> None:
        self.ready.append(state)
        self.happened.set()

    def on_exit(self, state: NodeState, cause: str, restart_in_s: float | None) -> None:
        self.exits.append((state.node_id, cause, restart_in_s))
        self.happened.set()

    def on_left(self, state: NodeState) -> None:
        self.left.append(state)
        self.happened.set()

    def on_line(self, node_id: str, line: str) -> None:
        self.lines.append((node_id, line))
        self.happened.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.happened.clear()
                await self.happened.wait()


@pytest.fixture
def supervisor(scripts: Any) -> Callable[..., Supervisor[Any]]:
    def make(plans: list[Any], log_dir: Path, recorder: Recorder | None = None) -> Supervisor[Any]:
        return Supervisor(plans, runtime=scripts, log_dir=log_dir, events=recorder, policy=FAST)

    return make


def pids(running: Supervisor[Any]) -> dict[str, int]:
    return {state.node_id: state.pid for state in running.states() if state.pid is not None}


async def test_all_processes_are_ready_and_none_is_left_after_the_block(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    async with supervisor([plan("serve", node_id="a"), plan("serve", node_id="b", tier=1)], tmp_path) as running:
        await running.wait_ready(30)
        started = pids(running)
        assert set(started) == {"a", "b"}
        assert all(psutil.pid_exists(pid) for pid in started.values())
    assert not any(psutil.pid_exists(pid) for pid in started.values())


@pytest.mark.parametrize("mode", ["serve", "parent"])  # whose child holds its pipes open
async def test_a_killed_process_comes_back_under_the_same_node_id(
    mode: str, supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    recorder = Recorder()
    async with supervisor([plan(mode, node_id="a", stop_grace_s=0.2)], tmp_path, recorder) as running:
        await running.wait_ready(30)
        first = pids(running)["a"]
        os.kill(first, signal.SIGKILL)
        await recorder.until(lambda: len(recorder.ready) == 2)
        assert recorder.exits == [("a", "killed by signal 9", pytest.approx(0.01))]
        assert [state.node_id for state in recorder.ready] == ["a", "a"]
        assert pids(running)["a"] != first
        assert running.states()[0].restarts == 1


async def test_a_crash_at_the_first_start_is_tried_again(supervisor: Start, plan: Plan, tmp_path: Path) -> None:
    async with supervisor([plan("once", str(tmp_path / "marker"))], tmp_path) as running:
        await running.wait_ready(30)
        assert running.states()[0].restarts == 1


async def test_a_refused_configuration_fails_the_start_at_once_with_the_last_lines(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    async with supervisor([plan("serve", node_id="good"), plan("refuse", node_id="bad")], tmp_path) as running:
        with pytest.raises(StartupFailed, match="the frobnicator is missing") as failure:
            await running.wait_ready(30)
        good = pids(running).get("good")
    assert failure.value.node_id == "bad"
    assert failure.value.exit_code == 2
    assert failure.value.log_path == str(tmp_path / "bad.log")
    assert "the frobnicator is missing" in (tmp_path / "bad.log").read_text()
    assert good is None or not psutil.pid_exists(good)


async def test_a_process_that_never_becomes_ready_is_given_up_after_the_attempts(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    recorder = Recorder()
    async with supervisor([plan("crash")], tmp_path, recorder) as running:
        with pytest.raises(StartupFailed, match="3 times without becoming ready") as failure:
            await running.wait_ready(30)
    assert failure.value.exit_code == 1
    assert [delay for _, _, delay in recorder.exits] == [pytest.approx(0.01), pytest.approx(0.02), None]


async def test_a_command_that_cannot_be_executed_is_named(supervisor: Start, program: Any, tmp_path: Path) -> None:
    plans = [program("a", (str(tmp_path / "no-such-program"),))]
    async with supervisor(plans, tmp_path) as running:
        with pytest.raises(StartupFailed, match=r"cannot start .*no-such-program"):
            await running.wait_ready(30)


async def test_a_process_that_is_silent_fails_the_start_at_the_deadline(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    async with supervisor([plan("silent")], tmp_path) as running:
        with pytest.raises(StartupFailed, match=r"silent-0 was not ready within 0\.2 s"):
            await running.wait_ready(0.2)


async def test_a_refusal_after_the_start_ends_wait_failed(
    supervisor: Start, program: Any, plan: Plan, tmp_path: Path
) -> None:
    # Ready once, then refused: the marker turns the second start into mode `refuse`.
    script = f"""
import sys, os
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import role_script
marker = {str(tmp_path / "marker")!r}
mode = "refuse" if os.path.exists(marker) else "serve"
open(marker, "w").close()
sys.exit(role_script.main(mode))
"""
    plans = [program("a", (sys.executable, "-c", script))]
    async with supervisor(plans, tmp_path) as running:
        await running.wait_ready(30)
        os.kill(pids(running)["a"], signal.SIGKILL)
        with pytest.raises(RoleFailed, match="rejected its configuration") as failure:
            async with asyncio.timeout(30):
                await running.wait_failed()
        assert failure.value.exit_code == 2


async def test_a_process_deaf_to_sigterm_is_killed_after_the_grace(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    async with supervisor([plan("deaf", stop_grace_s=0.2)], tmp_path) as running:
        await running.wait_ready(30)
        pid = pids(running)["deaf-0"]
    assert not psutil.pid_exists(pid)


async def test_hurry_kills_without_waiting_for_the_grace(supervisor: Start, plan: Plan, tmp_path: Path) -> None:
    async with supervisor([plan("deaf", stop_grace_s=3600.0)], tmp_path) as running:
        await running.wait_ready(30)
        pid = pids(running)["deaf-0"]
        running.hurry()
    assert not psutil.pid_exists(pid)


async def test_what_a_process_started_itself_ends_with_it(
    supervisor: Start, plan: Plan, tmp_path: Path, track: Callable[[int], psutil.Process]
) -> None:
    async with supervisor([plan("parent", stop_grace_s=0.2)], tmp_path) as running:
        await running.wait_ready(30)
        announcement = running.states()[0].announcement
        assert announcement is not None
        grandchild = track(announcement["child"])
    # Killed, it ends when the kernel runs it next, and its adopter reaps it in its own time: dead is enough.
    with contextlib.suppress(psutil.NoSuchProcess):
        async with asyncio.timeout(30):
            while grandchild.is_running() and grandchild.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)


async def test_stopping_while_processes_are_being_started_leaves_none(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    before = set(psutil.Process().children())
    async with supervisor([plan("serve", node_id=f"n{index}") for index in range(3)], tmp_path):
        await asyncio.sleep(0)
    assert set(psutil.Process().children()) <= before


async def test_processes_that_are_let_go_live_on_unless_there_is_hurry(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    running = supervisor([plan("a")], tmp_path)
    async with running:
        await running.wait_ready(30.0)
        (pid,) = pids(running).values()
        running.let_go()
    process = psutil.Process(pid)
    assert process.status() != psutil.STATUS_ZOMBIE
    process.kill()
    hurried = supervisor([plan("a")], tmp_path)
    async with hurried:
        await hurried.wait_ready(30.0)
        (pid,) = pids(hurried).values()
        hurried.let_go()
        hurried.hurry()
    assert not psutil.pid_exists(pid)


async def test_higher_tiers_stop_first(supervisor: Start, program: Any, tmp_path: Path) -> None:
    script = """
import signal, sys, time
from pathlib import Path
def end(*_):
    Path(sys.argv[1]).open("a").write(sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("MOONPOOL_READY {}", flush=True)
while True: time.sleep(60)
"""
    order = tmp_path / "order"
    plans = [
        program(name, (sys.executable, "-c", script, str(order), name), {}, tier, 20.0)
        for name, tier in (("frontend", 2), ("conductor", 0), ("worker", 1))
    ]
    async with supervisor(plans, tmp_path) as running:
        await running.wait_ready(30)
    assert order.read_text().split() == ["frontend", "worker", "conductor"]


async def test_output_is_logged_whole_whatever_the_length_of_its_lines(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    recorder = Recorder()
    async with supervisor([plan("chatty")], tmp_path, recorder) as running:
        await running.wait_ready(30)
        await recorder.until(lambda: any("all is well" in line for _, line in recorder.lines))
        await recorder.until(lambda: sum(line.count("x") for _, line in recorder.lines) == 3 << 20)
    logged = (tmp_path / "chatty-0.log").read_text()
    assert logged.count("x") == 3 << 20
    assert "WARNING chatty-0 test: careful" in logged
    assert "MOONPOOL_READY" not in logged


async def test_the_supervisors_own_settings_do_not_reach_its_children(
    supervisor: Start, program: Any, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_PORT", "1234")
    child = program("a", plan("serve").argv, {"OMP_NUM_THREADS": "1"})
    async with supervisor([child], tmp_path) as running:
        await running.wait_ready(30)
        announcement: dict[str, Any] | None = running.states()[0].announcement
    assert announcement is not None
    assert announcement["environment"]["OMP_NUM_THREADS"] == "1"
    assert set(announcement["environment"]) & {"MOONPOOL_PORT", "MOONPOOL_SUPERVISOR_PID"} == {
        "MOONPOOL_SUPERVISOR_PID"
    }


async def test_a_node_that_says_it_was_drained_is_let_go(
    supervisor: Start, plan: Plan, scripts: Any, tmp_path: Path
) -> None:
    recorder = Recorder()
    plans = [plan("serve", node_id="stays"), plan("drained", node_id="leaves")]
    async with supervisor(plans, tmp_path, recorder) as running:
        await running.wait_ready(30)
        os.kill(pids(running)["leaves"], signal.SIGUSR1)
        await recorder.until(lambda: bool(recorder.left))
        assert [state.node_id for state in recorder.left] == ["leaves"]
        assert [state.node_id for state in running.states()] == ["stays"]
    assert recorder.exits == []
    assert scripts.released == ["leaves"]


async def test_a_clean_end_that_nobody_asked_for_is_followed_by_a_restart(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    recorder = Recorder()
    async with supervisor([plan("serve", node_id="a")], tmp_path, recorder) as running:
        await running.wait_ready(30)
        os.kill(pids(running)["a"], signal.SIGTERM)
        await recorder.until(lambda: len(recorder.ready) == 2)
        assert recorder.exits[0][:2] == ("a", "exit code 0")


async def test_a_node_can_be_added_to_and_removed_from_a_running_cluster(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    async with supervisor([plan("serve", node_id="a")], tmp_path) as running:
        await running.wait_ready(30)
        running.add(plan("serve", node_id="b"))
        await running.wait_node_ready("b", 30)
        added = pids(running)["b"]
        removing = asyncio.create_task(running.remove("b", grace_s=30.0))
        await asyncio.sleep(0)
        running.terminate("b")
        await removing
        assert list(pids(running)) == ["a"]
        assert not psutil.pid_exists(added)


async def test_a_node_that_does_not_leave_within_its_grace_is_killed(
    supervisor: Start, plan: Plan, tmp_path: Path
) -> None:
    async with supervisor([plan("serve", node_id="a"), plan("deaf", node_id="b")], tmp_path) as running:
        await running.wait_ready(30)
        deaf = pids(running)["b"]
        await running.remove("b", grace_s=0.1)
        assert list(pids(running)) == ["a"]
        assert not psutil.pid_exists(deaf)


async def test_an_added_node_that_does_not_come_up_fails_alone(supervisor: Start, plan: Plan, tmp_path: Path) -> None:
    async with supervisor([plan("serve", node_id="a")], tmp_path) as running:
        await running.wait_ready(30)
        running.add(plan("refuse", node_id="b"), on_trial=True)
        with pytest.raises(StartupFailed, match="the frobnicator is missing"):
            await running.wait_node_ready("b", 30)
        await running.remove("b", grace_s=0.0)
        watching = asyncio.create_task(running.wait_failed())
        await asyncio.sleep(0)
        assert list(pids(running)) == ["a"]
        assert not watching.done()
        watching.cancel()


async def test_a_process_that_hangs_is_killed_and_comes_back(supervisor: Start, plan: Plan, tmp_path: Path) -> None:
    recorder = Recorder()
    async with supervisor([plan("serve", node_id="a")], tmp_path, recorder) as running:
        await running.wait_ready(30)
        os.kill(pids(running)["a"], signal.SIGSTOP)
        running.restart("a", "it hung")
        await recorder.until(lambda: len(recorder.ready) == 2)
        assert recorder.exits == [("a", "it hung", pytest.approx(0.01))]


def test_children_die_with_a_supervisor_that_is_killed(track: Callable[[int], psutil.Process]) -> None:
    script = f"""
import asyncio, sys
from moonpool.supervision.child import Child, ChildPlan
async def main():
    plan = ChildPlan("a", (sys.executable, {str(Path(__file__).parents[1] / "role_script.py")!r}, "deaf"))
    ready = asyncio.Event()
    child = await Child.start(plan, None, on_ready=lambda _: ready.set(), on_line=print)
    await ready.wait()
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = track(int(process.stdout.readline()))
        process.kill()
    gone_by = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < gone_by, "the child outlived its supervisor"
