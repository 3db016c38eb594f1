"""Mooncake trace reduced to what a laptop can serve, as a file for third-party tools and one for `moonpool replay`.

A block id must always represent a full block, so prompts are rounded up to full blocks.
"""

from __future__ import annotations

import json
from pathlib import Path

from traces import BLOCK_TOKENS, load_trace, sample_families

FRACTION = 0.1
TOKENS_PER_BLOCK = 8


def write_workload(folder: Path, *, requests: int, speed: float, max_prompt_tokens: int) -> tuple[Path, Path]:
    """Write the first `requests` rows of a sample of the conversation trace whose prompts fit; return (scaled, ours).

    `scaled` has TOKENS_PER_BLOCK tokens per block, and times divided by `speed`. `ours` has the same times and the
    lengths of the trace, for `moonpool replay --tokens-per-block 8`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sampled = sample_families(load_trace("conversation"), FRACTION)
    rows = [row for row in sampled if len(row.hash_ids) * TOKENS_PER_BLOCK <= max_prompt_tokens][:requests]
    begin_ms = rows[0].timestamp_ms
    paths = folder / "scaled.jsonl", folder / "ours.jsonl"
    for path, block_tokens in zip(paths, (TOKENS_PER_BLOCK, BLOCK_TOKENS), strict=True):
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                output = max(2, -(-row.output_length * TOKENS_PER_BLOCK // BLOCK_TOKENS))
                scaled = {
                    "timestamp": round((row.timestamp_ms - begin_ms) / speed),
                    "input_length": len(row.hash_ids) * block_tokens,
                    "output_length": output * block_tokens // TOKENS_PER_BLOCK,
                    "hash_ids": list(row.hash_ids),
                }
                file.write(json.dumps(scaled) + "\n")
    return paths
