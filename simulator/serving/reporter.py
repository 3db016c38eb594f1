"""Reports of a simulated node: requests held and events, with the intervals and delays of the live reporter."""

from collections.abc import Callable

from conductor.policy.events import (
    NO_QUEUE_KEY,
    DecodeSample,
    Held,
    NodeReported,
    Phase,
    PrefillSample,
    Progress,
    QueueKey,
    TransferSample,
)
from simulator.serving.clock import NS, VirtualClock
from simulator.serving.requests import SimulatedRequest
from simulator.serving.settings import ServingSettings


def held_of(work: SimulatedRequest, now_s: float, settings: ServingSettings) -> Held:
    """Return the report of a request by the node that computes its prompt, as live workers report it."""
    job, entry = work.job, work.queue_entry
    turn = NO_QUEUE_KEY
    if not work.first_token_ns:
        times = now_s - entry.arrived_s, entry.due_s - now_s, entry.ages_s - now_s
        turn = QueueKey(entry.level, entry.account, entry.start_ns, entry.priority, *times)
    return Held(
        job.name,
        0,
        remaining_prefill_tokens=settings.held_tokens(job.prompt_tokens) - work.reused_tokens,
        prompt_tokens=settings.held_tokens(job.prompt_tokens),
        max_new_tokens=settings.max_tokens_of(job),
        decode_node=work.decode_node,
        turn=turn,
    )


class SimulatedReporter:
    """One node's stream of reports to the conductor."""

    def __init__(
        self,
        node_id: str,
        clock: VirtualClock,
        settings: ServingSettings,
        held: Callable[[], tuple[Held, ...]],
        send: Callable[[NodeReported], object],
    ) -> None:
        """`held()` returns the requests that the node holds; `send(report)` is called when a report arrives."""
        self._node_id = node_id
        self._clock = clock
        self._held = held
        self._send = send
        self._every_ns = round(settings.report_every_s * NS)
        self._coalesce_ns = round(settings.coalesce_s * NS)
        self._network_ns = round(settings.network_s * NS)
        self._has_others = settings.conductors > 1
        self._progress: list[Progress] = []
        self._prefills: list[PrefillSample] = []
        self._decodes: list[DecodeSample] = []
        self._transfers: list[TransferSample] = []
        self._is_due = False
        self._reported_ns = 0
        self._is_draining = False
        self._is_running = False
        self._round = 0  # number of reports; timers of earlier rounds are ignored

    def start(self) -> None:
        """Send an empty first report."""
        self._is_running, self._is_draining = True, False
        self._report(self._round)

    def drain(self) -> None:
        """Report at once that the node takes no new work."""
        self._is_draining = True
        self._report(self._round)

    def stop(self) -> None:
        """Deliver a last report and send none until the next start."""
        self._send(self._taken())
        self._is_running = self._is_due = False
        self._round += 1

    def progress(self, request_id: str, phase: Phase) -> None:
        self._progress.append(Progress(request_id, 0, phase))
        self._report_soon()

    def accepted(self) -> None:
        """Report a request that the node has taken; the conductor that placed it knows it already."""
        if self._has_others and self._is_running:
            self._is_due = True
            self._later(max(0, self._reported_ns + self._coalesce_ns - self._clock.now_ns))

    def _report_soon(self) -> None:
        if self._is_running and not self._is_due:
            self._is_due = True
            self._later(self._coalesce_ns)

    def prefill(self, sample: PrefillSample) -> None:
        self._prefills.append(sample)

    def decode(self, sample: DecodeSample) -> None:
        self._decodes.append(sample)

    def transfer(self, sample: TransferSample) -> None:
        if self._is_running:  # a host without a worker also sends blocks of its pool
            self._transfers.append(sample)

    def _later(self, delay_ns: int) -> None:
        number = self._round
        self._clock.after(delay_ns, lambda: self._report(number))

    def _report(self, number: int) -> None:
        if number != self._round:
            return
        self._round += 1
        self._is_due = False
        self._reported_ns = self._clock.now_ns
        report = self._taken()
        self._clock.after(self._network_ns, lambda: self._deliver(report))
        self._later(self._every_ns)

    def _taken(self) -> NodeReported:
        """Return a report of what has happened since the last one."""
        report = NodeReported(
            self._node_id,
            draining=self._is_draining,
            held=self._held(),
            progress=tuple(self._progress),
            prefills=tuple(self._prefills),
            decodes=tuple(self._decodes),
            transfers=tuple(self._transfers),
        )
        self._progress, self._prefills, self._decodes, self._transfers = [], [], [], []
        return report

    def _deliver(self, report: NodeReported) -> None:
        self._send(report)
