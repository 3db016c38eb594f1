"""Simulated cluster: live conductors' policy objects receive events and their decisions run on simulated nodes."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle

from conductor.policy import Conductor, PolicyConfig
from conductor.policy.decisions import Copy, Decision, Place, Reject, Shrink, SwitchRole
from conductor.policy.events import (
    CopyFinished,
    DecodeAsked,
    Event,
    NodeJoined,
    NodeLost,
    NodeView,
    RequestArrived,
    RequestCompleted,
    Role,
    Tick,
)
from simulator.serving.clock import NS, VirtualClock, send
from simulator.serving.decode import SimulatedDecodeNode
from simulator.serving.pools import BlockSizes, SimulatedPools
from simulator.serving.prefill import SimulatedPrefillNode
from simulator.serving.requests import Arrival, RequestEnd, SimulatedRequest, SimulatedWorkload
from simulator.serving.settings import NO_KINDS, ActualCosts, ServingSettings, SimulationContext
from worker.policy.cost_profile import CostProfile
from worker.policy.scheduling_order import QueueEntry

MODEL = "simulated"
_FRONTEND = "frontend"
OnReject = Callable[[SimulatedRequest, Callable[[], SimulatedRequest]], None]
"""Callback `(request, admit)` before a rejection takes effect; calling `admit` admits the request instead and returns
it."""


class SimulatedCluster:
    """One run of a workload, from its first arrival to its last completion."""

    def __init__(
        self,
        settings: ServingSettings,
        policy: PolicyConfig,
        profile: CostProfile,
        workload: SimulatedWorkload,
        seed: int,
        kinds: Mapping[str, CostProfile] = NO_KINDS,
    ) -> None:
        """`kinds`: profiles of the workers that differ from `profile`, with their capacities, by node id."""
        self.settings = settings
        self.clock = VirtualClock()
        self.conductors = [Conductor(policy) for _ in range(settings.conductors)]
        self.works: list[SimulatedRequest] = []
        self.num_open = len(workload.jobs)
        self.copied_bytes = 0  # of prefixes, by decisions to copy
        self._workload = workload
        self._seed = seed
        self._network_ns = round(settings.network_s * NS)
        self._handoff_ns = round(settings.handoff_s * NS)
        num_hosts = settings.hosts or settings.prefill_nodes
        num_hosts += settings.decode_nodes if settings.is_aggregated else 0
        num_decode = num_hosts if settings.is_aggregated or settings.hosts else settings.decode_nodes
        # A host's worker has one name in both roles.
        prefill_name, decode_name = ("node", "node") if settings.hosts else ("prefill", "decode")
        decode_name = "aggregated" if settings.is_aggregated else decode_name
        sizes = BlockSizes.of(profile, workload.block_tokens)
        self.pools = SimulatedPools(settings, [f"pool-{i}" for i in range(num_hosts)], sizes)
        self.truth = ActualCosts(profile, settings, seed, kinds)
        self._kinds = kinds

        def context(name: str) -> SimulationContext:
            return SimulationContext(self.clock, self._settings_of(name), self.truth, workload.block_tokens)

        self.decode = {
            name: SimulatedDecodeNode(name, context(name), self._broadcast, self._finished, self._stored)
            for name in (f"{decode_name}-{i}" for i in range(num_decode))
        }
        # In an aggregated cluster these are hosts of pool nodes only, and do not join as workers.
        self.prefill = {
            name: SimulatedPrefillNode(
                name, pool, context(name), self.pools, self.decode, self._broadcast, self._prefilled
            )
            for name, pool in ((f"{prefill_name}-{i}", f"pool-{i}") for i in range(num_hosts))
        }
        self._hosts = {node.pool_id: node for node in self.prefill.values()}
        # Nodes that decode are assigned round-robin to the hosts, and use their pool nodes over separate links.
        self._host_of = dict(zip(self.decode, cycle(self.prefill.values())))
        for node in self.prefill.values():
            node.hosts = self._hosts
            node.others = self.prefill
        self.on_reject: OnReject = lambda work, let_in: None
        self.on_end: Callable[[SimulatedRequest], None] = lambda work: None
        self.on_place: Callable[[SimulatedRequest], None] = lambda work: None  # before its nodes receive it
        self.on_switch: Callable[[SwitchRole], None] = lambda decision: None
        self.on_idle: Callable[[str], None] = lambda node_id: None  # the node's last request has left it
        self.num_claims: Counter[str] = Counter()  # placed requests that have not left the node, by node id
        self._incarnations: Counter[str] = Counter()
        self._copies: dict[tuple[str, int], tuple[int, ...]] = {}  # blocks of copies that were made

    def run(self, keep_going: Callable[[], bool] | None = None) -> None:
        """Run until every request has ended, or `keep_going()` returns False."""
        self._join()
        names = self.pools.roster
        for conversation, blocks in self._workload.before[len(self._workload.before) - self._remembered() :]:
            self.pools.store(names[conversation % len(names)], 0, blocks)
        if self._workload.jobs:
            self.clock.at(self._workload.jobs[0].arrival_ns, lambda: self._arrive(0))
        self._tick()
        self.clock.run(keep_going or self.is_busy)

    def is_busy(self) -> bool:
        """Return True if any request has not ended yet."""
        return self.num_open > 0

    def backlogs_s(self) -> list[float]:
        """Return the seconds of prefill that wait or run on each node that joined to compute prompts."""
        nodes = self.decode if self.settings.is_aggregated else self.prefill
        return [node.backlog_s() for node in nodes.values()]

    def admit(self, job: Arrival) -> SimulatedRequest:
        """Place a request now, bypassing admission, to evaluate a rejection."""
        work = SimulatedRequest(job)
        self.works.append(work)
        # The policy does not reject requests whose client has received tokens.
        self._schedule(work, replace(self._arrived(job), generated=1))
        return work

    def _remembered(self) -> int:
        """Return how many earlier prompts to store in the pools before the start: up to twice the pools' capacity."""
        room = 2 * len(self.prefill) * (self.settings.pool_blocks + self.settings.ssd_blocks)
        for count, (_, blocks) in enumerate(reversed(self._workload.before), 1):
            room -= len(blocks)
            if room < 0:
                return count
        return len(self._workload.before)

    def _join(self) -> None:
        for name, node in self.prefill.items():
            self._broadcast(NodeJoined(NodeView(node.pool_id, "pool", 1, f"host of {name}")))
        settings = self.settings
        num_prefill = 0 if settings.is_aggregated else settings.prefill_nodes
        num_decode = settings.decode_nodes + (settings.prefill_nodes if settings.is_aggregated else 0)
        decode_role: Role = "aggregated" if settings.is_aggregated else "decode"
        skipped = num_prefill if settings.hosts else 0
        workers: list[tuple[str, Role]] = [(name, "prefill") for name in [*self.prefill][:num_prefill]]
        workers += [(name, decode_role) for name in [*self.decode][skipped : skipped + num_decode]]
        for name, role in workers:
            self._broadcast(NodeJoined(self._view(name, role)))
        for name, role in workers:
            self._node(name, role).reporter.start()

    def _view(self, name: str, role: Role) -> NodeView:
        settings = self._settings_of(name)
        host = self.prefill[name] if role == "prefill" else self._host_of[name]
        return NodeView(
            node_id=name,
            role=role,
            incarnation=1 + self._incarnations[name],
            host_id=f"host of {name}",
            pool_node_id=host.pool_id,
            model=MODEL,
            block_tokens=self._workload.block_tokens,
            capacity_tokens=settings.capacity_tokens,
            max_batch=settings.max_batch,
            kv_bytes_per_token=self.truth.profile.kv_bytes_per_token,
            window_blocks=-(-self.truth.profile.window_tokens // self._workload.block_tokens),
            window_bytes_per_token=self.truth.profile.window_bytes_per_token,
            hardware=self._kinds[name].hardware if name in self._kinds else "",
            chunk_tokens=settings.chunk_tokens,
        )

    def _node(self, name: str, role: Role) -> SimulatedPrefillNode | SimulatedDecodeNode:
        return self.prefill[name] if role == "prefill" else self.decode[name]

    def _settings_of(self, name: str) -> ServingSettings:
        """Return the settings with the limits of the node's kind."""
        kind, settings = self._kinds.get(name), self.settings
        if kind is None:
            return settings
        tokens, max_batch = int(kind.engine["capacity_tokens"]), int(kind.engine["max_batch"])
        block_tokens = self._workload.block_tokens
        return replace(settings, capacity_tokens=tokens // block_tokens * block_tokens, max_batch=max_batch)

    def join(self, name: str, role: Role) -> None:
        """Let the worker of a host join in a role; a worker that has joined in another one changes to it."""
        self._broadcast(NodeJoined(self._view(name, role)))
        self._node(name, role).reporter.start()

    def drain(self, name: str, role: Role) -> None:
        """Report that the worker takes no new work, after `network_s`; it finishes the requests that it has."""
        self._node(name, role).reporter.drain()

    def stop(self, name: str, role: Role) -> None:
        """End the reports of an idle worker that changes its role or leaves."""
        assert not self.num_claims[name], f"{name} stops with {self.num_claims[name]} requests"
        self._node(name, role).reporter.stop()

    def leave(self, name: str, role: Role) -> None:
        """Remove an idle worker; its host's pool node stays."""
        self.stop(name, role)
        self._broadcast(NodeLost(name, 1 + self._incarnations[name]))
        self._incarnations[name] += 1

    @property
    def conductor(self) -> Conductor:
        """The first conductor."""
        return self.conductors[0]

    def _tell(self, conductor: int, event: Event) -> list[Decision]:
        return self.conductors[conductor].on_event(self.clock.now_ns, event)

    def _broadcast(self, event: Event) -> None:
        """Send an event of a node to all conductors."""
        for conductor in range(len(self.conductors)):
            self._tell(conductor, event)

    def _conductor_of(self, job: Arrival) -> int:
        """Return the number of the conductor that places the request."""
        return job.index % len(self.conductors)

    def _tick(self) -> None:
        for conductor in range(len(self.conductors)):
            for decision in self._tell(conductor, Tick()):
                if isinstance(decision, Shrink):
                    blocks = self._copies.pop((decision.pool, decision.match_key), ())
                    self.pools.drop_copy(decision.pool, decision.match_key, decision.keep_blocks, blocks)
                elif isinstance(decision, SwitchRole):
                    self.on_switch(decision)
        self.clock.after(round(self.settings.tick_s * NS), self._tick)

    def _arrive(self, index: int) -> None:
        jobs = self._workload.jobs
        if index + 1 < len(jobs):
            self.clock.at(jobs[index + 1].arrival_ns, lambda: self._arrive(index + 1))
        self._enter(jobs[index])

    def arrive(self, job: Arrival) -> None:
        """Let a request arrive now that is not among the workload's."""
        self.num_open += 1
        self._enter(job)

    def _enter(self, job: Arrival) -> None:
        work = SimulatedRequest(job)
        self.works.append(work)
        self._schedule(work, self._arrived(job))

    def _arrived(self, job: Arrival) -> RequestArrived:
        blocks, siblings = job.blocks, self.settings.siblings
        matches = self.pools.match(blocks)
        longest = int(matches.blocks.max(initial=0))
        return RequestArrived(
            request_id=job.name,
            attempt=0,
            frontend_id=_FRONTEND,
            model=MODEL,
            prompt_tokens=job.prompt_tokens,
            max_new_tokens=self.settings.max_tokens_of(job),
            matches=matches,
            match_key=blocks[longest - 1] + 1 if longest else 0,
            tenant=job.tenant,
            priority=job.priority,
            previous_tokens=0 if self.settings.lengths == "prompt" else job.previous_tokens,
            window_tokens=self.settings.window_tokens,
            siblings=() if siblings is None else siblings.match(job, self.pools.roster, self._seed),
        )

    def _schedule(self, work: SimulatedRequest, event: RequestArrived) -> None:
        conductor = self._conductor_of(work.job)
        for decision in self._tell(conductor, event):
            match decision:
                case Place():
                    self._place(work, decision)
                case Reject(reason=reason):
                    work.reason = reason
                    self.on_reject(work, lambda: self.admit(work.job))
                    self._end(work, RequestEnd.REJECTED)
                case Copy():
                    blocks = work.job.blocks[: decision.num_blocks]
                    work.keeps_fetched = decision.keeps_fetched
                    if decision.keeps_fetched:
                        self._keep(decision, blocks)
                    else:
                        self._copy(conductor, decision, blocks)
                case _:
                    raise AssertionError(f"unexpected decision for an arrival: {decision}")

    def _place(self, work: SimulatedRequest, place: Place) -> None:
        work.prefill_node, work.decode_node, work.holders = place.prefill, place.decode, place.holders
        work.helpers, work.sibling = place.helpers, place.sibling
        work.reused_tokens = place.reuse_blocks * self._workload.block_tokens
        work.predicted_ttft_s, work.predicted_tbt_s = place.predicted_ttft_s, place.predicted_tbt_s
        work.asks_again = place.asks_again
        now_s, turn = self.clock.now_ns / NS, place.turn
        work.queue_entry = QueueEntry(
            arrived_s=now_s - turn.waited_s,
            due_s=now_s + turn.due_in_s,
            ages_s=now_s + turn.ages_in_s,
            level=turn.level,
            account=turn.account,
            start_ns=turn.start_ns,
            priority=turn.priority,
        )
        for holder in place.holders:
            self.pools.await_use(holder.pool, self.clock.now_ns, work.job.blocks)
        work.named_helpers = place.helpers
        self.num_claims.update(name for name in (place.prefill, place.decode, *place.helpers) if name)
        self.on_place(work)
        # Two messages: to the frontend, and from there to the node.
        submit = self.prefill[place.prefill].submit if place.decode else self._keep_whole
        self.clock.after(2 * self._network_ns, lambda: submit(work))

    def _keep_whole(self, work: SimulatedRequest) -> None:
        """Run a request on one node that computes the prompt and the answer: aggregated, or with colocated prefill."""
        self.decode[work.prefill_node].reserve(work, self._load_whole)

    def _load_whole(self, work: SimulatedRequest) -> None:
        node, host = self.decode[work.prefill_node], self._host_of[work.prefill_node]
        self.clock.at(host.load(work, node.into, node.reporter), lambda: node.prefill(work))

    def _stored(self, work: SimulatedRequest) -> None:
        job, pool = work.job, self._host_of[work.prefill_node]
        first = 0 if work.keeps_fetched else work.reused_tokens // self._workload.block_tokens
        if job.retain is not None:
            self.pools.retain(pool.pool_id, self.clock.now_ns, job.blocks, job.retain)
        blocks = self.settings.stored_blocks(job.blocks, self._workload.block_tokens)
        self.pools.store(pool.pool_id, self.clock.now_ns, blocks, first)

    def _prefilled(self, work: SimulatedRequest) -> None:
        for name in work.named_helpers:
            self._unclaim(name)
        if work.asks_again:
            self.clock.after(self._network_ns, lambda: self._ask(work))
        else:
            self._go_on(work)

    def _ask(self, work: SimulatedRequest) -> None:
        """Ask the policy whether the prefilled request may decode; its client has not received a token yet."""
        for decision in self._tell(self._conductor_of(work.job), DecodeAsked(work.job.name, 0)):
            if isinstance(decision, Reject):
                work.reason = decision.reason
                self.on_reject(work, lambda: self._let_decode(work))
                self.prefill[work.prefill_node].release(work)
                self._unclaim(work.prefill_node)
                self.decode[work.decode_node].release(work)
                self._end(work, RequestEnd.WITHHELD)
                return
        work.first_token_ns = self.clock.now_ns + self._network_ns
        self.clock.after(self._network_ns, lambda: self._go_on(work))

    def _let_decode(self, work: SimulatedRequest) -> SimulatedRequest:
        self._go_on(work)
        return work

    def _go_on(self, work: SimulatedRequest) -> None:
        ready_ns = max(self.clock.now_ns, work.sent_ns) + self._handoff_ns
        self.clock.at(ready_ns, lambda: self._hand_over(work))

    def _hand_over(self, work: SimulatedRequest) -> None:
        self.prefill[work.prefill_node].release(work)
        self._unclaim(work.prefill_node)
        decode = self.decode[work.decode_node]
        if work.generated < work.job.output_tokens:
            decode.join(work)
        else:
            decode.release(work)
            self._finished(work)

    def _finished(self, work: SimulatedRequest) -> None:
        if work.job.retain is not None:  # the pause begins with the answer's end
            host = self.prefill[work.prefill_node] if work.decode_node else self._host_of[work.prefill_node]
            self.pools.retain(host.pool_id, self.clock.now_ns, work.job.blocks, work.job.retain)
        self._end(work, RequestEnd.FINISHED)

    def _end(self, work: SimulatedRequest, end: RequestEnd) -> None:
        assert work.end is None, f"{work.job.name} ends twice"
        work.end, work.end_ns = end, self.clock.now_ns
        self.num_open -= 1
        if end is RequestEnd.REJECTED:
            return
        self.on_end(work)
        self._unclaim(work.decode_node or work.prefill_node)
        event = RequestCompleted(
            work.job.name,
            0,
            "finished" if end is RequestEnd.FINISHED else "rejected",
            ttft_s=work.ttft_s,
            mean_tbt_s=work.mean_tbt_s,
            slow_tbt_s=work.tbt_s,
            generated=work.generated,
        )
        self.clock.after(self._network_ns, lambda: self._complete(work.job, event))

    def _unclaim(self, name: str) -> None:
        self.num_claims[name] -= 1
        if not self.num_claims[name]:
            self.on_idle(name)

    def _complete(self, job: Arrival, event: RequestCompleted) -> None:
        self._tell(self._conductor_of(job), event)

    def _copy(self, conductor: int, copy: Copy, blocks: tuple[int, ...]) -> None:
        missing = len(blocks) - self.pools.held(copy.target, blocks)[0]
        nbytes = self.truth.profile.read_nbytes(missing * self._workload.block_tokens)
        links = (self._hosts[copy.source].out, self._hosts[copy.target].into)
        began_ns = self.clock.now_ns
        end_ns = send(began_ns, links, self.truth.transfer_ns("fetch", nbytes))
        self.clock.at(end_ns, lambda: self._copied(conductor, copy, blocks, nbytes, (end_ns - began_ns) / NS))

    def _copied(self, conductor: int, copy: Copy, blocks: tuple[int, ...], nbytes: int, seconds: float) -> None:
        self.copied_bytes += nbytes
        self.pools.store(copy.target, self.clock.now_ns, blocks)
        self._keep(copy, blocks)
        self._tell(conductor, CopyFinished(copy.source, copy.target, copy.match_key, nbytes, seconds))

    def _keep(self, copy: Copy, blocks: tuple[int, ...]) -> None:
        """Record the copied blocks, or those that the prefill node will store, as a replica."""
        self.pools.copied(copy.target, blocks, copy.match_key)
        self._copies[copy.target, copy.match_key] = blocks
