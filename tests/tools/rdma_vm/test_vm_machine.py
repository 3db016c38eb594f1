"""A run, start to end. In QEMU's place is a process that boots at once and runs the job on the host; all the rest is
real, output, statuses, deadlines, and that nothing outlives the run.
"""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.rdma_vm import machine, qemu
from tools.rdma_vm.errors import BootFailed, VmDeadlineExceeded
from tools.rdma_vm.image import Image
from tools.rdma_vm.progress import Deadline
from tools.rdma_vm.tools import Tools

BOOTS = "echo 3.2 >$run/ready"
RUNS = f"{BOOTS}; sh $run/job; echo $? >$run/status"

MakePlan = Callable[..., machine.VmPlan]


@pytest.fixture
def make_plan(tmp_path: Path) -> MakePlan:
    """`make_plan(*jobs, guest=...)`: a guest per job, whose life is the shell script `guest`."""

    def make(*jobs: str, guest: str = RUNS) -> machine.VmPlan:
        program = tmp_path / "qemu"
        find = "for word; do case $word in *mount_tag=run,*) run=${word#*path=}; run=${run%%,*} ;; esac; done"
        program.write_text(f"#!/bin/sh\n{find}\n{guest}\n")
        program.chmod(0o755)
        guests = [qemu.Guest(number, len(jobs), 1, 64, 1) for number in range(len(jobs))]
        tools = Tools(program, (), Path("mmdebstrap"), dict(os.environ))
        return machine.VmPlan(guests, jobs, [], Image.at(tmp_path), tools, tmp_path)

    return make


def _run(plan: machine.VmPlan, timeout_s: float = 60.0) -> tuple[int, str]:
    output = io.BytesIO()
    outcome = machine.run(plan, False, Deadline.after(timeout_s), output)
    return outcome.status, output.getvalue().decode()


def test_the_status_and_the_output_are_the_commands(make_plan: MakePlan) -> None:
    assert _run(make_plan("echo one; echo two >&2; printf three; exit 7", guest=RUNS.replace("job", "job 2>&1"))) == (
        7,
        "one\ntwo\nthree",
    )


def test_a_machine_that_dies_after_its_boot_gives_no_status(
    make_plan: MakePlan, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _ = _run(make_plan("true", guest=f"{BOOTS}; echo 'no memory' >&2; echo panic >$run/console.log; exit 1"))
    assert status == 125
    told = capfd.readouterr().err
    assert "QEMU: no memory" in told
    assert "console: panic" in told


def test_a_machine_that_ends_before_it_is_ready_failed_to_boot(make_plan: MakePlan) -> None:
    with pytest.raises(BootFailed, match="no soft-RoCE"):
        _run(make_plan("true", guest="echo no soft-RoCE >$run/failed"))


def test_a_machine_that_never_gets_ready_failed_to_boot(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_BOOT_LIMIT_S", 0.5)
    with pytest.raises(BootFailed, match=r"within 0\.5 s"):
        _run(make_plan("true", guest="exec sleep 600"))


def test_the_deadline_ends_a_command_that_does_not_end(make_plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(VmDeadlineExceeded, match="within 1 s"):
        _run(make_plan("sleep 600", guest=f"echo $$ >{tmp_path}/pid; {BOOTS}; exec sh $run/job"), timeout_s=1.0)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    assert not list((tmp_path / "runs").iterdir())


def test_two_machines_speak_in_whole_lines_under_their_names(make_plan: MakePlan) -> None:
    status, output = _run(make_plan("echo a; printf b", "echo c"))
    assert status == 0
    assert sorted(output.splitlines()) == ["[first] a", "[first] b", "[second] c"]


def test_when_one_of_two_has_failed_the_other_is_not_waited_for(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_GRACE_S", 0.2)
    assert (
        _run(make_plan("sleep 600", "exit 4", guest=f"{BOOTS}; exec 3>$run/status; sh $run/job; echo $? >&3"))[0] == 4
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_machine_outlives_the_one_who_started_it(make_plan: MakePlan, tmp_path: Path, number: int) -> None:
    make_plan("sleep 600", guest=f"{BOOTS}; echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 600")
    program = (
        "import os, sys; from pathlib import Path; from tools.rdma_vm import machine, qemu\n"
        "from tools.rdma_vm.image import Image; from tools.rdma_vm.progress import Deadline\n"
        "from tools.rdma_vm.tools import Tools\n"
        f"folder = Path({str(tmp_path)!r}); machine.end_on_signals()\n"
        "tools = Tools(folder / 'qemu', (), Path(), dict(os.environ))\n"
        "plan = machine.VmPlan([qemu.Guest(0, 1, 1, 64, 1)], ['true'], [], Image.at(folder), tools, folder)\n"
        "machine.run(plan, False, Deadline.after(600), sys.stdout.buffer)\n"
    )
    runner = subprocess.Popen([sys.executable, "-c", program], cwd=Path(machine.__file__).parents[2])
    pid = tmp_path / "pid"
    _wait_until(pid.exists)
    runner.send_signal(number)
    runner.wait()
    _wait_until(lambda: not _is_alive(int(pid.read_text())))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)
