"""Writes decisions.jsonl: a small cluster under overload. Run it when decisions were meant to change.

python tests/conductor/golden/write.py
"""

import heapq
import itertools
import json
import random
import tempfile
from pathlib import Path

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.policy.decisions import Copy, Place
from conductor.policy.events import (
    CopyFinished,
    DecodeSample,
    NodeJoined,
    NodeLost,
    NodeReported,
    NodeView,
    PoolMatch,
    PoolMatches,
    PrefillSample,
    Progress,
    RequestArrived,
    RequestCompleted,
    Tick,
)
from settings.keys import assemble

PATH = Path(__file__).with_name("decisions.jsonl")
ROLES = {"prefill": "prefill", "decode": "decode", "pool": "pool"}


def view(node_id: str, incarnation: int = 1) -> NodeView:
    role, number = node_id.split("-")
    if role == "pool":
        return NodeView(node_id, "pool", incarnation, "host")
    return NodeView(
        node_id,
        ROLES[role],
        incarnation,
        "host",
        f"pool-{number}",
        "m",
        16,
        8192,
        4096,
        8,
        2048,  # type: ignore[arg-type]
    )


class Simulation:
    """Prefill one after the other per node, decode in parallel; 60 families of prompts, a few of them hot."""

    def __init__(self, folder: Path) -> None:
        self.now_ns = 0
        objectives = {"ttft_slo_s": 2.0, "tbt_slo_s": 0.2}
        log = folder
        # The mode that goes by most of what is learned.
        config = assemble(
            ConductorConfig,
            listen="none",
            **objectives,
            admission_mode="predicted",
            report_timeout_s=0,
            decision_log=log,
        )
        self.core = Core(config, clock=lambda: self.now_ns)
        self.rng = random.Random(7)
        self.heap: list[tuple[int, int, object]] = []
        self.order = itertools.count()
        self.free_ns = {"prefill-0": 0, "prefill-1": 0}
        self.held: dict[str, dict[int, int]] = {"pool-0": {}, "pool-1": {}}

    def at(self, ns: int, event: object) -> None:
        heapq.heappush(self.heap, (ns, next(self.order), event))

    def run(self, num_requests: int) -> None:
        for node_id in ("pool-0", "pool-1", "prefill-0", "prefill-1", "decode-0", "decode-1"):
            self.at(0, NodeJoined(view(node_id)))
        ns = 1_000_000_000
        for i in range(num_requests):
            ns += int(self.rng.expovariate(3.0) * 1e9)
            self.at(ns, i)
        self.at(ns // 2, NodeLost("decode-1", 1))
        self.at(ns // 2 + 5_000_000_000, NodeJoined(view("decode-1", 2)))
        for second in range(0, ns, 60_000_000_000):
            self.at(second, Tick())
        while self.heap:
            self.now_ns, _, event = heapq.heappop(self.heap)
            if isinstance(event, int):
                self.arrive(event)
            else:
                self.core.handle(event)  # type: ignore[arg-type]
        self.core.close()

    def arrive(self, number: int) -> None:
        family = min(int(self.rng.expovariate(0.15)), 59)
        prompt, new = 256 + 32 * (family % 40) + self.rng.randrange(256), self.rng.randrange(8, 200)
        matches = PoolMatches.of(*(PoolMatch(pool, held[family]) for pool, held in self.held.items() if family in held))
        event = RequestArrived(f"r{number}", 0, "f", "m", prompt, new, matches, family)
        decisions = self.core.handle(event)
        for decision in decisions:
            if isinstance(decision, Copy) and not decision.keeps_fetched:
                done = CopyFinished(
                    decision.source, decision.target, decision.match_key, decision.num_blocks << 15, 0.2
                )
                self.at(self.now_ns + 200_000_000, done)
                self.held[decision.target][family] = decision.num_blocks
        if isinstance(decisions[0], Place):
            self.serve(event, decisions[0], family)

    def serve(self, event: RequestArrived, place: Place, family: int) -> None:
        reused = place.reuse_blocks * 16
        took = int((0.03 + 2e-3 * (event.prompt_tokens - reused)) * self.rng.uniform(0.9, 1.1) * 1e9)
        begin = max(self.now_ns, self.free_ns[place.prefill])
        end = self.free_ns[place.prefill] = begin + took
        over = end + int(event.max_new_tokens * 0.06e9)
        rid = event.request_id
        self.held[f"pool-{place.prefill[-1]}"][family] = (event.prompt_tokens - 1) // 16
        self.at(begin, NodeReported(place.prefill, progress=(Progress(rid, 0, "prefill_started"),)))
        sample = PrefillSample(event.prompt_tokens - reused, reused, took / 1e9)
        ended = (Progress(rid, 0, "prefill_ended"), Progress(rid, 0, "ended"))
        self.at(end, NodeReported(place.prefill, progress=ended, prefills=(sample,)))
        self.at(end, NodeReported(place.decode, progress=(Progress(rid, 0, "decode_joined"),)))
        steps = (DecodeSample(2, 2 * event.prompt_tokens, 0.06),)
        self.at(over, NodeReported(place.decode, progress=(Progress(rid, 0, "ended"),), decodes=steps))
        self.at(over, RequestCompleted(rid, 0, "finished", (end - self.now_ns) / 1e9, 0.06, event.max_new_tokens))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        Simulation(Path(name)).run(130)
        (written,) = Path(name).glob("events-*.jsonl")
        head, *rows = written.read_text().splitlines()
        # Of no particular time.
        PATH.write_text("\n".join([json.dumps({**json.loads(head), "life": 1}), *rows]) + "\n")
