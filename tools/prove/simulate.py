"""One schedule, from the start of the cluster to rest: faults, clients, and the invariants. Needs `imports.install`."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from conductor.directory import table
from conductor.policy.kernels import prefill_kernels
from conductor.policy.lengths import length_kernels
from conductor.policy.placement.decode import decode_kernels
from engine.logprobs import log_probs
from engine.sampling import SamplingRow, sample
from frontend.tokenizer import Tokenizer
from kvpool import digest
from kvpool.policy.eviction.shadows import Shadows
from messenger import UnitSection
from messenger.native.unit_digests import UnitDigests
from settings.worker import BUNDLED_MODEL
from tools.prove import entered, grammar_process
from tools.prove.cluster import AskedRequest, ClientBehaviour, SimCluster, SimShape, ask
from tools.prove.faults import Faults
from tools.prove.hash_engine import hash_model
from tools.prove.liveness import LivenessCheck
from tools.prove.observe import membership, observe
from tools.prove.paths import draw_paths, with_paths
from tools.prove.reference import expected_answer
from tools.prove.schedule import LOAD_S, MOMENTS, RequestPlan, Schedule, draw
from tools.prove.world.network import SimNetwork
from tools.prove.world.scheduler import Deadlock, TooLong, World, set_world
from worker import kv_loading

START_S = 60.0  # of virtual time, for all nodes to be ready
QUIET_S = 30.0  # after the last request, if there are no faults
END_S = 180.0  # after the last fault, until every request has ended
MOST_STALE = 3  # connections between workers that broke unnoticed
AGAIN_S = 30.0  # for requests to a cluster at rest
REST_S = 90.0  # until nothing is held; longer than leases whose holder was lost

_POLL = "/moonpool.v1.Conductor/Cluster at "  # which frontends repeat all the time
# It was asked to end; or no worker of the model was left for the grace period.
_MAY_FAIL = ("frontend is shutting down", "no node can serve model", "has joined")
# Until its first token, a request that lost its worker may be rejected for load.
_MAY_BE_REJECTED = ("predicted to wait",)
_LEAST_NBYTES = {name: vars(kv_loading)[name] for name in ("LEAST_READ_NBYTES", "LEAST_SLICE_NBYTES")}
_tokenizers: list[Tokenizer] = []


def warm_up() -> None:
    """Load what all schedules share, once per process."""
    if not _tokenizers:
        observe()
        entered.watch()
        grammar_process.install()
        _load_kernels()
        _tokenizers.append(Tokenizer(BUNDLED_MODEL))


def _load_kernels() -> None:
    """Load compiled functions before processes are forked: each of them would take a third of its time for it."""
    table.warm_up()
    prefill_kernels()
    decode_kernels()
    length_kernels()
    Shadows()
    digest.warm_up()
    UnitDigests([UnitSection(0, 4, 1)], 4)
    row = SamplingRow(temperature=1.0, top_p=1.0, top_k=0, seed=0, choice=0, index=0)
    log_probs(torch.zeros(1, 2), sample(torch.zeros(1, 2), [row]), 1)


@dataclass
class ScheduleOutcome:
    """Result of one schedule. `problems` are violated invariants; none is the only good result."""

    seed: int
    problems: list[str] = field(default_factory=list)
    digest: str = ""
    events: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    story: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        """Return the outcome in one line."""
        return json.dumps(asdict(self))


class Simulation:
    """One schedule while it runs."""

    def __init__(self, schedule: Schedule, shape: SimShape) -> None:
        warm_up()
        self.world = World(schedule.seed)
        set_world(self.world)
        pace = schedule.pace
        self.network = SimNetwork(self.world, latency_s=pace.latency_s, bytes_per_s=pace.bytes_per_s)
        self.world.pace = pace
        vars(kv_loading).update(dict.fromkeys(_LEAST_NBYTES, 1) if pace.loads_layers else _LEAST_NBYTES)
        grammar_process.set_rest(False)
        self.cluster = SimCluster(self.world, self.network, shape, _tokenizers[0])
        self.schedule = schedule
        self.asked = {plan.name: AskedRequest(plan.name, plan.body) for plan in schedule.requests}
        self.problems = self.world.problems
        self.excused: dict[str, str] = {}
        self._waiting: dict[str, list[RequestPlan]] = {}
        self.faults = Faults(self.world, self.network, self.cluster, self.asked, schedule.faults)

    # Requests

    def _send(self, plan: RequestPlan) -> None:
        asked = self.asked[plan.name]
        if plan.follows:
            earlier = self.asked[plan.follows]
            if not earlier.ended and plan.follows not in self.excused:
                self._waiting.setdefault(plan.follows, []).append(plan)
                return
            prompt = [*earlier.prompt, *(earlier.tokens.get(0) or ()), *plan.new_ids]
            asked.body = {**plan.body, "prompt": prompt}
        node = self.cluster.nodes[f"frontend-{plan.frontend}"]
        if not node.is_ready or not node.is_alive:
            self._excuse(asked.name, "its frontend was down")
            return
        self.world.tell("client", f"sends {plan.name} to {node.name}")
        asked.sent_ns = self.world.now_ns
        process, service = node.process, node.service
        assert process is not None
        process.at_death.append(lambda: self._excuse(asked.name, "its frontend died"))
        process.loop.call_soon_threadsafe(
            lambda: process.loop.create_task(
                ask(service, asked, ClientBehaviour(plan.leaves_after, plan.leaves_after_s, plan.pause_s), self._ended)
            )
        )

    def _excuse(self, name: str, why: str) -> None:
        if not self.asked[name].ended and name not in self.excused:
            self.excused[name] = why
            self._follow(name)

    def _ended(self, asked: AskedRequest) -> None:
        what = asked.finish or asked.error or "left"
        self.world.tell("client", f"{asked.name} ends: {what}, {sum(map(len, asked.tokens.values()))} tokens")
        self._follow(asked.name)

    def _follow(self, name: str) -> None:
        for plan in self._waiting.pop(name, []):
            self.world.at(0.01, lambda plan=plan: self._send(plan))  # type: ignore[misc]

    # The run

    def run(self) -> ScheduleOutcome:
        """Run the schedule, and return what was found."""
        world, schedule = self.world, self.schedule
        try:
            self._run()
        except (Deadlock, TooLong) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        except Exception as error:
            frames = traceback.format_exception(error)
            self.problems.append(f"the simulation ends with {type(error).__name__}: {error}")
            world.tell("simulation", "".join(frames))
        outcomes = [asked for name, asked in self.asked.items() if name not in self.excused]
        return ScheduleOutcome(
            schedule.seed,
            self.problems,
            world.digest,
            world.num_events,
            world.num_steps,
            world.now_ns / 1e9,
            {
                "requests": len(self.asked),
                "finished": sum(bool(each.finish) for each in outcomes),
                "refused": sum(bool(each.error) for each in outcomes),
                "excused": len(self.excused),
                "placed again": sum(max(0, each.attempts - len(each.requests)) for each in outcomes),
                "left": sum(each.ended and not each.finish and not each.error for each in outcomes),
                "faults": len(schedule.faults),
                **{f"moment {name}": self.faults.moments.get(name, 0) for name in MOMENTS},
                **entered.taken(),
            },
            [f"{at / 1e9:10.6f} {who}: {what}" for at, who, what in world.story if _POLL not in what],
        )

    def _run(self) -> None:
        world, cluster = self.world, self.cluster
        for node in cluster.nodes.values():
            cluster.start(node)
        if not world.run(lambda: all(node.is_ready for node in cluster.nodes.values()), START_S):
            waiting = [node.name for node in cluster.nodes.values() if not node.is_ready]
            self.problems.append(f"not ready after {START_S:.0f} s: {', '.join(waiting)}")
            return
        world.run(lambda: False, 2.0)  # frontends have seen the cluster
        for plan in self.schedule.requests:
            world.at(plan.at_s, lambda plan=plan: self._send(plan))  # type: ignore[misc]
        self.faults.begin()
        LivenessCheck(world, cluster, self.faults, self.asked, self.excused).begin()
        world.run(lambda: False, LOAD_S)
        if not self.schedule.faults and not world.run(self._all_ended, QUIET_S):
            self.problems.append(f"not ended {QUIET_S:.0f} s after the load, without a fault")
        world.run(lambda: not self.faults.pending, END_S)
        if self.faults.pending:
            self.problems.append("a node that was asked to end has not ended")
        if not world.run(self._all_ended, END_S):
            open_ = [name for name, asked in self.asked.items() if not asked.ended and name not in self.excused]
            self.problems.append(f"not ended {END_S:.0f} s after the last fault: {', '.join(open_)}")
        self._check_tokens(list(self.asked))
        held = list[str]()
        for _ in range(int(REST_S)):
            world.run(lambda: False, 1.0)
            if not (held := self._held()):
                break
        self.problems += [f"at rest: {each}" for each in held]
        self._ask_again()

    def _ask_again(self) -> None:
        """Send requests to the cluster at rest: all are answered, and hardly any is placed again."""
        rng, names = random.Random(f"again {self.schedule.seed}"), list[str]()
        grammar_process.set_rest(True)
        at_rest = self.schedule.at_rest or [{"ignore_eos": True}]
        for i in range(6):
            prompt = [rng.randrange(3, 2048) for _ in range(40)]
            body = {"max_tokens": 6, "temperature": 0.0, "prompt": prompt, **at_rest[i % len(at_rest)]}
            plan = RequestPlan(f"again{i}", 0.0, i % self.cluster.shape.frontends, body)
            self.asked[plan.name] = AskedRequest(plan.name, body)
            names.append(plan.name)
            self.world.at(0.05 * i, lambda plan=plan: self._send(plan))  # type: ignore[misc]
        if (conductors := self.cluster.shape.conductors) > 1:  # another one can place them
            self.cluster.kill(self.cluster.nodes[f"conductor-{rng.randrange(conductors)}"])
        asked = [self.asked[name] for name in names]
        if not self.world.run(lambda: all(each.ended for each in asked), AGAIN_S):
            self.problems.append(f"not ended {AGAIN_S:.0f} s after rest")
        for each in asked:
            if each.error or each.name in self.excused:
                self.problems.append(f"lost: {each.name} at rest: {each.error or self.excused[each.name]}")
        # A connection that broke while it was idle costs one attempt, and so does a worker's dead grammar process.
        most = MOST_STALE + (2 * self.cluster.shape.hosts if self.schedule.at_rest else 0)
        if (again := sum(max(0, each.attempts - 1) for each in asked)) > most:
            self.problems.append(f"placed again at rest: {again} times for {len(asked)} requests")
        self._check_tokens(names)

    def _all_ended(self) -> bool:
        return all(asked.ended or name in self.excused for name, asked in self.asked.items())

    def _check_tokens(self, names: Sequence[str]) -> None:
        shape, head_dim = self.cluster.shape, self.schedule.pace.head_dim
        model = hash_model(shape.model, vocab_size=2048, head_dim=head_dim)
        for name in names:
            asked = self.asked[name]
            if asked.ends > 1:
                self.problems.append(f"lost: {name} ended {asked.ends} times")
            was_accepted = asked.attempts and not any(text in asked.error for text in self._excuses(asked))
            if asked.error and was_accepted and name not in self.excused:
                self.problems.append(f"lost: {name} failed with {asked.error}")
            for choice, request in enumerate(asked.requests):
                got = asked.tokens.get(choice, [])
                right = expected_answer(model, request, _tokenizers[0], len(got) + 1)
                whole = choice in asked.finished
                if got != right[: len(got)] or (whole and len(got) != len(right)):
                    at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), len(right))
                    self.problems.append(
                        f"wrong tokens: {name}, choice {choice}, from token {at} of {len(right)} on; got {len(got)}"
                    )

    def _excuses(self, asked: AskedRequest) -> tuple[str, ...]:
        """Return the errors with which a request that was placed may end."""
        if not self.schedule.faults:
            return ()
        return _MAY_FAIL if any(asked.tokens.values()) else (*_MAY_FAIL, *_MAY_BE_REJECTED)

    def _held(self) -> list[str]:
        living = [node for node in self.cluster.nodes.values() if node.is_alive]
        members = [node.name for node in living if node.role in ("pool", "prefill", "decode")]
        found = list[str]()
        for node in living:
            assert node.process is not None
            problems = [*self.cluster.held(node), *membership(node.process, members)]
            found += [f"{node.name}: {problem}" for problem in problems]
        return found


def run_seed(
    seed: int,
    without_faults: frozenset[int] = frozenset(),
    without_requests: frozenset[str] = frozenset(),
    *,
    shape: SimShape | None = None,
) -> ScheduleOutcome:
    """Run the schedule of a seed, without the faults of these indices and the requests of these names."""
    paths = draw_paths(seed)
    shape = replace(
        shape or SimShape(),
        conductors=paths.conductors,
        frontends=paths.frontends,
        windows=paths.windows,
        window_slots=paths.window_slots,
        overrun=paths.overrun,
    )
    nodes = [
        *(f"{role}-{i}" for role in ("pool", "prefill", "decode") for i in range(shape.hosts)),
        *(f"conductor-{i}" for i in range(shape.conductors)),
        *(f"frontend-{i}" for i in range(shape.frontends)),
    ]
    hosts = [
        *(f"h{i}" for i in range(shape.hosts)),
        *(f"c{i}" for i in range(shape.conductors)),
        *(f"f{i}" for i in range(shape.frontends)),
    ]
    drawn = with_paths(draw(seed, nodes, hosts, shape.frontends), paths)
    kept = tuple(fault for i, fault in enumerate(drawn.faults) if i not in without_faults)
    gone = {plan.name for plan in drawn.requests if plan.name in without_requests}
    requests = tuple(plan for plan in drawn.requests if plan.name not in gone and plan.follows not in gone)
    pace = drawn.pace
    shape = replace(shape, pool_bytes=pace.pool_bytes, ssd_bytes=pace.ssd_bytes)
    shape = replace(shape, capacity_tokens=pace.capacity_tokens)
    return Simulation(replace(drawn, faults=kept, requests=requests), shape).run()
