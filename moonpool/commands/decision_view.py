"""Rendering of a request's decision records for a terminal of 80 columns. Makes no calls."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moonpool.cluster_view.formatting import time_text

Json = Mapping[str, Any]
_TERMS = {"transfer_s": "transfer", "queue_s": "queue", "prefill_s": "prefill"}
_WHY_NOT = {
    "slows_others": "steps would take too long",
    "not_sooner": "it would not be early enough",
    "unknown_chunks": "the duration of the steps of other prompts that wait there is unknown",
}
_FROM = {
    "header": "the request",
    "tenant": "its tenant",
    "class": "its class",
    "model": "the model",
    "cluster": "the cluster",
}
_OUTCOMES = {
    "open": "In progress.",
    "rejected": "Rejected.",
    "orphaned": "Released: no worker held it and no API server completed it.",
    "unknown": "Its outcome was not reported.",
}


def record_picture(record: Json) -> RenderableType:
    """Return one request with its outcome and every decision on it."""
    parts: list[RenderableType] = [*_head(record)]
    attempts = record["attempts"]
    left_out = record.get("attempts_left_out", 0)
    for number, attempt in enumerate(attempts):
        if left_out and number == len(attempts) // 2:
            parts += [Text(""), Text(f"({left_out} more decisions are not in the record)", style="dim")]
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        parts += [Text(""), *_attempt(record, attempt, following)]
    return Group(*parts)


def seconds(value: float) -> str:
    """Return seconds with three digits, in the unit that suits."""
    if value == 0:
        return "0"
    if abs(value) < 0.9995:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 999.5 else f"{value:,.0f} s"


def _head(record: Json) -> Iterator[Text]:
    parts = [f"model {record['model']}", *(f"class {record[key]}" for key in ("slo_class",) if key in record)]
    parts += [f"tenant {record[key]} (hashed)" for key in ("tenant",) if key in record]
    yield Text(f"Request {record['request_id']}", style="bold")
    yield Text(f"{time_text(record['at'])}, {', '.join(parts)}")
    request = f"A prompt of {record['input_length']:,} tokens, at most {record['max_new_tokens']:,} requested."
    yield Text(f"{request} {_outcome(record)}")


def _outcome(record: Json) -> str:
    text = _OUTCOMES.get(record["outcome"], f"{record['outcome'].capitalize()}:")
    if record["outcome"] in _OUTCOMES:
        return text
    cached = record.get("cached_tokens", 0)
    return f"{text} {record['output_length']:,} tokens generated, {cached:,} of the prompt reused."


def _attempt(record: Json, attempt: Json, following: Json | None) -> Iterator[RenderableType]:
    decision = attempt["decision"]
    considered = decision.get("considered", {})
    when = f"{seconds(attempt['at_ms'] / 1000)} later" if attempt["at_ms"] else "at once"
    title = f"Attempt {attempt['attempt'] + 1}, {when}: "
    if decision["type"] == "Place":
        where = f"prefill on {decision['prefill']}"
        where += f", decode on {decision['decode']}" if decision.get("decode") else ", and decode there"
        if decision.get("helpers"):
            where += f", computed together with {', '.join(decision['helpers'])}"
        yield Text(title, style="bold") + Text(where, style="bold green")
    else:
        after = " after its prefill" if decision.get("after_prefill") else ""
        yield Text(title, style="bold") + Text(f"rejected{after} ({decision['reason']})", style="bold red")
        yield Padding(Text(decision["message"]), (0, 0, 0, 2))
        if decision["retry_after_s"]:
            yield Padding(Text(f"Retry-After: {seconds(decision['retry_after_s'])}."), (0, 0, 0, 2))
    for text in _circumstances(attempt, decision):
        yield Padding(Text(text), (0, 0, 0, 2))
    if considered:
        yield Padding(_predictions(considered, _truth(record, attempt, following)), (1, 0, 0, 2))
        yield Padding(_prefill(considered, decision), (1, 0, 0, 2))
        if considered.get("decode"):
            yield Padding(_decode(considered), (1, 0, 0, 2))
        yield from (Padding(Text(text), (0, 0, 0, 2)) for text in _room(considered))
        if "undivided" in considered:
            yield Padding(_colocated(considered["undivided"], decision), (1, 0, 0, 2))
    if "outcome" in attempt:
        took = seconds((attempt["ended_ms"] - attempt["at_ms"]) / 1000)
        lost = ": its node was lost, and it was placed again" if attempt["outcome"] == "retry" else ""
        yield Padding(Text(f"Ended after {took}, {attempt['outcome']}{lost}."), (1, 0, 0, 2))


def _truth(record: Json, attempt: Json, following: Json | None) -> Json:
    """Return the attempt's measured latencies; TTFT belongs to the attempt that produced the first token."""
    is_first = "generated" not in attempt and (following is None or "generated" in following)
    keys = [key for key, known in (("ttft_s", is_first), ("tbt_s", following is None)) if known and key in record]
    return {key: record[key] for key in keys} if "outcome" in attempt else {}


def _circumstances(attempt: Json, decision: Json) -> Iterator[str]:
    if "generated" in attempt:
        yield f"The client already had {attempt['generated']:,} tokens."
    if "excluded" in attempt:
        yield f"Excluded nodes: {', '.join(attempt['excluded'])}."
    if decision["type"] == "Place":
        yield _reuse(decision)
    if beyond := decision.get("extrapolated"):
        yield f"Outside the measured range: {', '.join(beyond)}."
    for copy in attempt.get("copies", ()):
        yield f"The prefix is copied, {copy['num_blocks']:,} blocks, from {copy['source']} to {copy['target']}."


