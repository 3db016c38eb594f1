"""Who computes which chunk of a prompt that several nodes prefill together (Mooncake's chunked pipeline parallelism).

Every node holds the whole model, so the pipeline runs over chunks and layers: the nodes take chunks in turn, and each
layer of a chunk is computed as soon as that layer of all chunks before it is at the node.
"""

from __future__ import annotations

import itertools

TokenSpan = tuple[int, int]  # prompt tokens [start, end)

MIN_CHUNKS = 2


def assign_chunks(start: int, end: int, *, chunk_tokens: int, block_tokens: int, members: int) -> list[list[TokenSpan]]:
    """Chunks of the prompt's tokens [start, end) for each member, in order; member 0 computes the last one.

    Chunks end on block borders, but for the last, and are at most `chunk_tokens` long, or one block. They are as equal
    as blocks allow, and every member gets as many of them, where the prompt is long enough. Fewer than `MIN_CHUNKS` in
    all: nothing is to be shared. `start` is a block border.
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
