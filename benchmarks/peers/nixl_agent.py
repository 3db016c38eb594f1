"""Contender of benchmarks/messenger.py: NIXL's agent over UCX, with the transport in UCX_TLS.

Usage: nixl_agent.py [notified]; with `notified`, every batch has a notification.

The descriptors of all positions are prepared once; a batch is a prepared transfer that is posted, polled and released.
During a turn, the owner polls for notifications continuously, which also drives UCX (on tcp a write needs both sides).
UCX's progress threads are several times slower on few cores, and would also run during other contenders' turns.
"""

import base64
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from contest import REGION_NBYTES, Contender, Owner, Rows, Start, Wait, random_bytes, ready, serve
from nixl_cu12._api import nixl_agent, nixl_agent_config

POLLS_PER_LOOK = 64


def agent_of(name: str) -> nixl_agent:
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False))


class Nixl(Contender):
    def __init__(self, notification: bytes) -> None:
        self._notification = notification
        self._owner = Owner(__file__)
        self._agent = agent_of("caller")
        self.local = np.empty(REGION_NBYTES, np.uint8)
        random_bytes(self.local)
        self._address = self.local.ctypes.data
        self._agent.register_memory([(self._address, REGION_NBYTES, 0, "")], "DRAM")
        self._remote = self._agent.add_remote_agent(base64.b64decode(self._owner.told["metadata"]))

    def prepare(self, rows: Rows, *, write: bool) -> Start:
        agent = self._agent
        here = [(self._address + local, nbytes, 0) for local, _, nbytes in rows]
        there = [(self._owner.told["address"] + remote, nbytes, 0) for _, remote, nbytes in rows]
        mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")
        theirs = agent.prep_xfer_dlist(self._remote, there, "DRAM")
        indices = np.arange(len(rows), dtype=np.int32)
        operation = "WRITE" if write else "READ"

        def start() -> Wait:
            handle = agent.make_prepped_xfer(operation, mine, indices, theirs, indices, self._notification)
            state = agent.transfer(handle)

            def wait() -> None:
                nonlocal state
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
                if state != "DONE":
                    raise ConnectionError(f"the NIXL transfer ended as {state}")
                agent.release_xfer_handle(handle)

            return wait

        return start

    @contextmanager
    def turn(self, window: int) -> Iterator[None]:
        self._tell("poll")
        yield
        self._tell("rest")

    def _tell(self, line: str) -> None:
        self._owner.tell(line)
        self._owner.hear()

    def close(self) -> None:
        self._owner.close()


def own() -> None:
    agent = agent_of("owner")
    memory = np.empty(REGION_NBYTES, np.uint8)
    random_bytes(memory)
    agent.register_memory([(memory.ctypes.data, REGION_NBYTES, 0, "")], "DRAM")
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    ready({"metadata": metadata, "address": memory.ctypes.data})
    for line in sys.stdin:
        print(line.strip(), flush=True)
        if line.startswith("poll"):
            while not select.select([sys.stdin], [], [], 0)[0]:
                for _ in range(POLLS_PER_LOOK):
                    agent.get_new_notifs()


if __name__ == "__main__":
    own() if sys.argv[1:] == ["owner"] else serve(Nixl(b"batch" if sys.argv[1:] == ["notified"] else b""))