def _reuse(decision: Json) -> str:
    blocks = decision["reuse_blocks"]
    if not blocks:
        return "No block of the prompt was in the pool or in the node's own memory."
    local = decision.get("local_blocks", 0)
    parts = [f"{local:,} in {decision['prefill']}'s own memory"] if local else []
    for holder in decision["holders"]:
        end = holder["first_block"] + holder["num_blocks"]
        if end <= local:  # the node has them itself
            continue
        on_ssd = f" ({holder['ssd_blocks']:,} on SSD)" if holder.get("ssd_blocks") else ""
        parts.append(f"{end - max(local, holder['first_block']):,} from {holder['pool']}{on_ssd}")
    return f"Reused: {blocks:,} blocks of the prompt, {', '.join(parts)}."


def _predictions(considered: Json, truth: Json) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for heading in ("", "predicted", "objective", "measured"):
        table.add_column(heading, no_wrap=True, justify="left" if not heading else "right")
    for name, text in (("ttft", "time to first token"), ("tbt", "time between tokens")):
        objective = considered.get(f"{name}_objective_s", 0.0)
        source = considered.get(f"{name}_from", "")
        limit = f"{seconds(objective)} ({_FROM.get(source, source)})" if objective else "no limit"
        predicted = considered.get(f"{name}_s", 0.0)
        missed = objective and predicted > objective
        got = truth.get(f"{name}_s")
        table.add_row(
            text,
            Text(seconds(predicted), style="red" if missed else ""),
            limit,
            "" if got is None else Text(seconds(got), style="red" if objective and got > objective else "green"),
        )
    return table


def _prefill(considered: Json, decision: Json) -> Table:
    rows = considered.get("prefill", ())
    table = Table(box=None, pad_edge=False, header_style="dim")
    count = considered.get("num_prefill", len(rows))
    table.add_column(f"prefill, best {len(rows)} of {count:,}", overflow="ellipsis", no_wrap=True, max_width=24)
    has_local = any(row.get("local_blocks") for row in rows)
    own_memory = ("own memory",) if has_local else ()
    for heading in ("transfer", "queue", "prefill", "sum", "more by", *own_memory):
        table.add_column(heading, justify="right", no_wrap=True)
    best = rows[0] if rows else {}
    for number, row in enumerate(rows):
        total = sum(row[term] for term in _TERMS)
        cells = [seconds(row[term]) for term in _TERMS]
        more = "" if number == 0 else _more(best, row)
        is_chosen = row["node_id"] == decision.get("prefill", best["node_id"])
        blocks = (f"{row.get('local_blocks', 0):,} blocks",) if has_local else ()
        table.add_row(row["node_id"], *cells, seconds(total), more, *blocks, style="bold" if is_chosen else "")
    return table


def _colocated(score: Json, decision: Json) -> Text:
    """Return the evaluation of colocated prefill, and the choice."""
    if score.get("why_not") == "no_room":
        return Text(f"No colocated prefill on the decode node {score['node_id']}: it has no free pages yet.")
    here_s = sum(score[term] for term in _TERMS)
    text = f"With colocated prefill on {score['node_id']}, without a hand-off, its first token would come in "
    text += f"{seconds(here_s)}, not {seconds(score['divided_s'])}. "
    step_s, bound_s = score.get("step_s", 0.0), score.get("bound_s", 0.0)
    if step_s:
        text += f"Steps there would take up to {seconds(step_s)} meanwhile, with a limit of {seconds(bound_s)}. "
    if not score.get("is_better"):
        why = _WHY_NOT[score.get("why_not", "slows_others" if step_s else "not_sooner")]
        return Text(f"{text}Not chosen: {why}.")
    is_done = decision.get("prefill") == score["node_id"]
    return Text(
        f"{text}{'It was chosen' if is_done else 'Not chosen: it is only advised'}.", style="bold" if is_done else ""
    )


def _more(best: Json, row: Json) -> str:
    """Return how much longer another node would have taken, and the term that contributes most."""
    by = sum(row[term] - best[term] for term in _TERMS)
    if by <= 0:
        return "equal"
    term = max(_TERMS, key=lambda name: row[name] - best[name])
    return f"{seconds(by)} {_TERMS[term]}"


def _decode(considered: Json) -> Table:
    rows = considered["decode"]
    table = Table(box=None, pad_edge=False, header_style="dim")
    count = considered.get("num_decode", len(rows))
    table.add_column(f"decode, best {len(rows)} of {count:,}", overflow="ellipsis", no_wrap=True, max_width=24)
    for heading in ("between tokens", "free", "more by"):
        table.add_column(heading, justify="right", no_wrap=True)
    best, need = rows[0], considered.get("need_tokens", 0)
    for number, row in enumerate(rows):
        if number == 0:
            more = ""
        elif row["free_tokens"] < need <= best["free_tokens"]:
            more = "no room"
        else:
            by = row["tbt_s"] - best["tbt_s"]
            more = f"{seconds(by)} load" if by > 0 else "equal" if by == 0 else "less room"
        cells = seconds(row["tbt_s"]), f"{row['free_tokens']:,} tokens"
        table.add_row(row["node_id"], *cells, more, style="bold" if number == 0 else "")
    return table


def _room(considered: Json) -> Iterator[str]:
    if need := considered.get("need_tokens"):
        wait_s = considered.get("room_wait_s", 0.0)
        wait = f", predicted to be free in {seconds(wait_s)}" if wait_s else ""
        yield f"It needs {need:,} tokens of KV on its decode node{wait}."
