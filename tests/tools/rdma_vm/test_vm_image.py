"""The cache: built once, by one, whole or not at all. In mmdebstrap's and mke2fs' places are programs that write a few
bytes, or do what a test is about; folders, locks and processes are real.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools.rdma_vm import image
from tools.rdma_vm.errors import BuildFailed, NoSpace, VmDeadlineExceeded
from tools.rdma_vm.progress import Deadline

ROOT_FILESYSTEM = """
my $root = "$ENV{TMPDIR}/root";
system("mkdir -p $root/boot && cd $root/boot && echo kernel >vmlinux && echo initramfs >initramfs") == 0 or die;
system("tar -cf $ARGV[-1] -C $root .") == 0 or die;
"""
COUNTED = 'open(my $log, ">>", "$ENV{BUILD_LOG}"); print $log "built\\n"; close $log;\n'

MakeTools = Callable[[str], Path]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def set_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTools:
    """`set_tools(perl)`: puts tools on PATH, of which mmdebstrap runs a Perl program; the log of its starts."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    log.touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("BUILD_LOG", str(log))

    def set_tools(mmdebstrap: str) -> Path:
        programs = {
            "qemu-system-x86_64": "exit 1",
            "mke2fs": 'for word; do disk=$last; last=$word; done; echo disk >"$disk"',
        }
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "mmdebstrap").write_text(f"#!/usr/bin/perl\n{COUNTED}{mmdebstrap}")
        for path in folder.iterdir():
            path.chmod(0o755)
        return log

    return set_tools


def _left_in(cache: Path) -> Sequence[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != "lock")


def _processes_about(cache: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if os.fsencode(cache) in path.read_bytes() else []
    return found


def _wait_until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_an_image_is_built_once_and_found_again(set_tools: MakeTools, cache: Path) -> None:
    log = set_tools(ROOT_FILESYSTEM)
    built, _ = image.provide(cache, Deadline.after(60))
    again, _ = image.provide(cache, Deadline.after(60))
    assert built == again
    assert [path.read_text() for path in (built.root, built.kernel, built.initramfs)] == [
        "disk\n",
        "kernel\n",
        "initramfs\n",
    ]
    assert log.read_text() == "built\n"
    assert len(_left_in(cache)) == 1


def test_of_two_that_need_an_image_one_builds_it(set_tools: MakeTools, cache: Path) -> None:
    log = set_tools("sleep 1;\n" + ROOT_FILESYSTEM)
    found: list[image.Image] = []
    threads = [
        threading.Thread(target=lambda: found.append(image.provide(cache, Deadline.after(60))[0])) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert log.read_text() == "built\n"


def test_a_build_that_fails_says_what_was_said_and_leaves_nothing(set_tools: MakeTools, cache: Path) -> None:
    set_tools('print STDERR "E: cannot reach the mirror\\n"; exit 25;')
    with pytest.raises(BuildFailed, match="cannot reach the mirror"):
        image.provide(cache, Deadline.after(60))
    assert _left_in(cache) == []


def test_a_build_has_to_keep_the_deadline_and_ends_with_it(set_tools: MakeTools, cache: Path) -> None:
    set_tools("sleep 600;")
    with pytest.raises(VmDeadlineExceeded, match="root filesystem"):
        image.provide(cache, Deadline.after(1))
    _wait_until(lambda: not _processes_about(cache))
    assert _left_in(cache) == []


def test_a_build_that_was_killed_is_cleared_away_by_the_next(set_tools: MakeTools, cache: Path) -> None:
    log = set_tools("sleep 600;")
    program = (
        "import sys; from pathlib import Path\n"
        "from tools.rdma_vm import image; from tools.rdma_vm.progress import Deadline\n"
        "image.provide(Path(sys.argv[1]), Deadline.after(600))\n"
    )
    builder = subprocess.Popen([sys.executable, "-c", program, cache], cwd=Path(image.__file__).parents[2])
    _wait_until(log.read_text)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    _wait_until(lambda: not _processes_about(cache))
    assert _left_in(cache)[0].startswith("build-")
    set_tools(ROOT_FILESYSTEM)
    image.provide(cache, Deadline.after(60))
    assert [name.split("-")[0] for name in _left_in(cache)] == ["image"]


def test_old_images_make_room(set_tools: MakeTools, cache: Path) -> None:
    set_tools(ROOT_FILESYSTEM)
    for age in range(4):
        (cache / f"image-old{age}").mkdir(parents=True)
        os.utime(cache / f"image-old{age}", (1e9 - age, 1e9 - age))
    built, _ = image.provide(cache, Deadline.after(60))
    assert _left_in(cache) == sorted([built.root.parent.name, "image-old0"])


def test_a_full_disk_is_told_before_anything_is_built(
    set_tools: MakeTools, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = set_tools(ROOT_FILESYSTEM)
    monkeypatch.setattr(image, "_NEEDED_BYTES", 1 << 60)
    with pytest.raises(NoSpace, match="RDMA_VM_CACHE"):
        image.provide(cache, Deadline.after(60))
    assert log.read_text() == ""
