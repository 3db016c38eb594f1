"""A process with one messenger and one granted region: prints where it listens, then answers commands on stdin.

"notes": the tags it was notified of; "sum": the sum of its region's bytes; "lost": the peers it lost.
"""

import dataclasses
import json
import sys
from pathlib import Path

from messenger import Messenger, MessengerConfig, SharedMemory


def main(transport: str, run_dir: str, node_id: str, nbytes: str, incarnation: str, tcp_port: str) -> None:
    config = MessengerConfig(transport=transport, run_dir=Path(run_dir), tcp_port=int(tcp_port))
    messenger = Messenger(config, node_id=node_id, incarnation=int(incarnation))
    memory = SharedMemory.create(int(nbytes), node_id)
    notes: list[str] = []
    lost: list[str] = []
    messenger.on_notify(lambda _node, tag, _payload: notes.append(tag.decode()))
    messenger.on_peer_lost(lambda node, _incarnation: lost.append(node))
    endpoint = messenger.start()
    key = messenger.grant(messenger.register(memory), 0, memory.nbytes, read=True, write=True)
    print(json.dumps({"endpoint": dataclasses.asdict(endpoint), "key": key.pack().hex()}), flush=True)
    for command in sys.stdin:
        answers = {"notes": notes, "lost": lost, "sum": int(memory.array.sum())}
        print(json.dumps(answers[command.strip()]), flush=True)
    messenger.close()
    memory.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
