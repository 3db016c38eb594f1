"""Contender of benchmarks/messenger.py: the messenger. Usage: messenger_peer.py tcp|shm RUN_DIR [HOW].

A write is complete when its bytes have landed. HOW is one of

- notified: every write has a notification, and is complete when the owner's handler has returned.
- digests: like prefill nodes, the writer computes a batch's layer digests, those of a large batch while it is on its
  way, and sends them in a notification. The owner compares them with those that its messenger computed: with one batch
  in flight before the handler returns; with several on a separate thread, like decode nodes, and the turn lasts until
  all are compared. Digests of reads are computed in advance, as in a pool, and compared after the read.
- encrypted: mutual TLS.
- borrow: a read lends the owner's bytes in place: nothing is copied, and the loan is confirmed.
"""

import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contest import REGION_NBYTES, Contender, Owner, Rows, Start, Wait, random_bytes, ready, serve
from numpy.typing import NDArray

from messenger import Endpoint, Messenger, MessengerConfig, Region, RemoteKey, SharedMemory, UnitSection
from moonpool.transfer_bench.plan import BatchShape
from moonpool.transfer_bench.server import LAYER_NBYTES, SliceDigests
from settings.keys import assemble

CERTIFICATES = Path(__file__).resolve().parents[2] / "tests" / "data" / "tls"
SLICE_NBYTES = 16 << 10
PLAIN, AT_ONCE, LATER, DRAIN = b"plain", b"at once", b"later", b"drain"


def started(role: str, transport: str, run_dir: str, how: str = "") -> tuple[Messenger, SharedMemory, Region]:
    folder = Path(run_dir)
    keys = encryption(folder) if how == "encrypted" else {}
    config = assemble(MessengerConfig, shm_dir=folder, transport=transport, **keys)
    messenger = Messenger(config, node_id=f"{role}-{folder.name}", incarnation=1)
    memory = SharedMemory.create(REGION_NBYTES, role, "auto")
    memory.try_commit(0, REGION_NBYTES)
    random_bytes(memory.array)
    return messenger, memory, messenger.register(memory)


def encryption(folder: Path) -> dict[str, Any]:
    """Return TLS settings with the tests' certificates and a private copy of the key."""
    key = folder / f"{os.getpid()}.key"
    key.touch(0o600)
    key.write_bytes((CERTIFICATES / "node.key").read_bytes())
    return {"tls_cert": CERTIFICATES / "node.pem", "tls_key": key, "tls_ca": CERTIFICATES / "ca.pem"}


class Messaging(Contender):
    def __init__(self, *arguments: str) -> None:
        self._owner = Owner(__file__, *arguments)
        self._messenger, memory, self._region = started("caller", *arguments)
        self._messenger.start()
        self.local = memory.array
        self._peer = self._messenger.connect(Endpoint(**self._owner.told["endpoint"]))
        keys = {int(nbytes): RemoteKey.unpack(bytes.fromhex(key)) for nbytes, key in self._owner.told["keys"].items()}
        self._key, self._slices_key = keys[LAYER_NBYTES], keys[SLICE_NBYTES]

    def prepare(self, rows: Rows, *, write: bool) -> Start:
        slices = np.array(rows, np.int64)
        if write:
            return lambda: self._peer.write(self._key, self._region, slices).result
        return lambda: self._peer.read(self._key, self._region, slices).result

    def close(self) -> None:
        self._messenger.close()
        self._owner.close()


class Notified(Messaging):
    def prepare(self, rows: Rows, *, write: bool) -> Start:
        if not write:
            return super().prepare(rows, write=False)
        slices = np.array(rows, np.int64)
        return lambda: self._peer.write_notify(self._key, self._region, slices, PLAIN, b"").result


class WithDigests(Messaging):
    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        self._digests = SliceDigests(self.local)
        self._compared = AT_ONCE
        self.drain = lambda: self._peer.notify(DRAIN, b"").result()

    def prepare(self, rows: Rows, *, write: bool) -> Start:
        slices, shape, base = np.array(rows, np.int64), BatchShape(rows[0][2], len(rows)), rows[0][0]
        return self._writing(slices, shape, base) if write else self._reading(slices, shape, base)

    def _writing(self, slices: NDArray[np.int64], shape: BatchShape, base: int) -> Start:
        key = self._slices_key if shape.slice_nbytes == SLICE_NBYTES else self._key

        def start() -> Wait:
            message = partial(self._digests.message, shape, base)
            return self._peer.write_notify(key, self._region, slices, self._compared, message).result

        return start

    def _reading(self, slices: NDArray[np.int64], shape: BatchShape, base: int) -> Start:
        self._peer.read(self._key, self._region, slices).result()
        message = self._digests.message(shape, base)

        def start() -> Wait:
            future = self._peer.read(self._key, self._region, slices)

            def wait() -> None:
                future.result()
                require(self._digests.agrees(message))

            return wait

        return start

    def turn(self, window: int) -> AbstractContextManager[None]:
        self._compared = AT_ONCE if window == 1 else LATER
        return nullcontext()


class Borrowing(Messaging):
    def prepare(self, rows: Rows, *, write: bool) -> Start:
        if write:
            return super().prepare(rows, write=True)
        ((_, place, nbytes),) = rows

        def start() -> Wait:
            loan = self._peer.borrow(self._key, place, nbytes)
            return lambda: require(loan.confirm())

        return start

    def check(self) -> None:
        self.local[4096:8192] ^= 0xFF
        self.prepare([(4096, 4096, 4096)], write=True)()()
        loan = self._peer.borrow(self._key, 4096, 4096)
        require(np.array_equal(loan.array, self.local[4096:8192]) and loan.confirm())


def require(is_right: bool) -> None:
    """Exit the process, from any thread, if the bytes are wrong."""
    if not is_right:
        print("a batch has wrong bytes", file=sys.stderr, flush=True)
        os._exit(1)


def own(*arguments: str) -> None:
    messenger, memory, _ = started("owner", *arguments)
    # As workers do, with both sizes of layers that batches have.
    regions = {
        nbytes: messenger.register(memory, units=[UnitSection(0, nbytes, REGION_NBYTES // nbytes)])
        if "digests" in arguments
        else messenger.register(memory)
        for nbytes in (LAYER_NBYTES, SLICE_NBYTES)
    }
    keys: dict[int, RemoteKey] = {}

    def find(starts: NDArray[np.int64], nbytes: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        units = regions[nbytes].units
        assert units is not None
        return units.find(starts, keys[nbytes].token)

    digests, verifier = SliceDigests(memory.array, find), ThreadPoolExecutor(1)
    verifying: list[Future[None]] = []

    def compare(message: bytes) -> None:
        require(digests.agrees(message))

    def on_notify(_node: str, tag: bytes, payload: bytes) -> None:
        if tag == AT_ONCE:
            compare(payload)
        elif tag == LATER:
            verifying.append(verifier.submit(compare, payload))
        elif tag == DRAIN:
            for future in verifying:
                future.result()
            verifying.clear()

    messenger.on_notify(on_notify)
    endpoint = messenger.start()
    for nbytes, region in regions.items():
        keys[nbytes] = messenger.grant(region, 0, REGION_NBYTES, read=True, write=True)
    ready({"endpoint": vars(endpoint), "keys": {nbytes: key.pack().hex() for nbytes, key in keys.items()}})
    sys.stdin.read()
    messenger.close()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "owner":
        own(*arguments)
    else:
        kinds = {"notified": Notified, "digests": WithDigests, "borrow": Borrowing}
        serve(kinds.get(arguments[-1], Messaging)(role, *arguments))
