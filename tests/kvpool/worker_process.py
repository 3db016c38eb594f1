"""A worker that holds a lease and an unsealed put, to be killed: `python worker_process.py TARGET RUN_DIR`.

Prints a line once it holds both.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from kvpool import KvGroup, KvSpec, PoolClient, chain_keys, chain_seed, kv_namespace, layer_digests, parent_keys
from messenger import Messenger, MessengerConfig, SharedMemory
from settings.keys import assemble

SPEC = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=4, dtype="float32"),), 4)


async def main(target: str, run_dir: str) -> None:
    messenger = Messenger(assemble(MessengerConfig, shm_dir=Path(run_dir)), node_id="doomed", incarnation=5)
    messenger.start()
    memory = SharedMemory.create(1 << 16, "doomed")
    region = messenger.register(memory)
    client = PoolClient(target, owner="doomed", owner_incarnation=5)
    namespace = kv_namespace("weights", SPEC)
    chain = chain_keys(chain_seed("", "t", 4), np.arange(8, dtype=np.int32), 4)
    ticket = await client.allocate(namespace, SPEC, chain[:1], parent_keys(chain[:1]), ttl_s=600)
    assert ticket.key is not None
    nbytes = SPEC.slot_nbytes(0)
    slices = np.array([[0, ticket.offsets[0, 0], nbytes]], dtype=np.int64)
    await asyncio.wrap_future(messenger.connect(ticket.endpoint).write(ticket.key, region, slices))
    full = np.full(1, 4, np.int32)
    await client.seal(ticket, [layer_digests(memory.array[:nbytes].reshape(1, nbytes), SPEC, 0, full)])
    assert await client.pin(namespace, chain[:1], lease_s=600) is not None
    await client.allocate(namespace, SPEC, chain[1:], chain[:1], ttl_s=600)
    print("holds", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
