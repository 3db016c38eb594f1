"""Simulation of dialogues on servers with bounded memory: routing of each turn, reuse and storage of its KV."""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvpool.policy.eviction import Use, make_policy
from simulator.dialogues import Dialogue, DialogueSettings, Routing, make_dialogues, mean_history
from simulator.pool import SimulatedPool

BlockKey = tuple[int, int, int]
"""(owner, index in the chain, tokens). The owner is the dialogue, or -1 - persona; tokens are 0 for a full block."""


@dataclass(frozen=True, slots=True)
class _Tail:
    key: BlockKey
    place: int
    tokens: int


class SimulatedServer:
    """One server: a pool node's memory and the queue of its workers.

    Turns run one at a time; a turn's blocks are stored as soon as it is placed.
    """

    def __init__(self, settings: DialogueSettings) -> None:
        self.turns = 0
        self.busy_s = 0.0
        self.pool = SimulatedPool(make_policy(settings.policy, settings.capacity), settings.capacity, leaf_first=True)
        self._settings = settings
        self._free_at_s = 0.0
        self._tails: dict[int, _Tail] = {}  # the last partial block stored here, by dialogue

    def queue_s(self, now_s: float) -> float:
        """Return the queueing delay in seconds of a turn that arrives now."""
        return max(0.0, self._free_at_s - now_s)

    def held(self, chain: Sequence[BlockKey]) -> int:
        """Return the number of leading blocks held, by binary search: no block is held without its predecessors."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self.pool.present:
                low = middle + 1
            else:
                high = middle
        return low

    def reuse(self, dialogue: int, chain: Sequence[BlockKey], use: Use) -> int:
        """Mark the held blocks of a prompt with full blocks `chain` as used. Return the prompt tokens reused."""
        found = self.pool.look_up(chain, use)
        tail = self._tails.get(dialogue)
        if tail is not None and tail.place == found and tail.key in self.pool.present:
            self.pool.use(self.pool.present[tail.key], use)
            return found * self._settings.block_tokens + tail.tokens
        return found * self._settings.block_tokens

    def keep(self, dialogue: int, chain: Sequence[BlockKey], tail_tokens: int, use: Use) -> None:
        """Store prompt and answer: full blocks `chain` and a partial block, replacing the dialogue's earlier one."""
        old = self._tails.pop(dialogue, None)
        if old is not None:
            self.pool.remove(old.key)
        start = self.held(chain)
        if tail_tokens and self._settings.tails:
            key = (dialogue, len(chain), tail_tokens)
            self._tails[dialogue] = _Tail(key, len(chain), tail_tokens)
            self.pool.store([*chain, key], start, use, tail_tokens)
        else:
            self.pool.store(chain, start, use)

    def work(self, now_s: float, prefill_tokens: int, decode_tokens: int) -> float:
        """Enqueue a turn and return the completion time of its answer in seconds."""
        work_s = (
            prefill_tokens / self._settings.prefill_tokens_per_s + decode_tokens / self._settings.decode_tokens_per_s
        )
        self._free_at_s = now_s + self.queue_s(now_s) + work_s
        self.busy_s += work_s
        self.turns += 1
        return self._free_at_s


_PROGRESS_EVERY = 2_000


@dataclass(frozen=True, slots=True)
class DialogueRun:
    """Result of one run; tokens and blocks are totals over all servers and turns."""

    routing: str
    policy: str
    tails: bool
    dialogues: int
    turns: int
    mean_history_messages: float
    prompt_tokens: int
    reused_tokens: int
    reused: float
    """Reused tokens over prompt tokens."""
    reused_limit: float
    """The same with unlimited memory, where only each turn's new tokens are computed."""
    moved_turns: int
    """Turns served by a different server than the dialogue's previous turn."""
    evicted_blocks: int
    blocks_held: int
    """Total capacity of all servers in blocks."""
    blocks_made: int
    """Full blocks of all dialogues at their ends, each counted once."""
    turns_per_server: tuple[int, ...]
    busy_balance: float
    """Busy time of the busiest server over the mean."""
    mean_wait_s: float
    simulated_hours: float
    seconds: float


