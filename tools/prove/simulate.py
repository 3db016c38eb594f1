"""One schedule, from the start of the cluster to rest: faults, clients, and the invariants. Needs `imports.install`."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from frontend.tokenizer import Tokenizer
from settings.worker import BUNDLED_MODEL
from tools.prove.cluster import MODEL, AskedRequest, Leaving, Node, SimCluster, SimShape, ask
from tools.prove.hash_engine import hash_model
from tools.prove.observe import membership, observe
from tools.prove.reference import expected_tokens
from tools.prove.schedule import LOAD_S, RequestPlan, Schedule, SimFault, draw
from tools.prove.world.network import SimNetwork
from tools.prove.world.process import Process
from tools.prove.world.scheduler import Deadlock, TooLong, World, set_world

START_S = 60.0  # of virtual time, for all nodes to be ready
END_S = 180.0  # after the last fault, until every request has ended
MOST_STALE = 3  # connections between workers that broke unnoticed
AGAIN_S = 30.0  # for requests to a cluster at rest
REST_S = 90.0  # until nothing is held; longer than leases whose holder was lost

_POLL = "/moonpool.v1.Conductor/Cluster at "  # which frontends repeat all the time
# It was asked to end; or no worker of the model was left for the grace period, or all attempts failed.
_MAY_FAIL = ("frontend is shutting down", "no node can serve model", "has joined", "failed after 5 attempts")
_tokenizers: list[Tokenizer] = []


def warm_up() -> None:
    """Load what all schedules share, once per process."""
    if not _tokenizers:
        observe()
        _tokenizers.append(Tokenizer(BUNDLED_MODEL))


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
        self.world.step_s, self.world.token_s = pace.step_s, pace.token_s
        self.cluster = SimCluster(self.world, self.network, shape, _tokenizers[0])
        self.schedule = schedule
        self.asked = {plan.name: AskedRequest(plan.name, plan.body) for plan in schedule.requests}
        self.problems = self.world.problems
        self.excused: dict[str, str] = {}
        self._waiting: dict[str, list[RequestPlan]] = {}
        self._pending_faults = len(schedule.faults)

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
        process, service = node.process, node.service
        assert process is not None
        process.at_death.append(lambda: self._excuse(asked.name, "its frontend died"))
        process.loop.call_soon_threadsafe(
            lambda: process.loop.create_task(
                ask(service, asked, Leaving(plan.leaves_after, plan.leaves_after_s), self._ended)
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

    # Faults

    def _arm(self, fault: SimFault) -> None:
        process = None if not fault.after_steps else self.cluster.nodes[fault.target].process
        if process is None or process.is_dead:
            self._begin(fault)
        else:
            process.call_after(fault.after_steps, lambda: self._begin(fault))

    def _begin(self, fault: SimFault) -> None:
        self.world.tell("fault", f"{fault.kind} {fault.target} {fault.other} for {fault.for_s} s")
        cluster, network = self.cluster, self.network
        end = self._fault_ended
        if fault.kind in ("cut", "cut one way", "slow"):
            ways = [(fault.target, fault.other), (fault.other, fault.target)][: 1 if "one" in fault.kind else 2]
            for way in ways:
                if fault.kind == "slow":
                    network.link(*way).slower = 300.0
                else:
                    network.cut(*way)

            def heal() -> None:
                for way in ways:
                    network.link(*way).slower = 1.0
                    network.heal(*way)
                end(fault)

            self.world.at(fault.for_s, heal)
        elif fault.kind == "reset":
            network.reset(fault.target, fault.other)
            end(fault)
        elif fault.kind == "disk":
            self._disk_fault(fault)
        elif fault.kind == "host":
            network.kill_host(fault.target)
            nodes = [node for node in cluster.nodes.values() if node.host == fault.target]
            for node in nodes:
                cluster.kill(node)
            if fault.target in cluster.disks:
                cluster.disks[fault.target].crash(self.world.chance)

            def revive() -> None:
                network.revive_host(fault.target)
                for node in nodes:
                    self._restart(node)
                end(fault)

            self.world.at(fault.for_s, revive)
        elif fault.kind == "flip":
            self._flip(cluster.nodes[fault.target])
            end(fault)
        else:
            self._node_fault(fault, cluster.nodes[fault.target])

    def _disk_fault(self, fault: SimFault) -> None:
        disk = self.cluster.disks.get(fault.target)
        if disk is None:
            self._fault_ended(fault)
            return
        values = {"slow": 50.0, "read_errors": 0.3, "write_errors": 0.3}
        if fault.other == "flip":
            self.world.tell("fault", f"a bit is flipped: {disk.flip(self.world.chance, under='/disk')}")
            self._fault_ended(fault)
            return
        setattr(disk, fault.other, values.get(fault.other, True))

        def mend() -> None:
            setattr(disk, fault.other, {"slow": 1.0, "read_errors": 0.0, "write_errors": 0.0}.get(fault.other, False))
            self._fault_ended(fault)

        self.world.at(fault.for_s, mend)

    def _node_fault(self, fault: SimFault, node: Node) -> None:
        process = node.process
        if process is None or process.is_dead or process.is_paused:
            self._fault_ended(fault)
            return
        if fault.kind == "kill":
            self.cluster.kill(node)
            self.world.at(fault.for_s, lambda: self._restart_after(fault, node))
        elif fault.kind == "hang":
            self.world.pause(process)
            self.world.at(fault.for_s, lambda: self._go_on_after(fault, process))
        elif fault.kind == "stop":
            self.cluster.shut_down(node)

            def restart() -> None:
                if process.is_dead:
                    self._restart(node)
                    self._fault_ended(fault)
                else:
                    self.world.at(0.5, restart)

            self.world.at(fault.for_s, restart)

    def _restart_after(self, fault: SimFault, node: Node) -> None:
        self._restart(node)
        self._fault_ended(fault)

    def _go_on_after(self, fault: SimFault, process: Process) -> None:
        self.world.go_on(process)
        self._fault_ended(fault)

    def _restart(self, node: Node) -> None:
        if not node.is_alive and node.host not in self.network.dead_hosts:
            self.cluster.start(node)

    def _flip(self, node: Node) -> None:
        if node.process is None or node.process.is_dead:
            return
        for arena in node.process.objects.get("arena", []):
            array = arena()
            used = array.nonzero()[0]
            if len(used):
                index = int(used[self.world.chance.randrange(len(used))])
                array[index] ^= 1 << self.world.chance.randrange(8)
                self.world.tell("fault", f"a bit of byte {index} of the arena of {node.name} is flipped")

    def _fault_ended(self, fault: SimFault) -> None:
        self._pending_faults -= 1
        self.world.tell("fault", f"{fault.kind} {fault.target} is over")

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
                "faults": len(schedule.faults),
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
        for fault in self.schedule.faults:
            world.at(fault.at_s, lambda fault=fault: self._arm(fault))  # type: ignore[misc]
        world.run(lambda: False, LOAD_S)
        world.run(lambda: not self._pending_faults, END_S)
        if self._pending_faults:
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
        for i in range(6):
            prompt = [rng.randrange(3, 2048) for _ in range(40)]
            body = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "prompt": prompt}
            plan = RequestPlan(f"again{i}", 0.0, i % self.cluster.shape.frontends, body)
            self.asked[plan.name] = AskedRequest(plan.name, body)
            names.append(plan.name)
            self.world.at(0.05 * i, lambda plan=plan: self._send(plan))  # type: ignore[misc]
        asked = [self.asked[name] for name in names]
        if not self.world.run(lambda: all(each.ended for each in asked), AGAIN_S):
            self.problems.append(f"not ended {AGAIN_S:.0f} s after rest")
        for each in asked:
            if each.error or each.name in self.excused:
                self.problems.append(f"lost: {each.name} at rest: {each.error or self.excused[each.name]}")
        # A connection that broke while it was idle costs one attempt.
        if (again := sum(max(0, each.attempts - 1) for each in asked)) > MOST_STALE:
            self.problems.append(f"placed again at rest: {again} times for {len(asked)} requests")
        self._check_tokens(names)

    def _all_ended(self) -> bool:
        return all(asked.ended or name in self.excused for name, asked in self.asked.items())

    def _check_tokens(self, names: Sequence[str]) -> None:
        model = hash_model(MODEL, vocab_size=2048)
        for name in names:
            asked = self.asked[name]
            if asked.ends > 1:
                self.problems.append(f"lost: {name} ended {asked.ends} times")
            was_accepted = asked.attempts and not any(text in asked.error for text in _MAY_FAIL)
            if asked.error and was_accepted and name not in self.excused:
                self.problems.append(f"lost: {name} failed with {asked.error}")
            for choice, request in enumerate(asked.requests):
                got = asked.tokens.get(choice, [])
                right = expected_tokens(model, request.prompt_ids.tolist(), request.sampling.to_proto())
                whole = choice in asked.finished
                if got != right[: len(got)] or (whole and len(got) != len(right)):
                    at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), len(right))
                    self.problems.append(
                        f"wrong tokens: {name}, choice {choice}, from token {at} of {len(right)} on; got {len(got)}"
                    )

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
    shape = shape or SimShape()
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
    drawn = draw(seed, nodes, hosts, shape.frontends)
    kept = tuple(fault for i, fault in enumerate(drawn.faults) if i not in without_faults)
    gone = {plan.name for plan in drawn.requests if plan.name in without_requests}
    requests = tuple(plan for plan in drawn.requests if plan.name not in gone and plan.follows not in gone)
    shape = replace(shape, pool_bytes=drawn.pace.pool_bytes, ssd_bytes=drawn.pace.ssd_bytes)
    shape = replace(shape, capacity_tokens=drawn.pace.capacity_tokens)
    return Simulation(replace(drawn, faults=kept, requests=requests), shape).run()
