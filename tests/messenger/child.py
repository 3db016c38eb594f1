"""A process with one messenger and one granted region: prints where it listens, then answers commands on stdin.

"notes": the tags it was notified of; "sum": the sum of its region's bytes; "digest": the BLAKE2b of them, in hex;
"call ENDPOINT": notify a peer.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

from messenger import Endpoint, Messenger, MessengerConfig, SharedMemory


def main(
    transport: str, run_dir: str, node_id: str, nbytes: str, incarnation: str, tcp_port: str, listen_host: str
) -> None:
    config = MessengerConfig(
        transport=transport, run_dir=Path(run_dir), tcp_port=int(tcp_port), listen_host=listen_host
    )
    messenger = Messenger(config, node_id=node_id, incarnation=int(incarnation))
    memory = SharedMemory.create(int(nbytes), node_id)
    notes: list[str] = []
    messenger.on_notify(lambda _node, tag, _payload: notes.append(tag.decode()))
    endpoint = messenger.start()
    key = messenger.grant(messenger.register(memory), 0, memory.nbytes, read=True, write=True)
    print(json.dumps({"endpoint": dataclasses.asdict(endpoint), "key": key.pack().hex()}), flush=True)
    for command in sys.stdin:
        verb, _, argument = command.strip().partition(" ")
        answer: object = None
        if verb == "notes":
            answer = notes
        elif verb == "sum":
            answer = int(memory.array.sum())
        elif verb == "digest":
            answer = hashlib.blake2b(memory.array).hexdigest()
        elif verb == "call":
            messenger.connect(Endpoint(**json.loads(argument))).notify(b"hello", b"").result()
        print(json.dumps(answer), flush=True)
    messenger.close()
    memory.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
