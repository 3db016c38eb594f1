"""Process of one peer: a messenger, a region of slots with one key each, and a digest check at every notification.

It prints its address and keys as a line of JSON, then replies to each command (a JSON list) with a line. The commands
are methods of SoakPeer. On SIGUSR1 it writes the stacks of its threads to stderr.
"""

import dataclasses
import faulthandler
import hashlib
import json
import random
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from messenger import Messenger, MessengerConfig, RemoteKey, SharedMemory
from settings.keys import assemble
from tools.soak.rails import break_rail
from tools.soak.watch import usage

SLOT = struct.Struct("<I")


def digest(data: Any) -> bytes:
    """Return a 16-byte digest."""
    return hashlib.blake2b(data, digest_size=16).digest()


def configured(settings: dict[str, Any]) -> MessengerConfig:
    """Build the configuration from JSON values, in which paths are strings."""
    paths = ("shm_dir", "tls_cert", "tls_key", "tls_ca")
    typed: dict[str, Any] = {name: Path(value) if name in paths else value for name, value in settings.items()}
    return assemble(MessengerConfig, **typed)


class SoakPeer:
    def __init__(self, config: MessengerConfig, node_id: str, incarnation: int, slots: int, slot_nbytes: int) -> None:
        self._slot_nbytes = slot_nbytes
        self._memory = SharedMemory.create(slots * slot_nbytes, node_id)
        self._messenger = Messenger(config, node_id=node_id, incarnation=incarnation)
        self._messenger.on_notify(self._check)
        self.endpoint = self._messenger.start()
        self._region = self._messenger.register(self._memory)
        self.keys = [self._grant(slot) for slot in range(slots)]
        self._told = 0
        self._wrong: list[str] = []

    def renew(self, slot: int, value: int | None) -> str:
        """Revoke the slot's key, fill the slot if a value is given, and return a new key in hex."""
        self._messenger.revoke(self.keys[slot])
        if value is not None:
            start = slot * self._slot_nbytes
            self._memory.array[start : start + self._slot_nbytes] = value
        self.keys[slot] = self._grant(slot)
        return self.keys[slot].pack().hex()

    def digest(self, slot: int) -> str:
        """Return the digest of the slot's bytes, in hex."""
        return digest(self._slot(slot)).hex()

    def break_rail(self, seed: int) -> bool:
        """Break a rail of one of the peer's RDMA connections; return False if there is none."""
        return break_rail(self._messenger, random.Random(seed))

    def report(self) -> dict[str, Any]:
        """Return resource usage, open objects, the number of notifications, and the errors found."""
        opened = {name: value for name, value in self._messenger.counters().items() if name.endswith("_open")}
        return {"usage": usage(), "open": opened, "told": self._told, "wrong": self._wrong}

    def close(self) -> None:
        self._messenger.close()
        self._memory.close()

    def _grant(self, slot: int) -> RemoteKey:
        start = slot * self._slot_nbytes
        return self._messenger.grant(self._region, start, self._slot_nbytes, read=True, write=True)

    def _slot(self, slot: int) -> Any:
        return self._memory.array[slot * self._slot_nbytes : (slot + 1) * self._slot_nbytes]

    def _check(self, node_id: str, tag: bytes, payload: bytes) -> None:
        """Check that the slot named by a notification has the content whose digest the notification carries."""
        (slot,) = SLOT.unpack(tag)
        self._told += 1
        if digest(self._slot(slot)) != payload:
            self._wrong.append(f"slot {slot} lacks data that {node_id} wrote before notification {self._told}")


def main(settings: str) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    given = json.loads(settings)
    peer = SoakPeer(
        configured(given["messenger"]), given["node_id"], given["incarnation"], given["slots"], given["slot_nbytes"]
    )
    commands: dict[str, Callable[..., Any]] = {
        "renew": peer.renew,
        "digest": peer.digest,
        "report": peer.report,
        "break_rail": peer.break_rail,
    }
    keys = [key.pack().hex() for key in peer.keys]
    print(json.dumps({"endpoint": dataclasses.asdict(peer.endpoint), "keys": keys}), flush=True)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(commands[verb](*arguments)), flush=True)
    peer.close()


if __name__ == "__main__":
    main(sys.argv[1])
