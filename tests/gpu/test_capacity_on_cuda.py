"""The KV cache that `capacity_tokens` auto chooses on a GPU fits beside weights and steps, and uses what is free."""

from __future__ import annotations

from pathlib import Path

import torch

from messenger import MessengerConfig
from moonpool_proto.v1.common_pb2 import ROLE_AGGREGATED
from settings.keys import assemble
from worker.config import WorkerConfig
from worker.node import WorkerNode


async def test_the_cache_takes_the_share_of_a_gpu_that_it_may(model_path: Path, tmp_path: Path, cuda: str) -> None:
    free, _ = torch.cuda.mem_get_info(cuda)
    fraction = 256e6 / free
    config = assemble(
        WorkerConfig, device=cuda, threads=1, node_id="w", listen=f"unix:{tmp_path}/w.sock", conductor_targets=(),
        pool_target="", model=model_path, block_tokens=16, capacity_tokens=None, memory_fraction=fraction,
        max_batch=1024, messenger=assemble(MessengerConfig, shm_dir=tmp_path),
    )  # fmt: skip
    node = WorkerNode(config, ROLE_AGGREGATED)
    try:
        assert node.config.capacity_tokens >= node.max_model_len
        assert node.memory.nbytes <= 256e6
        assert node.memory.nbytes > 64e6 or node.config.capacity_tokens == 1024 * node.max_model_len
    finally:
        await node.close()
