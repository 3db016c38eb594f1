"""Where the vm's tools come from. In apt's place is a program that "downloads" what a machine lacks; `dpkg-deb` makes
and unpacks real packages.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.rdma_vm import tools
from tools.rdma_vm.errors import BuildFailed
from tools.rdma_vm.progress import Deadline

PROGRAMS = {"qemu-system-x86": "qemu-system-x86_64", "mmdebstrap": "mmdebstrap"}
Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine(installed=..., apt_gives=...)`: one with these of the packages, whose apt gives those; its cache."""
    bin_, packages = tmp_path / "bin", tmp_path / "packages"
    bin_.mkdir()
    packages.mkdir()
    for package, program in PROGRAMS.items():
        root = tmp_path / package
        (root / "usr/bin").mkdir(parents=True)
        (root / "usr/bin" / program).write_text("#!/bin/sh\n")
        (root / "DEBIAN").mkdir()
        (root / "DEBIAN/control").write_text(
            f"Package: {package}\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: none\n"
        )
        subprocess.run(["dpkg-deb", "-b", root, packages / f"{package}.deb"], check=True, capture_output=True)
    found = tools.find_program
    monkeypatch.setattr(
        tools,
        "find_program",
        lambda name: path if (path := bin_ / name).exists() else None if name in PROGRAMS.values() else found(name),
    )

    def set_up(*, installed: str = "", apt_gives: str) -> Path:
        for package, program in PROGRAMS.items():
            (bin_ / program).unlink(missing_ok=True)
            if package in installed:
                (bin_ / program).write_text("#!/bin/sh\n")
        copies = "".join(f'cp {packages}/{package}.deb "$archives"\n' for package in apt_gives.split())
        (bin_ / "apt-get").write_text(
            f"#!/bin/sh\nfor word; do case $word in *::archives=*) archives=${{word#*=}};; esac; done\n{copies}exit 0\n"
        )
        (bin_ / "apt-get").chmod(0o755)
        (tmp_path / "cache").mkdir(exist_ok=True)
        return tmp_path / "cache"

    return set_up


def test_what_the_machine_lacks_is_fetched(machine: Machine) -> None:
    cache = machine(apt_gives="qemu-system-x86 mmdebstrap")
    found = tools.obtain(cache, Deadline.after(60))
    for program in (found.qemu, found.mmdebstrap):
        assert program.is_file()
        assert program.is_relative_to(cache)


@pytest.mark.parametrize(("installed", "lacking"), [tuple(PROGRAMS), tuple(reversed(PROGRAMS))])
def test_what_the_machine_has_is_used_beside_what_it_lacks(machine: Machine, installed: str, lacking: str) -> None:
    cache = machine(installed=installed, apt_gives=lacking)
    found = tools.obtain(cache, Deadline.after(60))
    assert found.qemu.is_file()
    assert found.mmdebstrap.is_file()
    assert [path.is_relative_to(cache) for path in (found.qemu, found.mmdebstrap)] == [
        package == lacking for package in PROGRAMS
    ]
    assert bool(found.qemu_data) == (lacking == "qemu-system-x86")


def test_what_was_uninstalled_since_is_fetched(machine: Machine) -> None:
    tools.obtain(machine(installed="mmdebstrap", apt_gives="qemu-system-x86"), Deadline.after(60))
    cache = machine(apt_gives="qemu-system-x86 mmdebstrap")
    assert tools.obtain(cache, Deadline.after(60)).mmdebstrap.is_file()


def test_tools_that_apt_does_not_give_are_named(machine: Machine) -> None:
    with pytest.raises(BuildFailed, match="apt considers qemu-system-x86 and mmdebstrap installed"):
        tools.obtain(machine(apt_gives="mmdebstrap"), Deadline.after(60))
