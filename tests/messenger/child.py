"""A process with one messenger and one granted region: prints where it listens, then answers commands on stdin.

Each line is a verb and its argument, if it has one; each answer is a line of JSON. The verbs are the methods of Child.
"""

import dataclasses
import hashlib
import json
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from messenger import Endpoint, Messenger, MessengerConfig, RemoteKey, SharedMemory


class Child:
    def __init__(self, config: MessengerConfig, node_id: str, nbytes: int, incarnation: int) -> None:
        self.messenger = Messenger(config, node_id=node_id, incarnation=incarnation)
        self.memory = SharedMemory.create(nbytes, node_id)
        self.tags: list[str] = []
        self.messenger.on_notify(lambda _node, tag, _payload: self.tags.append(tag.decode()))
        self.endpoint = self.messenger.start()
        self.region = self.messenger.register(self.memory)
        self.key = self.messenger.grant(self.region, 0, nbytes, read=True, write=True)
        self.poured: list[Future[Any]] = []

    def notes(self) -> list[str]:
        """The tags it was notified of."""
        return self.tags

    def sum(self) -> int:
        """Of its region's bytes."""
        return int(self.memory.array.sum())

    def digest(self) -> str:
        """BLAKE2b of its region."""
        return hashlib.blake2b(self.memory.array).hexdigest()

    def fill(self, value: str) -> None:
        self.memory.array[:] = int(value)

    def revoke(self) -> None:
        """Void the key that it printed."""
        self.messenger.revoke(self.key)

    def call(self, endpoint: str) -> None:
        """Notify a peer."""
        self.messenger.connect(Endpoint(**json.loads(endpoint))).notify(b"hello", b"").result()

    def pour(self, argument: str) -> None:
        """Write all of its region to a peer fifty times, without waiting: "KEY ENDPOINT"."""
        key, _, endpoint = argument.partition(" ")
        peer = self.messenger.connect(Endpoint(**json.loads(endpoint)))
        rows = [[0, 0, self.memory.nbytes]]
        self.poured = [peer.write(RemoteKey.unpack(bytes.fromhex(key)), self.region, rows) for _ in range(50)]

    def outcomes(self) -> list[str]:
        """How what was poured ended: names of errors, or "done"."""
        return [type(error).__name__ if (error := future.exception()) else "done" for future in self.poured]


def main(
    transport: str, run_dir: str, node_id: str, nbytes: str, incarnation: str, tcp_port: str, listen_host: str
) -> None:
    config = MessengerConfig(
        transport=transport, run_dir=Path(run_dir), tcp_port=int(tcp_port), listen_host=listen_host
    )
    child = Child(config, node_id, int(nbytes), int(incarnation))
    print(json.dumps({"endpoint": dataclasses.asdict(child.endpoint), "key": child.key.pack().hex()}), flush=True)
    for command in sys.stdin:
        verb, _, argument = command.strip().partition(" ")
        print(json.dumps(getattr(child, verb)(*[argument] if argument else [])), flush=True)
    child.messenger.close()
    child.memory.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
