"""A pool node as a process: `python pool_process.py NODE_ID LISTEN RUN_DIR [SSD_DIR SSD_BYTES]` prints its target."""

import asyncio
import sys
from pathlib import Path

from kvpool import PoolNodeConfig
from kvpool.server import serve_pool_node
from messenger import MessengerConfig
from rpc.control import run
from settings.keys import assemble

if __name__ == "__main__":
    node_id, listen, run_dir, *ssd = sys.argv[1:]
    config = assemble(
        PoolNodeConfig,
        node_id=node_id,
        listen=listen,
        pool_bytes=1 << 20,
        pool_ssd_dir=Path(ssd[0]) if ssd else None,
        pool_ssd_bytes=int(ssd[1]) if ssd else None,
        heartbeat_s=0.1,
        messenger=assemble(MessengerConfig, shm_dir=Path(run_dir)),
    )
    stop = asyncio.Event()
    run(serve_pool_node(config, stop, lambda target: print(target, flush=True)), stop=stop)