class _Talk:
    """State of one dialogue."""

    def __init__(self, dialogue: Dialogue, block_tokens: int) -> None:
        self.dialogue = dialogue
        self.tokens = dialogue.persona_tokens
        self.server: SimulatedServer | None = None
        self.shared_blocks = dialogue.persona_tokens // block_tokens
        self._chain: list[BlockKey] = []
        self._block_tokens = block_tokens

    def full_blocks(self) -> list[BlockKey]:
        """Return the keys of the full blocks so far; those within the persona are shared."""
        for place in range(len(self._chain), self.tokens // self._block_tokens):
            owner = -1 - self.dialogue.persona if place < self.shared_blocks else self.dialogue.number
            self._chain.append((owner, place, 0))
        return self._chain


class _Router:
    """Router of turns to servers."""

    def __init__(self, settings: DialogueSettings, servers: Sequence[SimulatedServer]) -> None:
        self._settings = settings
        self._servers = servers
        self._rng = Random(settings.seed + 1)
        self._turns = 0

    def choose(self, now_s: float, chain: Sequence[BlockKey]) -> SimulatedServer:
        """Return the server for a turn whose prompt has these full blocks."""
        self._turns += 1
        if self._settings.routing is Routing.RANDOM:
            return self._rng.choice(self._servers)
        if self._settings.routing is Routing.ROUND_ROBIN:
            return self._servers[self._turns % len(self._servers)]
        shortest = min(server.queue_s(now_s) for server in self._servers)
        near = [server for server in self._servers if server.queue_s(now_s) <= shortest + self._settings.balance_s]
        # Ties are broken by the shortest queue, then by the least busy time.
        return max(near, key=lambda server: (server.held(chain), -server.queue_s(now_s), -server.busy_s))


def simulate_dialogues(
    settings: DialogueSettings, progress: Callable[[int, int], None] = lambda done, total: None
) -> DialogueRun:
    """Run all dialogues to their ends. `progress(num_done, total)` is called with numbers of turns."""
    began = time.perf_counter()
    dialogues = make_dialogues(settings)
    servers = [SimulatedServer(settings) for _ in range(settings.servers)]
    router = _Router(settings, servers)
    talks = [_Talk(dialogue, settings.block_tokens) for dialogue in dialogues]
    upcoming = [(dialogue.start_s, dialogue.number, 0) for dialogue in dialogues]
    heapq.heapify(upcoming)
    total = sum(len(dialogue.turns) for dialogue in dialogues)
    done = prompt_tokens = reused_tokens = known_tokens = moved = 0
    opened: dict[int, int] = {}  # personas seen, and the tokens of their full blocks
    waited_s = now_s = 0.0
    while upcoming:
        now_s, number, index = heapq.heappop(upcoming)
        talk, turn = talks[number], dialogues[number].turns[index]
        known_tokens += talk.tokens - 1 if index else opened.get(dialogues[number].persona, 0)
        talk.tokens += turn.question_tokens
        prompt = talk.tokens
        chain = talk.full_blocks()
        server = router.choose(now_s, chain)
        use = Use(int(now_s * 1e9), len(chain))
        reused = server.reuse(number, chain, use)
        waited_s += server.queue_s(now_s)
        answered_s = server.work(now_s, prompt - reused, turn.answer_tokens)
        talk.tokens += turn.answer_tokens - 1  # an answer's last token has no KV
        server.keep(number, talk.full_blocks(), talk.tokens % settings.block_tokens, use)
        talk.tokens += 1
        moved += talk.server not in (None, server)
        talk.server = server
        prompt_tokens += prompt
        reused_tokens += reused
        opened[dialogues[number].persona] = talk.shared_blocks * settings.block_tokens
        done += 1
        if index + 1 < len(dialogues[number].turns):
            heapq.heappush(upcoming, (answered_s + dialogues[number].turns[index + 1].pause_s, number, index + 1))
        if not done % _PROGRESS_EVERY or done == total:
            progress(done, total)
    mean_busy_s = sum(server.busy_s for server in servers) / len(servers)
    return DialogueRun(
        routing=settings.routing.value,
        policy=settings.policy,
        tails=settings.tails,
        dialogues=len(dialogues),
        turns=total,
        mean_history_messages=mean_history([len(dialogue.turns) for dialogue in dialogues]),
        prompt_tokens=prompt_tokens,
        reused_tokens=reused_tokens,
        reused=reused_tokens / prompt_tokens,
        reused_limit=known_tokens / prompt_tokens,
        moved_turns=moved,
        evicted_blocks=sum(server.pool.evictions for server in servers),
        blocks_held=settings.capacity * settings.servers,
        blocks_made=sum(len(talk.full_blocks()) for talk in talks),
        turns_per_server=tuple(server.turns for server in servers),
        busy_balance=max(server.busy_s for server in servers) / mean_busy_s,
        mean_wait_s=waited_s / total,
        simulated_hours=now_s / 3600,
        seconds=time.perf_counter() - began,
    )


_ROWS: tuple[tuple[str, Callable[[DialogueRun], str]], ...] = (
    ("prompt tokens reused", lambda run: f"{run.reused:.2%}"),
    ("limit with unlimited memory", lambda run: f"{run.reused_limit:.2%}"),
    ("turns moved to another server", lambda run: f"{run.moved_turns / run.turns:.1%}"),
    ("mean wait in the queue", lambda run: f"{run.mean_wait_s:.2f} s"),
    ("busiest server over the mean", lambda run: f"{run.busy_balance:.2f}"),
    ("blocks evicted", lambda run: f"{run.evicted_blocks:,}"),
)


def dialogue_table(runs: Sequence[DialogueRun]) -> Group:
    """Return a table with a column per run; all runs must have the same dialogues."""
    one = runs[0]
    title = Text(
        f"{one.dialogues:,} dialogues, {one.turns:,} turns, {one.mean_history_messages:.0f} messages before a turn\n"
        f"{len(one.turns_per_server)} servers hold {one.blocks_held / one.blocks_made:.0%} of the dialogues' blocks",
        style="bold",
    )
    table = Table()
    table.add_column("")
    for run in runs:
        table.add_column(run.routing + ("" if run.tails else ", no tails"), justify="right", no_wrap=True)
    for heading, text in _ROWS:
        table.add_row(heading, *(text(run) for run in runs))
    return Group(title, table)
