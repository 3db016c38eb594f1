"""The policy's entry point: dispatches events to the modules that handle them, and counts decisions."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from conductor.policy.admission import judge_after_prefill, longest_prompts, unmeetable
from conductor.policy.admission_evaluation import AdmissionEvaluation, RejectedCase
from conductor.policy.costs import DECODE, PREFILL
from conductor.policy.decisions import Admissible, Copy, Decision, Place, Reject, ReleaseOrphan, Shrink, SwitchRole
from conductor.policy.events import (
    NS,
    AdmissionAsked,
    CopyFinished,
    CostsGiven,
    DecodeAsked,
    Event,
    FrontendLost,
    NodeJoined,
    NodeLost,
    NodeReported,
    NodeView,
    ObjectivesChanged,
    RequestArrived,
    RequestCompleted,
    Tick,
    TransferSample,
    clamp_event,
)
from conductor.policy.fairness import Account
from conductor.policy.history import ERROR_BOUNDS, Attainment, PredictionErrors, RequestHistory
from conductor.policy.kernels import prefill_kernels
from conductor.policy.objectives import (
    DEFAULT_HEADERS,
    HeaderRule,
    ObjectiveBook,
    SloRecord,
    objective_text,
    record_from_text,
)
from conductor.policy.placement.colocated import COLOCATED_OUTCOMES
from conductor.policy.placement.decode import decode_kernels
from conductor.policy.placement.place import place, preview
from conductor.policy.queue_position import accounts, accrue_endless
from conductor.policy.replication import Replication
from conductor.policy.reports import complete, lose_node, mismatches, report
from conductor.policy.requests import NONE
from conductor.policy.role_plan import NodeLoads, plan_roles, plan_sizes
from conductor.policy.state import ClusterState, StateView
from settings.conductor import PolicyConfig

__all__ = ["Conductor"]

_EXTRAPOLATED: Final = {what: f"extrapolated_{what}" for what in ("prefill", "decode", "load", "fetch", "ssd_read")}


class Conductor:
    """Deterministic state machine of one conductor, used alike by the server, the simulator and replays of logs.

    The same events at the same times give the same decisions.
    """

    def __init__(self, config: PolicyConfig, default_headers: HeaderRule = DEFAULT_HEADERS) -> None:
        """`default_headers`: the rule for headers of an objectives record that names none."""
        self._state = ClusterState(config, default_headers)
        self.loads = NodeLoads()
        self._now_ns = 0
        prefill_kernels(), decode_kernels()  # compile or load them now, so that the first decision is not delayed

    def on_event(self, now_ns: int, event: Event) -> list[Decision]:
        """Apply one event and return the decisions that follow from it.

        `now_ns` may have any origin; a time before that of the last event is replaced by the last event's.
        """
        state = self._state
        now_ns = self._now_ns = max(now_ns, self._now_ns)
        event = clamp_event(event)
        if state.started_ns is None:
            state.started_ns = now_ns
        state.pass_time(now_ns)
        decisions: list[Decision] = []
        match event:
            case RequestArrived():
                decisions = place(now_ns, state, event)
            case AdmissionAsked(request):
                decisions = [preview(now_ns, state, request)]
            case DecodeAsked():
                decisions = self._decode_asked(now_ns, event)
            case RequestCompleted():
                complete(now_ns, state, event)
            case NodeReported():
                report(now_ns, state, event)
            case NodeJoined(node):
                known = state.nodes.get(node.node_id)
                if known is not None and known.incarnation != node.incarnation:
                    lose_node(now_ns, state, known)
                state.nodes.add(node)
                state.slowdowns.make_room(state.nodes.num_slots)
                state.mark_alive(node.node_id, now_ns)
                if node.role != "pool":
                    state.costs_of(node.model)
                    self._compare(node)
                    slots = [state.nodes.slot(other.node_id) for other in state.nodes.of_kind(node)]
                    state.slowdowns.start_like(state.nodes.slot(node.node_id), np.array(slots, np.int64))
            case NodeLost(node_id, incarnation):
                known = state.nodes.get(node_id)
                if known is not None and known.incarnation == incarnation:
                    lose_node(now_ns, state, known)
            case CopyFinished():
                self._copy_finished(now_ns, event)
            case ObjectivesChanged(version, content):
                state.slo = ObjectiveBook(record_from_text(content), version, state.default_headers)
            case CostsGiven(model):
                state.given[model] = event
                state.transfers.give(event.paths)
                if model in state.costs:
                    state.costs[model].give(event)
            case FrontendLost(frontend_id):
                decisions = self._release_requests_of(now_ns, frontend_id)
            case Tick():
                state.forget_recent(now_ns)
                state.count_running(now_ns)
                state.evaluation.pass_time(now_ns, StateView(state))
                self.loads.pass_time(now_ns, state)
                self._adapt_admission(now_ns)
                accrue_endless(now_ns, state)
                plan_sizes(now_ns, state)
                decisions = [*self._release_orphans(now_ns), *self._shrink(now_ns), *plan_roles(now_ns, state)]
        self._count(event, decisions)
        return decisions

    def ready_models(self) -> list[str]:
        """Return the models for which a request can currently be placed."""
        return [model for model in self.models() if self._serves(model)]

    @property
    def suspects(self) -> frozenset[str]:
        """Joined nodes that had exceeded the report time-out at the last event; they get no work until they report."""
        return self._state.liveness.suspects

    @property
    def slo(self) -> ObjectiveBook:
        """Record of objectives in force; read-only."""
        return self._state.slo

    def unmeetable(self, record: SloRecord) -> list[str]:
        """Return one message per objective that no node could ever meet."""
        return unmeetable(record, self._state.nodes, self._state.costs)

    def longest_prompts(self, record: SloRecord) -> list[str]:
        """Return one message per TTFT objective with the longest prompt for which an idle node meets it."""
        return longest_prompts(record, self._state.nodes, self._state.costs)

    @property
    def evaluation(self) -> AdmissionEvaluation:
        """Evaluation of past rejections and admissions; read-only."""
        return self._state.evaluation

    def rejections(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield (model, reason, number rejected, number that shadow admission would have rejected) of served models."""
        for model, tally in sorted(self._state.tallies.items()):
            for reason in ("ttft", "tbt", "decode_capacity", "queue"):
                yield model, reason, tally.counts[f"rejected_{reason}"], tally.counts[f"unwanted_{reason}"]

    @property
    def history(self) -> RequestHistory:
        """Latest requests and their outcomes; read-only."""
        return self._state.history

    def loads_of_nodes(self) -> Iterator[tuple[NodeView, float, int]]:
        """Yield (worker, predicted seconds until its prefill queue is empty, KV tokens committed on it)."""
        loads = self._state.tally(self._now_ns)
        for node in self._state.nodes:
            if node.role != "pool":
                slot = self._state.nodes.slot(node.node_id)
                yield node, float(loads["queued_ns"][slot]) / NS, int(loads["committed"][slot])

    @property
    def config(self) -> PolicyConfig:
        """Configuration of the policy."""
        return self._state.config

    @property
    def attainment(self) -> Attainment:
        """Counts of requests that met or missed their objectives; read-only."""
        return self._state.attainment

    @property
    def replication(self) -> Replication:
        """Costs and savings of copied prefixes; read-only."""
        return self._state.replication

    @property
    def errors(self) -> PredictionErrors:
        """Histograms of prediction errors; read-only."""
        return self._state.errors

    @property
    def refused_samples(self) -> Mapping[str, Mapping[str, int]]:
        """Number of rejected measurements, by node id and reason."""
        return self._state.refused_samples

    def slowdowns(self) -> Iterator[tuple[NodeView, float, float]]:
        """Yield (worker, its slowdown factor for prefill, its slowdown factor for decode); 1 is its model's norm."""
        for node in self._state.nodes:
            if node.role != "pool":
                slot = self._state.nodes.slot(node.node_id)
                yield node, self._state.slowdowns.of(PREFILL, slot), self._state.slowdowns.of(DECODE, slot)

    def extrapolations(self) -> Iterator[tuple[str, str, int]]:
        """Yield (model, kind of prediction, number of predictions beyond the measured range)."""
        for model, tally in sorted(self._state.tallies.items()):
            for name, count in sorted(tally.counts.items()):
                if name.startswith("extrapolated_"):
                    yield model, name.removeprefix("extrapolated_"), count

    def colocated_outcomes(self) -> Iterator[tuple[str, str, int]]:
        """Yield (model, outcome of considering colocated prefill, number of placed requests)."""
        for model, tally in sorted(self._state.tallies.items()):
            for outcome in COLOCATED_OUTCOMES:
                if count := tally.counts[f"undivided_{outcome}"]:
                    yield model, outcome, count

    def desired_nodes(self) -> Iterator[tuple[str, str, int]]:
        """Yield (model, role, number of nodes that its demand needs) of served models."""
        for model, sizing in sorted(self._state.sizing.items()):
            for role, own in sorted(sizing.roles.items()):
                if own.wanted is not None:
                    yield model, role, own.wanted

    def take_warnings(self) -> list[str]:
        """Return the warnings for operators; each is returned once."""
        warnings, self._state.warnings = self._state.warnings, []
        return warnings

    def tenants(self) -> Iterator[tuple[str, Account, int]]:
        """Yield (model, account, number of its live requests), the shared account included."""
        yield from accounts(self._state)

    def models(self) -> list[str]:
        """Return the models that joined nodes serve, sorted."""
        return sorted({node.model for node in self._state.nodes if node.role != "pool"})

    def validate(self) -> tuple[list[str], dict[str, int]]:
        """Check the request table; return (problems found, counts), where all counts are 0 without requests."""
        state, requests = self._state, self._state.requests
        slots = {state.nodes.slot(node.node_id) for node in state.nodes}
        problems = []
        for row, claim in enumerate(requests.claims):
            at = [int(requests.column(name)[row]) for name in ("prefill_node", "decode_node", "sender")]
            if at[0] == NONE and at[1] == NONE:
                problems.append(f"request {claim.request_id} claims nothing but is still in the request table")
            if any(slot != NONE and slot not in slots for slot in at):
                problems.append(f"request {claim.request_id} has a claim on a node that has left")
        counts = {
            "requests": len(requests),
            "committed_tokens": int(state.tally(0)["committed"].sum()),
            "prefills": int(np.count_nonzero(requests.column("prefill_node") != NONE)),
            "sends": int(np.count_nonzero(requests.column("sender") != NONE)),
            "copies": len(state.copies),
        }
        return problems, counts

    def snapshot(self, now_ns: int) -> dict[str, Any]:
        """Return the state as a JSON object, for `Conductor.State`."""
        state = self._state
        loads = state.tally(now_ns)
        nodes = {}
        for node in state.nodes:
            slot = state.nodes.slot(node.node_id)
            nodes[node.node_id] = {
                "role": node.role,
                "model": node.model,
                "queue_s": float(loads["queued_ns"][slot]) / NS,
                "committed_tokens": int(loads["committed"][slot]),
                "capacity_tokens": node.capacity_tokens,
                "suspect": state.nodes.is_suspect(node.node_id),
                "slowdown": {"prefill": state.slowdowns.of(PREFILL, slot), "decode": state.slowdowns.of(DECODE, slot)},
                "refused_samples": dict(sorted(state.refused_samples.get(node.node_id, {}).items())),
            }
        return {
            "nodes": nodes,
            "requests": len(state.requests),
            "copies_under_way": len(state.copies),
            "replication": {
                "replicas": len(state.replication),
                "saved_s": state.replication.saved_s,
                "spent_s": state.replication.spent_s,
                "used_again": state.replication.used_again,
            },
            "counters": dict(sorted(state.counts.items())),
            "transfers": state.transfers.summary(),
            "prediction_errors": {
                "bounds": list(ERROR_BOUNDS),
                "histograms": [dataclasses.asdict(errors) for errors in state.errors],
            },
            "models": {model: self._model_snapshot(model) for model in sorted(state.costs)},
        }

    def _model_snapshot(self, model: str) -> dict[str, Any]:
        state = self._state
        tally, objectives = state.tally_of(model), state.slo.resolve(model, "", "")
        return {
            "ready": self._serves(model),
            "objectives": {"ttft": objective_text(objectives.ttft), "tbt": objective_text(objectives.tbt)},
            "costs": state.costs[model].summary(),
            "counters": dict(sorted(tally.counts.items())),
            "admission": self._admission_snapshot(model),
            "prediction_error": {
                "ttft_s": tally.ttft_error.mean_s,
                "ttft_samples": tally.ttft_error.num_samples,
                "tbt_s": tally.tbt_error.mean_s,
                "tbt_samples": tally.tbt_error.num_samples,
            },
        }

    def _compare(self, node: NodeView) -> None:
        given = self._state.given.get(node.model)
        if given is not None and (found := mismatches(given, node)):
            self._state.warnings.append(
                f"node {node.node_id} does not match the cost profile {given.name!r} of model {node.model!r}: "
                f"{'; '.join(found)}. Predictions start from the profile and adapt to what the node reports"
            )

    def _admission_snapshot(self, model: str) -> dict[str, Any]:
        evaluation = self._state.evaluation
        share, low, high, judged = evaluation.false_share(model)
        return {
            "mode": self._state.config.admission_mode,
            "admission": self._state.config.admission,
            "false_rejects": {"share": share, "interval": [low, high], "judged": judged},
            "admitted": {outcome: n for (name, outcome), n in sorted(evaluation.admissions.items()) if name == model},
            "length_groups": len(self._state.lengths),
        }

    def _serves(self, name: str) -> bool:
        model = self._state.nodes.model(name)
        if model is None or not len(model.prefill):
            return False
        return len(model.decode) > 0 or bool(model.prefill.is_aggregated.any())

    def _copy_finished(self, now_ns: int, event: CopyFinished) -> None:
        state = self._state
        extent = state.copies.end(event.target, event.match_key)
        if extent is None or event.nbytes == 0:
            state.replication.failed(event)
        else:
            state.transfers.add(TransferSample(event.nbytes, event.seconds, "copy"))
            state.replication.made(now_ns, event, extent)
        state.counts["copied_bytes"] += event.nbytes

    def _decode_asked(self, now_ns: int, event: DecodeAsked) -> list[Decision]:
        state = self._state
        judgement = judge_after_prefill(now_ns, state, event)
        row = state.requests.find(event.request_id, event.attempt)
        if row is None:
            return []
        claim = state.requests.claims[row]
        if judgement.unwanted:
            claim.unwanted = claim.unwanted or judgement.unwanted
            state.count(claim.model, f"unwanted_{judgement.unwanted}")
        if judgement.rejection is None:
            return []
        state.attainment.lost(claim.model, claim.tenant, claim.objectives, "rejected")
        state.history.turned_away(now_ns, claim.request_id, judgement.rejection.reason)
        state.history.traffic.of(claim.model).rejected["after_prefill"] += 1
        state.count(claim.model, "rejected_after_prefill")
        state.evaluation.watch(self._prefilled_case(now_ns, row))
        state.retire(row, now_ns)
        return [judgement.rejection]

    def _prefilled_case(self, now_ns: int, row: int) -> RejectedCase:
        """Return the case for the admission evaluation of a request that is rejected after its prefill.

        Its prompt is computed and its pages are reserved, so only decode steps matter.
        """
        requests, claim = self._state.requests, self._state.requests.claims[row]
        slot = int(requests.column("decode_node")[row])
        return RejectedCase(
            model=claim.model,
            reason="tbt",
            at_ns=int(requests.column("placed_ns")[row]),
            work_ns=0,
            prefill="",
            decode=next(node.node_id for node in self._state.nodes if self._state.nodes.slot(node.node_id) == slot),
            need_tokens=0,
            prompt_tokens=int(requests.column("prompt")[row]),
            objectives=claim.objectives,
            turn_ns=now_ns,
            room_ns=now_ns,
        )

    def _adapt_admission(self, now_ns: int) -> None:
        # Other conductors' requests, whose demand it does not see, take the rest of the nodes' time.
        own_share = 1 / self._state.seen_share.requests_per_own
        for model, tally in self._state.tallies.items():
            tally.margins.pass_time(now_ns)
            nodes = self._state.nodes.model(model)
            if nodes is not None:
                tally.prices.adapt(now_ns, own_share * len(nodes.prefill), own_share * len(nodes.decode))

    def _shrink(self, now_ns: int) -> list[Decision]:
        cold = self._state.replication.take_cold(now_ns)
        return [Shrink(replica.target, replica.match_key, replica.extent.had_blocks) for replica in cold]

    def _release_orphans(self, now_ns: int) -> list[Decision]:
        requests = self._state.requests
        before_ns = now_ns - round(self._state.config.orphan_timeout_s * NS)
        rows = np.flatnonzero(requests.column("seen_ns") <= before_ns)
        gone = [requests.remove(int(row)) for row in rows[::-1]]
        return [ReleaseOrphan(claim.request_id, claim.attempt) for claim in gone]

    def _release_requests_of(self, now_ns: int, frontend_id: str) -> list[Decision]:
        """Release a lost frontend's requests; those that workers still hold return with the workers' next reports."""
        state = self._state
        rows = [row for row, claim in enumerate(state.requests.claims) if claim.frontend_id == frontend_id]
        gone = [state.retire(row, now_ns, may_return=True) for row in reversed(rows)]
        return [ReleaseOrphan(claim.request_id, claim.attempt) for claim in gone]

    def _note_arrival(self, model: str, decision: Decision) -> None:
        state = self._state
        flow = state.history.traffic.of(model if model in state.costs else "")  # names come from clients
        flow.arrived += 1
        if isinstance(decision, Reject):
            flow.rejected[decision.reason] += 1

    def _count(self, event: Event, decisions: list[Decision]) -> None:
        counts: list[tuple[str, int]] = []
        if isinstance(event, RequestArrived):
            model = event.model
            if not event.attempt:
                self._note_arrival(model, decisions[0])
            counts += ("arrived", 1), ("replaced", int(event.attempt > 0))
        elif isinstance(event, AdmissionAsked):
            # The placement that follows, or does not, is counted as such.
            is_admissible = isinstance(decisions[0], Admissible)
            self._state.count_all(
                event.request.model, [("previewed", 1), ("previewed_rejected", int(not is_admissible))]
            )
            return
        elif not decisions:
            return
        else:
            model = self._state.recent[event.request_id].claim.model if isinstance(event, DecodeAsked) else ""
        for decision in decisions:
            match decision:
                case Place():
                    counts += ("placed", 1), ("reused_blocks", decision.reuse_blocks)
                    counts += [(_EXTRAPOLATED[what], 1) for what in decision.extrapolated]
                    if decision.helpers:
                        counts.append(("grouped", 1))
                case Reject(reason=reason):
                    counts += [(_EXTRAPOLATED[what], 1) for what in decision.extrapolated]
                    counts.append((f"rejected_{reason}", 1))
                case Copy():
                    counts.append(("copies", 1))
                case Shrink():
                    counts.append(("shrinks", 1))
                case ReleaseOrphan():
                    counts.append(("orphans", 1))
                case SwitchRole(is_advice=is_advice):
                    counts.append(("switches_advised" if is_advice else "switches", 1))
        self._state.count_all(model, counts)
