"""The messenger itself, for benchmarks/messenger.py. Usage: messenger_peer.py tcp|shm|encrypted RUN_DIR [digests].

Every write brings a notification, and is over when the owner's handler has returned. With digests, the writer makes a
batch's layer digests and sends them with the notification, and the owner compares them with its own: one batch at a
time, before the handler returns; with several under way, on a thread of its own, as decode nodes do, and the turn lasts
until all are compared. A read's digests were made long before, as in a pool, and are compared after the read.
"""

import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
from contest import REGION_NBYTES, Contender, Owner, Rows, Start, Wait, random_bytes, ready, serve
from numpy.typing import NDArray

from kvpool import KvGroup, KvSpec, layer_digests_at
from messenger import Endpoint, Messenger, MessengerConfig, Region, RemoteKey, SharedMemory

CERTIFICATES = Path(__file__).resolve().parents[2] / "tests" / "data" / "tls"
LAYER_NBYTES = 64 << 10
PLAIN, AT_ONCE, LATER, DRAIN = b"plain", b"at once", b"later", b"drain"
HEADER = np.dtype([("offset", "<i8"), ("nbytes", "<i8")])


class Digests:
    """Layer digests of slices, each a slot whose layers are of 64 KiB, or less if it is smaller."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._specs: dict[int, KvSpec] = {}

    def of(self, offsets: NDArray[np.int64], nbytes: int) -> NDArray[np.uint64]:
        spec = self._specs.get(nbytes)
        if spec is None:
            layer_nbytes = min(LAYER_NBYTES, nbytes)
            group = KvGroup("full", 0, tuple(range(nbytes // layer_nbytes)), kv_heads=1, head_dim=32, dtype="float32")
            spec = self._specs[nbytes] = KvSpec((group,), layer_nbytes // 256)
        valid = np.full(len(offsets), spec.block_tokens, np.int32)
        return layer_digests_at(self._memory, offsets, spec, 0, valid)

    def compare(self, offsets: NDArray[np.int64], nbytes: int, expected: NDArray[np.uint64]) -> None:
        """Ends the process if they differ, on whatever thread."""
        if not np.array_equal(self.of(offsets, nbytes).reshape(-1), expected):
            print("a batch has other digests than its bytes", file=sys.stderr, flush=True)
            os._exit(1)


def started(transport: str, run_dir: str, role: str) -> tuple[Messenger, SharedMemory, Region]:
    by = {"transport": "tcp", **encryption(Path(run_dir))} if transport == "encrypted" else {"transport": transport}
    config = MessengerConfig(run_dir=Path(run_dir), **by)  # type: ignore[arg-type]
    messenger = Messenger(config, node_id=f"{transport}-{role}-{Path(run_dir).name}", incarnation=1)
    memory = SharedMemory.create(REGION_NBYTES, role, "auto")
    random_bytes(memory.array)
    return messenger, memory, messenger.register(memory)


def encryption(folder: Path) -> dict[str, Path]:
    """The tests' certificates, with a key that nobody else can read."""
    key = folder / f"{os.getpid()}.key"
    key.touch(0o600)
    key.write_bytes((CERTIFICATES / "node.key").read_bytes())
    return {"tls_cert": CERTIFICATES / "node.pem", "tls_key": key, "tls_ca": CERTIFICATES / "ca.pem"}


class Messaging(Contender):
    def __init__(self, transport: str, run_dir: str, *, digests: bool) -> None:
        self._owner = Owner(__file__, transport, run_dir)
        self._messenger, memory, self._region = started(transport, run_dir, "caller")
        self._messenger.start()
        self.local = memory.array
        self._peer = self._messenger.connect(Endpoint(**self._owner.told["endpoint"]))
        self._key = RemoteKey.unpack(bytes.fromhex(self._owner.told["key"]))
        self._digests = Digests(self.local) if digests else None
        self._verify = AT_ONCE
        if digests:
            self.drain = self._all_compared

    def prepare(self, rows: Rows, *, write: bool) -> Start:
        slices = np.array(rows, np.int64)
        if self._digests is not None:
            return self._with_digests(self._digests, slices) if write else self._verified(self._digests, slices)
        if write:
            return lambda: self._peer.write_notify(self._key, self._region, slices, PLAIN, b"").result
        return lambda: self._peer.read(self._key, self._region, slices).result

    def _with_digests(self, digests: Digests, slices: NDArray[np.int64]) -> Start:
        local, nbytes = np.ascontiguousarray(slices[:, 0]), int(slices[0, 2])
        stride = int(slices[1, 1] - slices[0, 1]) if len(slices) > 1 else 0
        head = np.array([slices[0, 1], stride, len(slices), nbytes], "<i8").tobytes()

        def start() -> Wait:
            payload = head + digests.of(local, nbytes).tobytes()
            return self._peer.write_notify(self._key, self._region, slices, self._verify, payload).result

        return start

    def _verified(self, digests: Digests, slices: NDArray[np.int64]) -> Start:
        local, nbytes = np.ascontiguousarray(slices[:, 0]), int(slices[0, 2])
        self._peer.read(self._key, self._region, slices).result()
        expected = digests.of(local, nbytes).reshape(-1)

        def start() -> Wait:
            future = self._peer.read(self._key, self._region, slices)

            def wait() -> None:
                future.result()
                digests.compare(local, nbytes, expected)

            return wait

        return start

    def turn(self, window: int) -> AbstractContextManager[None]:
        self._verify = AT_ONCE if window == 1 else LATER
        return nullcontext()

    def _all_compared(self) -> None:
        self._peer.notify(DRAIN, b"").result()

    def close(self) -> None:
        self._messenger.close()
        self._owner.close()


def own(transport: str, run_dir: str) -> None:
    messenger, memory, region = started(transport, run_dir, "owner")
    digests, verifier = Digests(memory.array), ThreadPoolExecutor(1)
    verifying: list[Future[None]] = []

    def compare(payload: bytes) -> None:
        first, stride, slices, nbytes = np.frombuffer(payload, "<i8", 4).tolist()
        offsets = first + stride * np.arange(slices, dtype=np.int64)
        digests.compare(offsets, nbytes, np.frombuffer(payload, "<u8", offset=32))

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
    key = messenger.grant(region, 0, REGION_NBYTES, read=True, write=True)
    ready({"endpoint": vars(endpoint), "key": key.pack().hex()})
    sys.stdin.read()
    messenger.close()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "owner":
        own(*arguments)
    else:
        serve(Messaging(role, arguments[0], digests=arguments[1:] == ["digests"]))
