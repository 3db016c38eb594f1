"""A schedule: a workload, and faults at instants, all drawn from the seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LOAD_S = 4.0  # requests arrive and faults begin within this time
BLOCK_TOKENS = 8
END_ID = 1  # that ends an answer of the bundled model's tokenizer


@dataclass(frozen=True)
class RequestPlan:
    """One request: when it is sent, to which frontend, its body; after how many tokens the client leaves (-1: never).

    `follows`: the request whose prompt and answer it continues; it is sent when that one has ended.
    """

    name: str
    at_s: float
    frontend: int
    body: Mapping[str, Any]
    leaves_after: int = -1
    leaves_after_s: float = -1.0  # its connection breaks
    pause_s: float = 0.0  # of the client after each read
    follows: str = ""
    new_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SimFault:
    """A fault for `for_s` seconds. `target` and `other` name nodes or hosts.

    It begins at `at_s`; or, if `after_steps` is positive, when the node `target` has run so many steps after that; or,
    with a `moment`, `delay_s` after that has happened for the `nth` time. Then `target` is the node where it happens
    ("here"), the one that takes part ("there"), or a conductor.
    """

    kind: str
    at_s: float
    for_s: float
    target: str
    other: str = ""
    after_steps: int = 0
    moment: str = ""
    nth: int = 1
    delay_s: float = 0.0


KINDS = (
    "kill",
    "hang",
    "cut",
    "cut one way",
    "slow",
    "garbles",
    "reset",
    "host",
    "stop",
    "flip",
    "disk",
    "all leave",
    "forge",
    "stall",
)
MOMENTS = (
    "scheduled",
    "placed",
    "reserved",
    "given up",
    "waits",
    "gets slots",
    "answered",
    "lands",
    "reads",
    "put",
    "leased",
    "copies",
)
_KINDS_AT_MOMENTS = (
    *("leave", "leave", "kill", "kill", "hang", "stop", "stall"),
    *("cut", "cut one way", "slow", "reset", "host", "flip", "garbles"),
)
LINK_FAULTS = ("cut", "cut one way", "slow", "garbles", "reset")
DISK_FAULTS = ("lies", "full", "slow", "stalled", "read_errors", "write_errors", "flip")


@dataclass(frozen=True)
class SchedulePace:
    """Durations of the engine and the network, sizes of KV and of the pools, and what conductors copy."""

    step_s: float
    token_s: float
    latency_s: float
    bytes_per_s: float
    pool_bytes: int
    ssd_bytes: int
    capacity_tokens: int
    head_dim: int  # of the model: its KV takes 12 times as many bytes per token
    copies_all: bool  # conductors copy every prefix that they place, whether it pays or not
    loads_layers: bool  # KV is loaded layer by layer, however little it is
    handle_s: float  # most that a slow handle of an event loop takes; 0: none is slow


@dataclass(frozen=True)
class Schedule:
    """All of one run. `at_rest`: fields of the requests that are sent in the end, in turn."""

    seed: int
    pace: SchedulePace
    requests: tuple[RequestPlan, ...]
    faults: tuple[SimFault, ...]
    at_rest: tuple[Mapping[str, Any], ...] = ()


def draw(seed: int, nodes: Sequence[str], hosts: Sequence[str], frontends: int) -> Schedule:
    """Draw the workload and the faults of a seed. `nodes` are those that may fail, with frontends last."""
    rng = random.Random(f"schedule {seed}")
    head_dim = rng.choice((8, 8, 8, 64, 512))
    pool_bytes, ssd_bytes = rng.choice(((1 << 20, 0), (64 << 10, 0), (64 << 10, 1 << 20)))
    pace = SchedulePace(
        step_s=rng.choice((2e-3, 10e-3, 40e-3)),
        token_s=rng.choice((20e-6, 200e-6, 1e-3)),
        latency_s=rng.choice((50e-6, 500e-6, 3e-3)),
        bytes_per_s=rng.choice((2e5, 2e6, 1e9)) * (1 if head_dim < 512 else 10),
        pool_bytes=pool_bytes * head_dim // 8,
        ssd_bytes=ssd_bytes * head_dim // 8,
        capacity_tokens=rng.choice((192, 256, 512)),
        head_dim=head_dim,
        copies_all=rng.random() < 0.5,
        loads_layers=rng.random() < 0.3,
        handle_s=rng.choice((0.0, 0.0, 0.0, 2e-3, 20e-3)),
    )
    # Documents share paragraphs of whole blocks, in other places.
    paragraphs = [[rng.randrange(3, 2048) for _ in range(BLOCK_TOKENS * rng.randrange(1, 4))] for _ in range(5)]
    chosen = [rng.choices(paragraphs, k=rng.randrange(2, 11 if rng.random() < 0.2 else 6)) for _ in range(3)]
    documents = [[token for paragraph in each for token in paragraph] for each in chosen]
    requests: list[RequestPlan] = []
    most_s = rng.choice((LOAD_S, LOAD_S, LOAD_S / 10))  # until the last one is sent
    for i in range(rng.randrange(4, 15) if most_s == LOAD_S else rng.randrange(8, 20)):
        body: dict[str, Any] = {
            "max_tokens": rng.choice((1, 2, 5, 12, 24, 40)),
            "temperature": 0.0,
            "ignore_eos": rng.random() < 0.7,
        }
        if rng.random() < 0.5:
            body |= {"temperature": rng.choice((0.7, 1.0, 1.5)), "seed": rng.randrange(2**32)}
            body |= {"top_p": rng.choice((1.0, 0.9)), "top_k": rng.choice((0, 20))}
        if rng.random() < 0.25:
            body |= {"frequency_penalty": 0.8, "repetition_penalty": 1.3}
            body |= {"logit_bias": {str(rng.randrange(3, 2048)): 12.0 for _ in range(3)}}  # these are repeated
        if rng.random() < 0.15:
            body |= {"min_tokens": min(8, body["max_tokens"]), "logit_bias": {str(END_ID): 11.0}, "ignore_eos": False}
        if rng.random() < 0.15:
            body |= {"n": 2, "temperature": 1.0, "seed": rng.randrange(2**32)}
        if rng.random() < 0.1:
            body |= {"logprobs": 2}
        document = rng.choice(documents)
        head = document[: rng.choice((len(document), len(document) // 2))]
        prompt = [*head, *(rng.randrange(3, 2048) for _ in range(rng.randrange(1, 20)))]
        leaves = rng.randrange(0, 10) if rng.random() < 0.15 else -1
        pause_s = rng.choice((0.0, 0.0, 0.0, 0.02, 0.2))
        leaves_s = rng.choice((1e-3, 0.01, 0.1, 1.0)) * rng.random() if rng.random() < 0.15 else -1.0
        follows, new = "", tuple[int, ...]()
        if requests and rng.random() < 0.35:
            earlier = [each for each in requests if each.body.get("n", 1) == 1]
            if earlier:
                follows = rng.choice(earlier).name
                new = tuple(rng.randrange(3, 2048) for _ in range(rng.randrange(1, 12)))
        body["prompt"] = prompt
        requests.append(
            RequestPlan(
                f"r{i}",
                rng.uniform(0.0, most_s),
                rng.randrange(frontends),
                body,
                leaves,
                leaves_s,
                pause_s,
                follows,
                new,
            )
        )
    faults = [_fault(rng, nodes, hosts) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6)))]
    if rng.random() < 0.15:  # the cluster is overloaded, and clients give up
        faults.append(SimFault("impatient", 0.0, 2 * LOAD_S, ""))
        pace = replace(pace, handle_s=20e-3)
    return Schedule(seed, pace, tuple(requests), tuple(sorted(faults, key=lambda each: each.at_s)))


def _fault(rng: random.Random, nodes: Sequence[str], hosts: Sequence[str]) -> SimFault:
    if rng.random() < 0.6:
        return _fault_at_moment(rng)
    kind = rng.choice(KINDS)
    at_s, for_s = rng.uniform(0.0, LOAD_S), rng.choice((0.05, 0.5, 2.0, 8.0, 15.0))
    if kind == "hang" and rng.random() < 0.2:
        for_s = 120.0
    if kind in LINK_FAULTS:
        target, other = rng.sample(list(hosts), 2)
        return SimFault(kind, at_s, for_s, target, other)
    if kind == "host":
        return SimFault(kind, at_s, for_s, rng.choice([host for host in hosts if host.startswith("h")]))
    if kind == "disk":
        host = rng.choice([host for host in hosts if host.startswith("h")])
        return SimFault(kind, at_s, for_s, host, rng.choice(DISK_FAULTS))
    if kind == "flip":
        return SimFault(kind, at_s, 0.0, rng.choice([node for node in nodes if node.startswith("pool")]))
    if kind == "all leave":
        return SimFault(kind, at_s, 0.0, "")
    if kind == "forge":
        return SimFault(
            kind, at_s, 0.0, "here", moment="reserved", nth=rng.randrange(1, 12), delay_s=3e-3 * rng.random()
        )
    if kind == "stall":
        return SimFault(
            kind, at_s, for_s, rng.choice([node for node in nodes if node.startswith(("prefill", "decode"))])
        )
    return SimFault(kind, at_s, for_s, rng.choice(nodes), after_steps=rng.choice((0, rng.randrange(1, 600))))


def _fault_at_moment(rng: random.Random) -> SimFault:
    kind = rng.choice(_KINDS_AT_MOMENTS)
    for_s = rng.choice((0.05, 0.5, 2.0, 8.0, 15.0, 45.0))
    damages = kind in ("flip", "garbles")  # KV that somebody is about to load
    return SimFault(
        kind,
        rng.uniform(0.0, (0.2 if damages else 0.8) * LOAD_S),
        for_s,
        "here" if damages else rng.choice(("here", "here", "there", "there", "conductor-0")),
        moment="leased" if damages else rng.choice(MOMENTS),
        nth=rng.choice((1, 1, 1, 2, 3, 6)),
        delay_s=rng.choice((0.0, 1e-4, 1e-3, 1e-2, 0.1)) * rng.random(),
    )
