"""Assignment of chunks to the nodes that prefill one prompt together (Mooncake's chunked pipeline parallelism).

Every node holds the whole model, so the pipeline runs over chunks and layers: the nodes take chunks in turn, and a
layer of a chunk is computed as soon as that layer of all preceding chunks is present. Pure.
"""

from __future__ import annotations

import itertools

TokenSpan = tuple[int, int]  # prompt tokens [start, end)

MIN_CHUNKS = 2


def assign_chunks(start: int, end: int, *, chunk_tokens: int, block_tokens: int, members: int) -> list[list[TokenSpan]]:
    """Return the chunks of the prompt tokens [start, end) for each member, in order; member 0 computes the last chunk.

    Chunks end on block borders, except the last one, and have at most `chunk_tokens` tokens, or one block. They are as
    equal as blocks allow, and all members get equally many if the prompt is long enough. With fewer than `MIN_CHUNKS`
    in total there is nothing to share. `start` must be a block border.
    """
    rounds = -(-(end - start) // (max(chunk_tokens, block_tokens) * members))
    most = max(block_tokens, chunk_tokens - chunk_tokens % block_tokens)
    size = min(most, -(-(end - start) // (rounds * members * block_tokens)) * block_tokens)
    borders = [*range(start, end, size), end]
    spans = list(itertools.pairwise(borders))
    found: list[list[TokenSpan]] = [[] for _ in range(members)]
    for i, span in enumerate(spans):
        found[(len(spans) - 1 - i) % members].append(span)
    return found
