"""Which turns of a chat go when it outgrows the context, so that what follows can go on reusing the rest. Pure.

Every turn sends the whole history again, and nobody remembers what was dropped before. So the decisions of all turns
are made again from the first one on, in the same order and from the same sizes: they come out the same. As each drops
down to a fraction of the context, the beginning stays as it is for many turns, and its KV is found.
"""

from collections.abc import Sequence
from itertools import accumulate


def head_length(roles: Sequence[str]) -> int:
    """Messages that are never dropped: the system's at the beginning."""
    return next((at for at, role in enumerate(roles) if role not in ("system", "developer")), len(roles))


def first_kept(roles: Sequence[str], sizes: Sequence[int], *, fixed: int, budget: int, target: int) -> int:
    """Index of the first message behind the head that is kept.

    `sizes` are in tokens per message, the head's not looked at; `fixed` is what every prompt has beside them.
    Whenever a prompt (that of the last message, and those whose answers are in the chat) exceeds `budget`, whole turns
    go, the oldest first, until it is within `target`. Its own turn stays. A turn begins with a message of the user.
    """
    head = head_length(roles)
    before = [0, *accumulate(sizes)]
    turns = [head, *(at for at in range(head + 1, len(roles)) if roles[at] == "user" != roles[at - 1])]
    kept = 0  # index into turns
    for end in range(head + 1, len(roles) + 1):
        if end < len(roles) and roles[end] != "assistant":
            continue  # nothing was asked here
        if fixed + before[end] - before[turns[kept]] <= budget:
            continue
        while kept + 1 < len(turns) and turns[kept + 1] < end and fixed + before[end] - before[turns[kept]] > target:
            kept += 1
    return turns[kept]
