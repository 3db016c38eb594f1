"""No folder that another local user prepared, or could replace, is used. Two real users where the tests run as root."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpc.private_folder import UnsafePath, check_private, create_private, open_private, open_trusted

ROOT = Path(__file__).parents[2]
VICTIM, NEIGHBOUR = 23001, 23002
AsUser = Callable[[int, str], str]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder such as /tmp: everybody's, with the sticky bit."""
    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


@pytest.fixture
def as_user(temporary: Path) -> AsUser:
    """Run code as a user, with `temporary` as the folder of temporary files; return its output or its last line."""
    if os.geteuid() != 0:
        pytest.skip("two users are needed, so the test must run as root")
    # The interpreter and its packages may lie where only root can read: modules are imported before the change of user.
    preamble = (
        "import glob, os, pathlib, sys; from moonpool.supervision.run_dir import *; from moonpool.runtime.processes "
        "import child_plan; from moonpool.cluster_view.locate import api_url, locate\n"
        "import encodings.idna; os.setgroups([]); os.setgid(uid := int(sys.argv[1])); os.setuid(uid)\n"
    )

    def run(uid: int, code: str) -> str:
        environ = {
            "TMPDIR": str(temporary),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ["PYTHONPATH"],
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [sys.executable, "-P", "-c", preamble + code, str(uid)],
            capture_output=True, text=True, timeout=60, check=False, env=environ, cwd="/",
        )  # fmt: skip
        return (done.stdout + (done.stderr.strip().splitlines() or [""])[-1]).strip()

    return run


MAKE = "path = make_run_dir(default_run_dir('8000')); print('made', oct(path.stat().st_mode & 0o777))"


def test_a_run_directory_in_a_shared_folder_is_its_users_alone(as_user: AsUser) -> None:
    assert as_user(VICTIM, MAKE) == "made 0o700"
    assert as_user(VICTIM, MAKE) == "made 0o700"  # and the next time
    assert "Permission" in as_user(NEIGHBOUR, f"print(os.listdir(f'{{os.environ[\"TMPDIR\"]}}/moonpool-{VICTIM}'))")


@pytest.mark.parametrize(
    ("trap", "said"),
    [
        (f"os.mkdir('moonpool-{VICTIM}'); os.chmod('moonpool-{VICTIM}', 0o777)", f"belongs to user {NEIGHBOUR}"),
        (f"os.symlink('prepared', 'moonpool-{VICTIM}')", f"is a symbolic link of user {NEIGHBOUR}"),
        (f"os.symlink('/home', 'moonpool-{VICTIM}')", f"is a symbolic link of user {NEIGHBOUR}"),
    ],
    ids=["folder", "dangling link", "link"],
)
def test_what_another_user_prepared_is_refused_by_name(trap: str, said: str, as_user: AsUser) -> None:
    assert as_user(NEIGHBOUR, f"os.chdir(os.environ['TMPDIR']); {trap}; print('done')") == "done"
    shown = as_user(VICTIM, MAKE)
    assert shown.startswith("moonpool.errors.RunDirInUse: the run directory")
    assert said in shown
    assert "another" in shown
    for look in ("api_url('')", "locate()"):
        assert said in as_user(VICTIM, look)


def test_a_link_to_another_folder_of_the_victim_is_refused(as_user: AsUser, temporary: Path) -> None:
    made = as_user(VICTIM, f"os.makedirs('{temporary}/home/.ssh', 0o700); print('made')")
    assert made == "made"
    trap = f"os.symlink('{temporary}/home', '{temporary}/moonpool-{VICTIM}'); print('done')"
    assert as_user(NEIGHBOUR, trap) == "done"
    assert f"symbolic link of user {NEIGHBOUR}" in as_user(VICTIM, MAKE)
    assert as_user(VICTIM, f"print(os.listdir('{temporary}/home'))") == "['.ssh']"


def test_settings_are_written_into_a_private_folder_only(as_user: AsUser, temporary: Path) -> None:
    as_user(NEIGHBOUR, f"os.mkdir('{temporary}/run', 0o777); os.chmod('{temporary}/run', 0o777)")
    write = f"child_plan('frontend-0', 'frontend', {{'api_key': ['SECRET']}}, {{}}, pathlib.Path('{temporary}/run'))"
    assert f"belongs to user {NEIGHBOUR}" in as_user(VICTIM, write)
    assert list((temporary / "run").iterdir()) == []


def test_a_file_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    (tmp_path / "settings.yaml").symlink_to(kept)
    before = os.umask(0)
    try:
        os.close(create_private(tmp_path / "settings.yaml"))
    finally:
        os.umask(before)
    status = (tmp_path / "settings.yaml").lstat()
    assert (stat.S_ISREG(status.st_mode), stat.S_IMODE(status.st_mode)) == (True, 0o600)
    assert kept.read_text() == "kept"


def test_a_folder_that_others_can_enter_is_refused_and_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(UnsafePath, match=f"mode 0755.*`chmod 700 {folder}`"):
        open_private(folder)
    os.close(open_trusted(folder))
    folder.chmod(0o777)
    with pytest.raises(UnsafePath, match="every user can replace what is inside"):
        open_trusted(folder)
    with pytest.raises(UnsafePath, match="every user can replace what is inside"):
        open_private(folder / "own", create=True)
    assert not (folder / "own").exists()


def test_the_volume_of_a_pod_may_be_everybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("the volume must belong to root, so the test must run as root")
    tmp_path.chmod(0o777)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    os.close(open_private(tmp_path / "moonpool", create=True))


def test_own_links_on_the_way_are_followed_but_the_folder_itself_is_none(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("disk")
    os.close(open_private(tmp_path / "link" / "run", create=True))
    assert (tmp_path / "disk" / "run").is_dir()
    with pytest.raises(UnsafePath, match="is a symbolic link: remove it"):
        open_private(tmp_path / "link")
    with pytest.raises(UnsafePath, match="is a symbolic link"):
        check_private((tmp_path / "link").lstat(), tmp_path / "link")
    (tmp_path / "ring").symlink_to("ring")
    with pytest.raises(OSError, match="Too many levels"):
        open_trusted(tmp_path / "ring")
