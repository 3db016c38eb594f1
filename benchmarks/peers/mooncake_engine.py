"""Contender of benchmarks/messenger.py: Mooncake's Transfer Engine over tcp.

Settings: peer-to-peer handshake, registered memory, connection pool, and a queue for as many slices as will be in
flight. Its asynchronous calls have no notifications, so none are measured.
"""

import os
import sys

import numpy as np
from contest import REGION_NBYTES, Contender, Owner, Rows, Start, Wait, random_bytes, ready, serve

os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "8192")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.engine import TransferEngine


def engine_with(memory: np.ndarray) -> TransferEngine:
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("Mooncake's Transfer Engine could not be initialised")
    if engine.register_memory(memory.ctypes.data, memory.nbytes):
        raise SystemExit("Mooncake's Transfer Engine did not register the memory")
    return engine


class MooncakeEngine(Contender):
    def __init__(self) -> None:
        self._owner = Owner(__file__)
        self.local = np.empty(REGION_NBYTES, np.uint8)
        random_bytes(self.local)
        self._engine = engine_with(self.local)

    def prepare(self, rows: Rows, *, write: bool) -> Start:
        engine, host, address = self._engine, self._owner.told["host"], self._owner.told["address"]
        here = [self.local.ctypes.data + local for local, _, _ in rows]
        there = [address + remote for _, remote, _ in rows]
        lengths = [nbytes for _, _, nbytes in rows]
        begin = engine.batch_transfer_async_write if write else engine.batch_transfer_async_read

        def start() -> Wait:
            number = begin(host, here, there, lengths)
            if number <= 0:
                raise ConnectionError("Mooncake's Transfer Engine rejected a batch")

            def wait() -> None:
                if engine.get_batch_transfer_status([number]):
                    raise ConnectionError("Mooncake's Transfer Engine failed a batch")

            return wait

        return start

    def close(self) -> None:
        self._owner.close()


def own() -> None:
    memory = np.empty(REGION_NBYTES, np.uint8)
    random_bytes(memory)
    engine = engine_with(memory)
    ready({"host": f"127.0.0.1:{engine.get_rpc_port()}", "address": memory.ctypes.data})
    sys.stdin.read()


if __name__ == "__main__":
    own() if sys.argv[1:] == ["owner"] else serve(MooncakeEngine())
