"""A process with one messenger and one granted region: tells where it listens, then answers commands.

Each line is a verb and its argument, if it has one; each answer is a line of JSON. The verbs are the methods of Child.
Lines come by stdin and stdout, or by a socket where a process that has the messenger imported already forks this one.
"""

import dataclasses
import hashlib
import json
import os
import signal
import socket
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO

from messenger import Endpoint, Messenger, MessengerConfig, RemoteKey, SharedMemory
from settings.keys import assemble


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

    def kill(self) -> None:
        """End this process without a word."""
        os.kill(os.getpid(), signal.SIGKILL)

    def notes(self) -> list[str]:
        """The tags it was notified of."""
        return self.tags

    def sum(self) -> int:
        """Return the digest of its region's bytes."""
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


def serve(sock: socket.socket, *arguments: str) -> None:
    """All lines by a socket."""
    with sock, sock.makefile("r") as commands, sock.makefile("w") as answers:
        main(commands, answers, *arguments)


def main(
    commands: TextIO,
    answers: TextIO,
    transport: str,
    run_dir: str,
    node_id: str,
    nbytes: str,
    incarnation: str,
    data_port: str,
    data_host: str,
    handshake_timeout_s: str,
) -> None:
    def say(something: Any) -> None:
        print(json.dumps(something), file=answers, flush=True)

    config = assemble(
        MessengerConfig,
        transport=transport,
        shm_dir=Path(run_dir),
        data_port=int(data_port),
        data_host=data_host,
        handshake_timeout_s=float(handshake_timeout_s),
    )
    child = Child(config, node_id, int(nbytes), int(incarnation))
    say({"endpoint": dataclasses.asdict(child.endpoint), "key": child.key.pack().hex()})
    for command in commands:
        verb, _, argument = command.strip().partition(" ")
        say(getattr(child, verb)(*[argument] if argument else []))
    child.messenger.close()
    child.memory.close()


if __name__ == "__main__":
    main(sys.stdin, sys.stdout, *sys.argv[1:])
elif __name__ == "forked":
    serve(*globals()["FORKED_WITH"])
