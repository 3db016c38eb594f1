"""A model whose KV is exact by itself, served with KV in int8: hand-off, pool and reuse give the reference's tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import load_model


async def test_kv_in_int8_is_handed_over_stored_and_reused(
    start_pair: Callable[..., Any], model_path: Path, prompt: Any, greedy: Any
) -> None:
    int8 = {"kv_dtype": "int8", "kv_int8_group": 8}
    pair = await start_pair(pool=True, prefill_options=int8, **int8)
    reference = load_model(model_path, threads=1, kv_scale_group=8)
    assert pair.prefill.node.model.fingerprint == reference.fingerprint
    for node in (pair.prefill.node, pair.decode.node):
        (group,) = node.memory.spec.groups
        assert (group.dtype, group.scale_group) == ("int8", 8)
        rows = 2 * len(group.layers) * group.kv_heads
        assert group.token_nbytes == rows * (group.head_dim + 2 * group.head_dim // 8)
    ids = prompt(100)
    first = await pair.ask(ids, "r", max_tokens=30)
    assert first.token_ids == greedy(reference, ids, 30)
    pair.forget()  # so that the next turn's KV comes from the pool
    again = [*ids, *first.token_ids, *prompt(9, seed=1)]
    second = await pair.ask(again, "s", max_tokens=30)
    assert second.cached_tokens >= len(ids) + 24
    assert second.token_ids == greedy(reference, again, 30)
