"""Weights that were hashed before are not hashed again, unless anything at all speaks against their entry."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from engine import CheckpointDamaged, digest_cache, load_model
from engine.digest_cache import CheckpointState, DigestCache, default_folder
from engine.model import fingerprint_of
from engine.random_model import RandomModelSpec, write_random_model
from engine.weights import Checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", RandomModelSpec(tied=False))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DigestCache:
    """A cache that trusts files at once, and every file system."""
    monkeypatch.setattr(digest_cache, "LEAST_AGE_S", 0)
    monkeypatch.setattr(digest_cache, "_file_system", lambda path, mounts: "ext4")
    return DigestCache(tmp_path / "digests")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were hashed."""
    names: list[str] = []
    digest = Checkpoint.digest

    def recorded(self: Checkpoint) -> bytes:
        names.extend(self._hashes)
        return digest(self)

    monkeypatch.setattr(Checkpoint, "digest", recorded)
    return names


def entry(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "digests").iterdir()
    return path


def test_a_second_load_hashes_nothing_and_finds_the_same_fingerprint(
    folder: Path, cache: DigestCache, hashed: list[str]
) -> None:
    first, count = load_model(folder, digests=cache), len(hashed)
    assert count > 10
    second = load_model(folder, digests=cache)
    assert len(hashed) == count
    assert second.fingerprint == first.fingerprint == fingerprint_of(folder, cache)
    assert len(hashed) == count
    assert np.array_equal(second.score(np.arange(9, dtype=np.int32)), first.score(np.arange(9, dtype=np.int32)))
    assert fingerprint_of(folder) == first.fingerprint
    assert len(hashed) == 2 * count, "without a cache, everything is hashed"


def rewritten(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].mul_(1.001)
    save_file(tensors, folder / "model.safetensors")


def written_in_place(folder: Path) -> None:
    path = folder / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\x01" * 64)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the change time stays a new one


def replaced(folder: Path) -> None:
    path = folder / "model.safetensors"
    other = shutil.copy2(path, folder / "other")
    with Path(other).open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\x01" * 64)
    shutil.copystat(path, other)
    os.replace(other, path)


@pytest.mark.parametrize("change", [rewritten, written_in_place, replaced])
def test_a_changed_file_is_hashed_again(
    folder: Path, cache: DigestCache, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    before = load_model(folder, digests=cache).fingerprint
    change(folder)
    after = load_model(folder, digests=cache).fingerprint
    assert after != before
    assert after == fingerprint_of(folder)
    entry(tmp_path)  # it has replaced the earlier one


def test_other_tensors_of_the_same_file_have_another_digest(folder: Path, cache: DigestCache) -> None:
    untied = load_model(folder, digests=cache).fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tied = load_model(folder, digests=cache).fingerprint
    assert tied != untied
    assert tied == fingerprint_of(folder)


def damaged(text: str) -> str:
    return text.replace('"digest": "', '"digest": "00', 1)


def of_others(text: str) -> str:
    """An entry with another digest, whose check sum does not fit."""
    read = json.loads(text)
    return json.dumps(read | {"digest": "00" * 32})


@pytest.mark.parametrize("damage", [damaged, of_others, lambda text: "", lambda text: "[]", lambda text: text[:-9]])
def test_a_damaged_entry_is_not_used(
    folder: Path, cache: DigestCache, tmp_path: Path, hashed: list[str], damage: Callable[[str], str]
) -> None:
    before, count = load_model(folder, digests=cache).fingerprint, len(hashed)
    path = entry(tmp_path)
    path.write_text(damage(path.read_text()))
    assert load_model(folder, digests=cache).fingerprint == before
    assert len(hashed) == 2 * count
    assert load_model(folder, digests=cache).fingerprint == before
    assert len(hashed) == 2 * count, "the entry was written anew"


def test_entries_are_private(folder: Path, cache: DigestCache, tmp_path: Path) -> None:
    load_model(folder, digests=cache)
    assert stat.S_IMODE((tmp_path / "digests").stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(tmp_path).stat().st_mode) == 0o600


@pytest.mark.parametrize("loosen", [lambda folder, path: folder.chmod(0o755), lambda folder, path: path.chmod(0o644)])
def test_what_others_can_enter_or_read_is_not_used(
    folder: Path, cache: DigestCache, tmp_path: Path, hashed: list[str], loosen: Callable[[Path, Path], None]
) -> None:
    load_model(folder, digests=cache)
    count = len(hashed)
    loosen(tmp_path / "digests", entry(tmp_path))
    load_model(folder, digests=cache)
    assert len(hashed) == 2 * count


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", ["digests", "entry"])
def test_what_belongs_to_another_user_is_not_used(
    folder: Path, cache: DigestCache, tmp_path: Path, hashed: list[str], part: str
) -> None:
    load_model(folder, digests=cache)
    count = len(hashed)
    os.chown(tmp_path / "digests" if part == "digests" else entry(tmp_path), 12345, -1)
    load_model(folder, digests=cache)
    assert len(hashed) == 2 * count


def test_a_link_in_place_of_an_entry_is_not_followed(
    folder: Path, cache: DigestCache, tmp_path: Path, hashed: list[str]
) -> None:
    load_model(folder, digests=cache)
    count, path = len(hashed), entry(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    load_model(folder, digests=cache)
    assert len(hashed) == 2 * count


def test_a_young_file_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    state = CheckpointState.of([folder / "model.safetensors"], ["a"])
    assert not state.is_trusted
    cache = DigestCache(tmp_path / "digests")
    load_model(folder, digests=cache)
    assert not (tmp_path / "digests").exists()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/m/a/f", "nfs4"), ("/m/ab/f", "ext4"), ("/m/with space/f", "fuse"), ("/x", "ext4"), ("/t/f", "tmpfs")],
)
def test_the_file_system_is_that_of_the_longest_and_latest_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, kind: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "28 27 0:25 / /m/a rw shared:1 master:2 - nfs4 host:/a rw\n"
        "29 27 0:26 / /m/with\\040space rw - fuse x rw\n"
        "30 27 0:27 / /t rw - ext4 /dev/vdb rw\n"
        "31 27 0:28 / /t rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(digest_cache, "_MOUNTS", mounts)
    assert digest_cache._file_system(path, digest_cache._mounts()) == kind


def test_other_file_systems_are_not_trusted(
    folder: Path, cache: DigestCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "_file_system", lambda path, mounts: "nfs4")
    load_model(folder, digests=cache)
    assert not (tmp_path / "digests").exists()


def test_files_that_change_while_they_are_read_are_refused_or_not_kept(
    folder: Path, cache: DigestCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(self: CheckpointState) -> Any:
        (folder / "model.safetensors").touch()
        return changed_file(self)

    changed_file = CheckpointState.changed_file
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointState, "changed_file", touched)
        load_model(folder, digests=cache)
        assert not (tmp_path / "digests").exists()
    load_model(folder, digests=cache)
    monkeypatch.setattr(CheckpointState, "changed_file", touched)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors changed while it was read: start again"):
        load_model(folder, digests=cache)


def test_entries_are_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_folder() == Path("/c/moonpool/digests")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert default_folder() == Path("/h/.cache/moonpool/digests")


def test_a_cache_that_cannot_be_written_is_no_error(folder: Path, cache: DigestCache, tmp_path: Path) -> None:
    (tmp_path / "digests").write_text("a file")
    assert load_model(folder, digests=cache).fingerprint == fingerprint_of(folder)
