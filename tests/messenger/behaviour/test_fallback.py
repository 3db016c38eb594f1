"""Transport "auto": a peer of this machine whose unix socket is out of sight is reached by tcp; a dead one is lost."""

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from messenger import PeerUnreachable

NBYTES = 1 << 20

# Messengers and child processes of this file choose for themselves.
pytestmark = pytest.mark.transports("auto")


@pytest.fixture
def hide(tmp_path: Path) -> Callable[[Any], None]:
    """Takes an endpoint's unix socket out of sight, as another file system does; its owner goes on listening."""

    def hide(endpoint: Any) -> None:
        os.rename(endpoint.shm_socket, tmp_path / "elsewhere")

    return hide


def test_a_process_whose_socket_is_in_sight_is_reached_by_shared_memory(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a"), make_child("b")
    assert a.messenger.connect(child.endpoint).write(child.key, a.region, [[0, 0, 10]]).result().transport == "shm"


def test_a_process_whose_socket_is_out_of_sight_is_reached_by_tcp(
    make_node: Any, make_child: Any, hide: Callable[[Any], None]
) -> None:
    a, child = make_node("a"), make_child("b")
    hide(child.endpoint)
    a.array[:10] = 1
    peer = a.messenger.connect(child.endpoint)
    assert peer.transport == "tcp"
    assert peer.write(child.key, a.region, [[0, 0, 10]]).result().transport == "tcp"
    assert child.ask("sum") == 10


def test_a_socket_at_which_nobody_listens_does_not_hide_a_process_that_answers_by_tcp(
    make_node: Any, make_child: Any, hide: Callable[[Any], None]
) -> None:
    a, child = make_node("a"), make_child("b")
    hide(child.endpoint)
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(child.endpoint.shm_socket)
    peer = a.messenger.connect(child.endpoint)
    assert peer.write(child.key, a.region, [[0, 0, 10]]).result().transport == "tcp"
    assert peer.transport == "tcp"


def test_a_connected_peer_whose_folder_vanishes_is_used_on_by_tcp(make_node: Any, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    folder.mkdir()
    a, b = make_node("a", NBYTES), make_node("b", NBYTES, shm_dir=folder)
    key = b.grant()
    a.array[:] = np.arange(NBYTES, dtype=np.uint32).astype(np.uint8)
    peer = a.messenger.connect(b.endpoint)
    assert peer.write(key, a.region, [[0, 0, 100]]).result().transport == "shm"
    assert peer.read(key, a.region, [[0, 0, 100]]).result().transport == "shm"
    shutil.rmtree(folder)
    b.cut_inbound()
    assert peer.write_notify(key, a.region, [[0, 0, NBYTES]], b"whole", b"").result().transport == "tcp"
    assert (b.array == a.array).all()
    b.array[:50] = 7
    assert peer.read(key, a.region, [[0, 0, 50]]).result().transport == "tcp"
    assert (a.array[:50] == 7).all()
    assert b.notes == [("a", b"whole", b"")]
    assert a.lost == []


@pytest.mark.parametrize("seen", [True, False])
def test_a_process_that_is_gone_fails_at_once(
    make_node: Any, make_child: Any, hide: Callable[[Any], None], *, seen: bool
) -> None:
    a, child = make_node("a"), make_child("b")
    peer = a.messenger.connect(child.endpoint)
    peer.write(child.key, a.region, [[0, 0, 10]]).result()
    if not seen:
        hide(child.endpoint)
    child.kill()
    started_s = time.monotonic()
    with pytest.raises(PeerUnreachable, match="nothing listens there"):
        peer.write(child.key, a.region, [[0, 0, 10]], deadline_s=20.0).result()
    assert time.monotonic() - started_s < 2.0
    assert a.lost == [("b", 1)]
