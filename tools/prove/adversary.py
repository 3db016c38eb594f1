"""A node that joined the messenger's network and forges notifications, which say that pushed blocks have arrived.

It knows the epoch, the blocks, and even the digests of what lies in the slots now. It does not know the token of the
reservation's key, which only the rightful writer has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from messenger.errors import MessengerError
from tools.prove.instances import on_creation, remember, running_process
from tools.prove.world.scheduler import ProcessState, world
from worker.kv_notification import KV_TAG, PushedBlocks, pack_notification
from worker.node import WorkerNode


def watch() -> None:
    """Remember workers. Once per process."""
    on_creation(WorkerNode, lambda node: remember("workers", node))


def forge(victim: ProcessState, sender: ProcessState) -> None:
    """Let the worker `sender` forge a notification for each open reservation of the decode node `victim`."""
    for node in victim.objects.get("workers", []):
        for _, reservation in node.kv_receiver._by_epoch.values():
            if not reservation.fenced and node.memory.windows is None:
                payload = _payload(node, reservation)
                world().spawn(sender, lambda payload=payload, node=node: _send(node.endpoint, payload), "adversary")  # type: ignore[misc]


def _payload(node: Any, reservation: Any) -> bytes:
    blocks = np.arange(reservation.held_blocks, reservation.num_blocks)
    valid, layers = reservation.valid_tokens(blocks), range(len(node.memory.place_of_layer))
    slots = [reservation.slots[block] for block in blocks.tolist()]
    digests = np.stack([node.memory.one_layer_digests(layer, slots, valid) for layer in layers])
    token = world().chance.randrange(2**64)
    return pack_notification(reservation.epoch, token, PushedBlocks(layers, blocks, valid, digests))


def _send(endpoint: Any, payload: bytes) -> None:
    [own] = running_process().objects["workers"]
    try:
        own.messenger.connect(endpoint).notify(KV_TAG, payload).result(5.0)
    except (MessengerError, TimeoutError):
        world().tell(running_process().name, "the forged notification was not delivered")
