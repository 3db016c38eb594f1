"""What other objectives would have done to the recent past: the rule of admission, asked again of requests that were.

Pure. It says what the rule would have said to each request, with what was predicted of it then, and how the requests
that were served stand to the other objectives. It cannot say how long a request that was turned away would have taken,
nor how much quicker or slower the others would have been had more or fewer been let in.
"""

from dataclasses import dataclass

from conductor.policy.config import NS, PolicyConfig
from conductor.policy.objectives import EffectiveObjectives, ObjectiveBook, SloRecord
from conductor.policy.past import Past, PastRequest
from conductor.policy.rule import unmet, usable_s

__all__ = ["Preview", "PreviewRow", "preview"]


@dataclass(slots=True)
class PreviewRow:
    """Requests of a model and a class (as the other objectives have it; "" is none).

    Every request is in one of the first four. `met_*` and `missed_*` count those that finished with their times
    measured and that have an objective, before and now; a request of `now_rejected` that would have met what the
    other objectives ask is in `now_rejected_met`: turning it away would have been wrong.
    """

    model: str
    slo_class: str
    stay_admitted: int = 0
    now_rejected: int = 0
    now_admitted: int = 0  # were turned away; how long they would have taken, nobody knows
    stay_rejected: int = 0
    met_before: int = 0
    missed_before: int = 0
    met_now: int = 0  # of those that would still be admitted
    missed_now: int = 0
    now_rejected_met: int = 0
    now_rejected_missed: int = 0
    unmeasured: int = 0  # admitted, and cancelled, failed or still under way


@dataclass(frozen=True, slots=True)
class Preview:
    """`admission` "enforce": the rule turns requests away; "shadow": it only counts whom it would; "off", or the
    `mode` "none": it says nothing, and only how the served stand to the objectives can change."""

    rows: tuple[PreviewRow, ...]
    judged: int
    span_s: float  # from the first of them until now
    forgotten: int  # came before them, and are no longer known
    admission: str
    mode: str


def preview(now_ns: int, past: Past, record: SloRecord, config: PolicyConfig) -> Preview:
    """What `record` would have done to `past`, which was judged under `config`."""
    book, rows = ObjectiveBook(record), dict[tuple[str, str], PreviewRow]()
    judged, first_ns = 0, now_ns
    for request in past:
        resolved = book.resolve(request.model, request.tenant, request.slo_class)
        wanted = resolved.effective(
            request.header_ttft_s, request.header_tbt_s, request.idle_ttft_s, request.idle_tbt_s
        )
        key = request.model, wanted.slo_class
        _add(rows.setdefault(key, PreviewRow(*key)), request, wanted, config)
        judged, first_ns = judged + 1, min(first_ns, request.at_ns)
    in_order = tuple(row for _, row in sorted(rows.items()))
    span_s = (now_ns - first_ns) / NS
    return Preview(in_order, judged, span_s, past.num_forgotten, config.admission, config.admission_mode)


def _add(row: PreviewRow, request: PastRequest, wanted: EffectiveObjectives, config: PolicyConfig) -> None:
    was_rejected = bool(request.rejection or request.unwanted)
    is_rejected = _is_rejected(request, wanted, config)
    if was_rejected:
        row.stay_rejected += is_rejected
        row.now_admitted += not is_rejected
    else:
        row.now_rejected += is_rejected
        row.stay_admitted += not is_rejected
    if request.rejection:
        return
    if request.outcome != "finished":
        row.unmeasured += 1
        return
    before, now = _met(request, request.objectives), _met(request, wanted)
    row.met_before += before is True
    row.missed_before += before is False
    if is_rejected:
        row.now_rejected_met += now is True
        row.now_rejected_missed += now is False
    else:
        row.met_now += now is True
        row.missed_now += now is False


def _is_rejected(request: PastRequest, wanted: EffectiveObjectives, config: PolicyConfig) -> bool:
    """By the rule, or by what no objective changes: a queue that is too long, or the nodes being gone later."""
    if config.admission_mode != "none" and config.admission != "off":
        ttft_s, tbt_s = usable_s(wanted.ttft_s), usable_s(wanted.tbt_s)
        if unmet(request.forecast, ttft_s, tbt_s):
            return True
        if request.late is not None and unmet(request.late, 0.0, tbt_s):
            return True
    return request.forecast.waited_s > config.max_queue_s


def _met(request: PastRequest, wanted: EffectiveObjectives) -> bool | None:
    """Whether a finished request kept all its objectives; None: it had none, or nothing was measured."""
    pairs = ((wanted.ttft_s, request.ttft_s), (wanted.tbt_s, request.tbt_s))
    kept = [measured_s <= bound_s for bound_s, measured_s in pairs if bound_s and measured_s > 0]
    return all(kept) if kept else None
