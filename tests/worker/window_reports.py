"""Check of what workers report of their own memory of models with windows: it is what they would share."""

import asyncio
from typing import Any

from conductor.directory import Directory, WindowedBlocks
from kvpool import keys_from_bytes, keys_u64
from tests.worker.node_pair import Pair


async def assert_reports_tell_what_is_usable(pair: Pair, prompt: Any) -> None:
    """Assert that a directory of the reports finds what the workers' slots would share, whatever prompt comes next."""
    prompts = [prompt(40 + 37 * i, seed=i % 3) for i in range(8)]
    found = list[int]()
    for i, ids in enumerate(prompts):
        await pair.ask(ids, f"request {i}", max_tokens=30)
        await asyncio.sleep(0)  # what the engine's thread has reported
        for node in (pair.prefill.node, pair.decode.node):
            directory, parts, slots = Directory(), node.stored_parts, node.slots.pool
            assert parts.windowed is not None
            assert slots.windows is not None
            for events in node.own_blocks._snapshot():
                directory.apply("node", events)
            windows = WindowedBlocks(parts.windowed.kv_namespace, parts.window_blocks)
            for each in prompts:
                chain = pair.submit(each, "keys").chain
                keys = [chain[at : at + 16] for at in range(0, len(chain), 16)]
                match = directory.match(node.namespace, keys_u64(keys_from_bytes(chain)), windows)
                usable = slots.windows.usable(slots.match(keys))
                assert (match["node"].blocks if match else 0) == usable
                found.append(usable)
    assert 0 in found
    assert max(found) > 20
