"""QEMU's arguments, and the guest's files."""

import subprocess
from pathlib import Path

import pytest

from tools.rdma_vm import qemu
from tools.rdma_vm.image import Image
from tools.rdma_vm.tools import Tools

IMAGE = Image.at(Path("/cache/image"))
TOOLS = Tools(Path("/bin/qemu"), (), Path("/bin/mmdebstrap"), {})


def _arguments(guest: qemu.Guest, *, mounts: tuple[qemu.Mount, ...] = (), wires: tuple[int, ...] = ()) -> list[str]:
    return qemu.arguments(guest, IMAGE, TOOLS, Path("/run"), mounts, wires, False)


def test_the_image_and_the_repository_are_read_only_and_results_are_not() -> None:
    mounts = (qemu.Mount(Path("/a,b"), Path("/a,b")), qemu.Mount(Path("/out"), Path("/results"), writable=True))
    arguments = _arguments(qemu.Guest(0, 1, 2, 512, 1), mounts=mounts)
    (disk,) = [argument for argument in arguments if "root.img" in argument]
    repository, results = [argument for argument in arguments if "mount_tag=mount" in argument]
    assert "readonly=on" in disk
    assert repository.endswith(",readonly=on")
    assert "path=/a,,b," in repository
    assert "readonly" not in results


def test_instructions_are_counted_where_that_is_asked_for() -> None:
    plain, counting = (_arguments(qemu.Guest(0, 1, 2, 512, 1, counts)) for counts in (False, True))
    assert "-icount" not in plain
    assert counting[counting.index("-icount") + 1] == "shift=0,sleep=off"
    assert "thread=multi" not in " ".join(counting)


def test_each_rail_of_two_machines_is_a_wire_with_an_address_of_its_own() -> None:
    first, second = (qemu.Guest(number, 2, 2, 512, 1) for number in range(2))
    cards = [
        argument.split("mac=")[1]
        for guest in (first, second)
        for argument in _arguments(guest, wires=(7, 8))
        if "mac=" in argument
    ]
    assert len(set(cards)) == 4
    assert [part for part in _arguments(first, wires=(7, 8)) if "fd=" in part] == [
        "socket,id=wire0,fd=7",
        "socket,id=wire1,fd=8",
    ]


def test_each_machine_is_told_its_own_rails_and_the_others() -> None:
    first, second = (qemu.Guest(number, 2, 2, 512, 1).environment() for number in range(2))
    assert (first["RDMA_VM_ROLE"], second["RDMA_VM_ROLE"]) == ("first", "second")
    assert first["RDMA_VM_RAILS"] == second["RDMA_VM_PEER_RAILS"] == "rxe0=10.77.0.1,rxe1=10.77.1.1"
    assert second["RDMA_VM_RAILS"] == first["RDMA_VM_PEER_RAILS"] == "rxe0=10.77.0.2,rxe1=10.77.1.2"


def test_one_machine_has_no_peer() -> None:
    assert qemu.Guest(0, 1, 1, 512, 1).environment() == {"RDMA_VM": "1", "RDMA_VM_RAILS": "rxe0=10.77.0.1"}


def test_the_job_runs_the_command_word_by_word_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    command = ["sh", "-c", 'printf "%s|" "$PWD" "$NOTE" "$@"; exit 3', "sh", "a b", "$HOME", "'"]
    script = qemu.job_script(command, folder, {"NOTE": "it's; here"})
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, f"{folder}|it's; here|a b|$HOME|'|")


def test_a_job_whose_folder_is_missing_gives_no_status(tmp_path: Path) -> None:
    script = qemu.job_script(["true"], tmp_path / "missing", {})
    assert subprocess.run(["sh"], input=script, capture_output=True, text=True).returncode == qemu.STATUS_NONE


@pytest.mark.parametrize(
    ("text", "status"), [("0\n", 0), ("1\n", 1), ("255", 255), ("256", 125), ("", 125), ("x", 125)]
)
def test_a_status_is_what_a_process_can_end_with_and_else_none(text: str, status: int) -> None:
    assert qemu.exit_status(text) == status
