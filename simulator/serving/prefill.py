"""Simulated prefill node: scheduling order, loads that overlap computation, chunks by the live batch policy, push,
hand-over."""

from collections.abc import Callable, Mapping

from conductor.policy.decisions import SiblingChoice
from conductor.policy.events import Held, NodeReported, PrefillSample, TransferSample
from simulator.serving.clock import NS, SimulatedLink, send
from simulator.serving.decode import SimulatedDecodeNode
from simulator.serving.observed_load import ObservedLoad
from simulator.serving.pools import SimulatedPools
from simulator.serving.prefill_group import SimulatedGroup, form
from simulator.serving.reporter import SimulatedReporter, held_of
from simulator.serving.requests import SimulatedRequest
from simulator.serving.settings import SimulationContext
from worker.policy import BatchLimits, BatchPlan, plan_step
from worker.policy.scheduling_order import RequestKey, WaitQueue


class SimulatedPrefillNode:
    """Prefill node with its host's network, memory and SSD links, which its pool node shares."""

    def __init__(
        self,
        node_id: str,
        pool_id: str,
        context: SimulationContext,
        pools: SimulatedPools,
        decode_nodes: Mapping[str, SimulatedDecodeNode],
        report: Callable[[NodeReported], object],
        prefilled: Callable[[SimulatedRequest], None],
    ) -> None:
        """`pool_id`: pool node of the same host. `prefilled(work)` is called when the first token is generated."""
        clock, settings = context.clock, context.settings
        self.node_id = node_id
        self.pool_id = pool_id
        self.out, self.into, self.memory, self.ssd = SimulatedLink(), SimulatedLink(), SimulatedLink(), SimulatedLink()
        self.hosts: Mapping[str, SimulatedPrefillNode] = {}  # all prefill nodes by pool node
        self.others: Mapping[str, SimulatedPrefillNode] = {}  # all prefill nodes by name
        self.fetched_bytes = 0  # read from other hosts' pools
        self.reporter = SimulatedReporter(node_id, clock, settings, self._held, report)
        self._clock = clock
        self._settings = settings
        self._truth = context.costs
        self._pools = pools
        self._decode_nodes = decode_nodes
        self._block_tokens = context.block_tokens
        self._limits = BatchLimits(settings.max_batch, settings.chunk_tokens, context.block_tokens)
        self._prefilled = prefilled
        self._held_works: dict[str, SimulatedRequest] = {}
        self._wait_queue = WaitQueue()  # requests without a first token
        self._waiting: dict[RequestKey, SimulatedRequest] = {}
        self._ahead: set[RequestKey] = set()  # being loaded or computed
        self._computing: list[SimulatedRequest] = []
        self._with_siblings: list[SimulatedRequest] = []  # whose part of a sibling's layers is to be computed
        self._shared: list[tuple[SimulatedGroup, int]] = []  # enqueued chunks of prefill groups
        self._is_stepping = False

    def submit(self, work: SimulatedRequest) -> None:
        """Accept a placed request."""
        self._held_works[work.job.name] = work
        self.reporter.accepted()
        self._wait_queue.add(work.key, work.queue_entry)
        self._waiting[work.key] = work
        self._fill_places()

    def release(self, work: SimulatedRequest) -> None:
        """Forget the request after its hand-over was completed or cancelled."""
        del self._held_works[work.job.name]
        self.reporter.progress(work.job.name, "ended")

    def backlog_s(self) -> float:
        """Return the seconds of computation waiting or running on this node, by actual costs."""
        return sum(
            self._truth.chunk_s(self.node_id, work, work.computed or work.reused_tokens, work.job.prompt_tokens)
            for work in self._held_works.values()
            if not work.first_token_ns
        )

    def observed_load(self) -> ObservedLoad:
        """Return the node's load as its metrics show it; waiting requests hold no pages."""
        works = self._held_works.values()
        held = sum(work.job.prompt_tokens for work in works) - sum(w.job.prompt_tokens for w in self._waiting.values())
        return ObservedLoad(
            num_waiting=len(self._waiting),
            num_running=len(works) - len(self._waiting),
            prefill_tokens=sum(work.job.prompt_tokens - work.computed for work in works if not work.first_token_ns),
            kv_share=held / self._settings.capacity_tokens,
        )

    def _fill_places(self) -> None:
        now_s, places = self._clock.now_ns / NS, self._settings.lookahead
        while first := self._wait_queue.next_ahead(self._waiting, self._ahead, places, now_s):
            self._ahead.add(first)
            self._prepare(self._waiting.pop(first))

    def _prepare(self, work: SimulatedRequest) -> None:
        """Load the reused blocks and, in parallel, reserve pages at the decode node."""
        self._clock.at(self.load(work, self.into, self.reporter), lambda: self._loaded(work))
        self._decode_nodes[work.decode_node].reserve(work, self._reserved)

    def load(self, work: SimulatedRequest, into: SimulatedLink, reporter: SimulatedReporter) -> int:
        """Load the reused blocks of a request to the link `into` of this node or of a decode node on this host.

        Returns the time when all have arrived.
        """
        work.reused_tokens = 0
        loaded_ns = self._clock.now_ns
        for holder in work.holders:
            if holder.first_block * self._block_tokens > work.reused_tokens:
                break
            # Blocks evicted since the decision are computed instead.
            there, on_ssd = self._pools.held(holder.pool, work.job.blocks[: holder.first_block + holder.num_blocks])
            blocks = there - holder.first_block
            if blocks <= 0:
                break
            work.reused_tokens = there * self._block_tokens
            self._pools.use(holder.pool, self._clock.now_ns, work.job.blocks[:there])
            loaded_ns = max(loaded_ns, self._read(holder.pool, blocks, min(on_ssd, blocks), into, reporter))
        if work.sibling is not None:
            loaded_ns = max(loaded_ns, self._read_sibling(work, work.sibling, into, reporter))
        return loaded_ns

    def _read_sibling(
        self, work: SimulatedRequest, choice: SiblingChoice, into: SimulatedLink, reporter: SimulatedReporter
    ) -> int:
        """Read what a sibling has of the prompt after the reused tokens; return the time when it has arrived."""
        siblings, now_ns = self._settings.siblings, self._clock.now_ns
        work.sibling_tokens = max(0, choice.num_blocks * self._block_tokens - work.reused_tokens)
        if siblings is None or not work.sibling_tokens:
            return now_ns
        kv_nbytes = self._truth.profile.read_nbytes(work.sibling_tokens)
        nbytes = siblings.read_nbytes(choice, work.sibling_tokens, kv_nbytes)
        return self._send(now_ns, self.hosts[choice.pool], nbytes, into, reporter)

    def _read(self, pool: str, blocks: int, on_ssd: int, into: SimulatedLink, reporter: SimulatedReporter) -> int:
        """Read blocks of a pool node, `on_ssd` of them from its SSD; return the time when they have arrived."""
        now_ns, holder = self._clock.now_ns, self.hosts[pool]
        nbytes = self._truth.profile.read_nbytes(blocks * self._block_tokens)
        if on_ssd:
            ssd_nbytes = self._truth.profile.read_nbytes(on_ssd * self._block_tokens)
            ssd_ns = self._truth.transfer_ns("ssd_read", ssd_nbytes)
            now_ns = send(now_ns, (holder.ssd,), ssd_ns)
            holder.reporter.transfer(TransferSample(ssd_nbytes, ssd_ns / NS, "ssd_read"))
        return self._send(now_ns, holder, nbytes, into, reporter)

    def _send(
        self,
        now_ns: int,
        holder: "SimulatedPrefillNode",
        nbytes: int,
        into: SimulatedLink,
        reporter: SimulatedReporter,
    ) -> int:
        """Read bytes from a host's memory, from `now_ns` on; return the time when they have arrived."""
        path = "load" if holder is self else "fetch"
        links = (self.memory,) if holder is self else (holder.out, into)
        alone_ns = self._truth.transfer_ns(path, nbytes)
        self.fetched_bytes += nbytes if holder is not self else 0
        end_ns = send(now_ns, links, alone_ns)
        reporter.transfer(TransferSample(nbytes, (end_ns - now_ns) / NS, path))
        return end_ns

    def _pull(self, work: SimulatedRequest) -> None:
        """Let the decode node read the same blocks from their holders, in parallel."""
        decode, first = self._decode_nodes[work.decode_node], 0
        now_ns = self._clock.now_ns
        for holder in work.holders:
            blocks = min(holder.first_block + holder.num_blocks, work.reused_tokens // self._block_tokens) - first
            if blocks > 0:
                first += blocks
                nbytes = self._truth.profile.read_nbytes(blocks * self._block_tokens)
                alone_ns = self._truth.transfer_ns("fetch", nbytes)
                end_ns = send(now_ns, (self.hosts[holder.pool].out, decode.into), alone_ns)
                decode.reporter.transfer(TransferSample(nbytes, (end_ns - now_ns) / NS, "pull"))
                work.sent_ns = max(work.sent_ns, end_ns)

    def _loaded(self, work: SimulatedRequest) -> None:
        work.loaded = True
        self._begin_if_ready(work)

    def _reserved(self, work: SimulatedRequest) -> None:
        work.reserved = True
        self._pull(work)
        self._begin_if_ready(work)

    def _begin_if_ready(self, work: SimulatedRequest) -> None:
        if not (work.loaded and work.reserved):
            return
        work.computed = work.reused_tokens
        self.reporter.progress(work.job.name, "prefill_started")
        members = [self, *(self.others[name] for name in work.helpers)]
        chunks = form(work, members, self._settings, self._block_tokens) if work.helpers else []
        if chunks:
            SimulatedGroup(
                work, chunks, self._clock, self._truth, self._settings, lambda *what: self._pass_on(work, *what)
            )
            return
        work.helpers = ()
        (self._with_siblings if work.sibling_tokens else self._computing).append(work)
        self.wake()

    def enlist(self, group: SimulatedGroup, number: int) -> None:
        """Enqueue a group's chunk; it runs as soon as its predecessor has started, before this node's own chunks."""
        self._shared.append((group, number))

    def wake(self) -> None:
        """Start a step if none is running."""
        if not self._is_stepping:
            self._step()

    def _pass_on(self, work: SimulatedRequest, span: tuple[int, int], ready_ns: int) -> None:
        """Send KV computed by a group to the decode node; as in `_push`, only the last layer's bytes arrive later."""
        alone_ns = self._truth.push_ns(*span, work.job.prompt_tokens)
        sent_ns = send(self._clock.now_ns, (self.out, self._decode_nodes[work.decode_node].into), alone_ns)
        work.sent_ns = max(work.sent_ns, sent_ns, ready_ns + alone_ns // self._settings.layers)

    def _share_step(self) -> bool:
        """Start a group's chunk that may begin; return False if there is none."""
        chosen = next((chunk for chunk in self._shared if chunk[0].may_begin(chunk[1])), None)
        if chosen is None:
            return False
        group, number = chosen
        self._shared.remove(chosen)
        self._is_stepping = True
        self._clock.at(group.begin(number), lambda: self._shared_stepped(group, number))
        return True

    def _shared_stepped(self, group: SimulatedGroup, number: int) -> None:
        if group.ended(number):
            self._end_prefill(group.work)
        self._fill_places()
        self._step()

    def _sibling_step(self) -> bool:
        """Compute a sibling's part of a prompt between two steps; return False if there is none."""
        siblings = self._settings.siblings
        if not self._with_siblings or siblings is None:
            return False
        work = self._with_siblings.pop(0)
        assert work.sibling is not None
        start, end = work.computed, work.computed + work.sibling_tokens
        seconds = siblings.cost_of(work.sibling) * self._truth.chunk_s(self.node_id, work, start, end)
        work.prefill_s += seconds
        self._is_stepping = True
        self._push(work, start, end, seconds)
        self._clock.after(max(1, round(seconds * NS)), lambda: self._sibling_stepped(work, end))
        return True

    def _sibling_stepped(self, work: SimulatedRequest, end: int) -> None:
        work.computed = end
        self._computing.append(work)
        self._step()

    def _step(self) -> None:
        if self._share_step() or self._sibling_step():
            return
        now_s = self._clock.now_ns / NS
        self._computing.sort(key=lambda work: work.queue_entry.rank(now_s))
        plan = plan_step((), [(work.computed, work.job.prompt_tokens) for work in self._computing], self._limits)
        self._is_stepping = not plan.is_empty
        if plan.is_empty:
            return
        chunks = [(self._computing[chunk.index], chunk) for chunk in plan.prefill]
        seconds = [self._truth.chunk_s(self.node_id, work, chunk.start, chunk.end) for work, chunk in chunks]
        for (work, chunk), one_s in zip(chunks, seconds, strict=True):
            work.prefill_s += one_s
            self._push(work, chunk.start, chunk.end, sum(seconds))
        self._clock.after(max(1, round(sum(seconds) * NS)), lambda: self._stepped(plan))

    def _push(self, work: SimulatedRequest, start: int, end: int, step_s: float) -> None:
        """Send the chunk's KV layer by layer while it is computed: only its last layer's bytes arrive later."""
        alone_ns = self._truth.push_ns(start, end, work.job.prompt_tokens)
        tail_ns = self._clock.now_ns + round(step_s * NS) + alone_ns // self._settings.layers
        sent_ns = send(self._clock.now_ns, (self.out, self._decode_nodes[work.decode_node].into), alone_ns)
        work.sent_ns = max(work.sent_ns, sent_ns, tail_ns)

    def _stepped(self, plan: BatchPlan) -> None:
        done: list[SimulatedRequest] = []
        for chunk in plan.prefill:
            work = self._computing[chunk.index]
            work.computed = chunk.end
            if chunk.last:
                done.append(work)
        for work in done:
            self._computing.remove(work)
            self._end_prefill(work)
        self._fill_places()
        self._step()

    def _end_prefill(self, work: SimulatedRequest) -> None:
        work.first_token_ns = self._clock.now_ns
        work.generated = 1
        self._wait_queue.remove(work.key)
        self._ahead.discard(work.key)
        job = work.job
        new = job.prompt_tokens - work.reused_tokens
        slides = job.prompt_tokens > self._settings.held_tokens(job.prompt_tokens)
        if not (work.helpers or work.sibling_tokens or slides):  # otherwise the time is not that of a plain prefill
            self.reporter.prefill(PrefillSample(new, work.reused_tokens, work.prefill_s))
        self.reporter.progress(job.name, "prefill_ended")
        if job.retain is not None:  # before anything is evicted for it
            self._pools.retain(self.pool_id, self._clock.now_ns, job.blocks, job.retain)
        first = 0 if work.keeps_fetched else work.reused_tokens // self._block_tokens
        if not work.sibling_tokens:  # otherwise nothing of it is the model's own KV
            blocks = self._settings.stored_blocks(job.blocks, self._block_tokens)
            self._pools.store(self.pool_id, self._clock.now_ns, blocks, first)
        self._prefilled(work)

    def _held(self) -> tuple[Held, ...]:
        now_s = self._clock.now_ns / NS
        return tuple(held_of(work, now_s, self._settings) for work in self._held_works.values())
