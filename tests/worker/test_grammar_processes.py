"""Processes that check grammars: what a grammar may cost, who waits for whom, and what is left of a hostile one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.attacks.bombs import schema_bomb
from worker.errors import GrammarBusy, GrammarError, GrammarTooCostly, WorkerError
from worker.fair_queue import MAX_RUNNING, MAX_RUNNING_PER_TENANT, MAX_WAITING_PER_TENANT, Task
from worker.grammar import JSON_SCHEMA, LARK, REGEX
from worker.grammar_child import COSTLY_NICENESS
from worker.grammar_processes import FRONTEND_LIMITS, GrammarProcesses, GrammarSource, InvalidPart, JobLimits

WAIT_S = 60.0
LIMITS = replace(FRONTEND_LIMITS, wall_s=WAIT_S)  # other tests may take most of the machine
ENDLESS = JobLimits(cpu_s=100, wall_s=100, memory_nbytes=256 << 20)
FINE = GrammarSource(REGEX, "a+")


class Checked:
    """Processes, and what they counted."""

    def __init__(self, limits: JobLimits) -> None:
        self.counted: Counter[str] = Counter()
        self.processes = GrammarProcesses(limits, lambda what: self.counted.update([what]))

    def check(self, grammar: GrammarSource, tenant: str = "") -> None:
        """Check a grammar; raises what the check raises."""
        self.processes.check(tenant, grammar).future.result(WAIT_S)

    def children(self) -> list[psutil.Process]:
        """The processes at work: all that the template has forked except the spare one."""
        if self.processes._template is None:
            return []
        own = psutil.Process(self.processes._template._process.pid)
        return [child for child in own.children() if child.cpu_times().user + child.cpu_times().system > 0.2]


@pytest.fixture
def make() -> Iterator[Callable[..., Checked]]:
    made: list[Checked] = []

    def one(limits: JobLimits = LIMITS) -> Checked:
        made.append(Checked(limits))
        return made[-1]

    yield one
    for each in made:
        each.processes.close()


def until(condition: Callable[[], Any]) -> Any:
    ends = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < ends
        time.sleep(0.01)
    return found


def test_a_valid_grammar_passes_and_an_invalid_one_is_named(make: Callable[..., Checked]) -> None:
    checked = make()
    checked.check(FINE)
    with pytest.raises(GrammarError, match="unclosed group"):
        checked.check(GrammarSource(REGEX, "(("))
    parts: tuple[str, ...] = ("{}", '{"type":"none"}')
    with pytest.raises(InvalidPart, match="none") as caught:
        checked.check(GrammarSource(LARK, 'start: "a" | %json {"type":"none"}', parts, JSON_SCHEMA))
    assert caught.value.index == 1
    parts = (json.dumps({"allOf": [{"pattern": "a"}] * 9}),)
    with pytest.raises(InvalidPart, match="at most 8 patterns"):
        checked.check(GrammarSource(LARK, 'start: "a"', parts, JSON_SCHEMA))
    assert not checked.counted


def test_a_grammar_over_its_cpu_time_is_refused_and_remembered(make: Callable[..., Checked]) -> None:
    checked = make()
    bomb = GrammarSource(JSON_SCHEMA, schema_bomb(24, 0))
    own = psutil.Process()
    before = own.memory_info().rss
    with pytest.raises(GrammarTooCostly, match="more than 1 s of CPU time"):
        checked.check(bomb)
    assert own.memory_info().rss - before < 64 << 20
    assert checked.counted == {"killed": 1, "refused": 1}
    with pytest.raises(GrammarTooCostly, match="without another attempt"):
        checked.check(bomb)
    assert checked.counted == {"killed": 1, "refused": 2}  # no further process
    checked.check(FINE)


def test_a_grammar_over_its_memory_is_refused(make: Callable[..., Checked]) -> None:
    checked = make(JobLimits(cpu_s=60, wall_s=60, memory_nbytes=24 << 20))
    with pytest.raises(GrammarTooCostly, match="more than 24 MiB of memory"):
        checked.check(GrammarSource(JSON_SCHEMA, schema_bomb(20, 0)))
    checked.check(FINE)


def test_a_costly_grammar_has_a_lower_priority(make: Callable[..., Checked]) -> None:
    checked = make(ENDLESS)
    task = checked.processes.check("", GrammarSource(JSON_SCHEMA, schema_bomb(26, 0)))
    (process,) = until(checked.children)
    until(lambda: {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()} == {COSTLY_NICENESS})
    task.cancel()


def test_the_largest_process_ends_when_all_together_take_too_much_memory(make: Callable[..., Checked]) -> None:
    checked = make(replace(ENDLESS, total_nbytes=64 << 20))
    grammars = [GrammarSource(JSON_SCHEMA, schema_bomb(26, i)) for i in range(2)]
    larger = checked.processes.check("", grammars[0])
    (process,) = until(checked.children)
    at_first = process.memory_info().rss
    until(lambda: process.memory_info().rss > at_first + (16 << 20))
    smaller = checked.processes.check("", grammars[1])
    with pytest.raises(GrammarBusy, match="together take more than 64 MiB"):
        larger.future.result(WAIT_S)
    assert not smaller.future.done()
    checked.processes.raise_if_costly(grammars[0])
    checked.check(FINE)
    assert checked.counted == {"killed": 1}
    smaller.cancel()


def test_a_cancelled_check_ends_its_process_at_once(make: Callable[..., Checked]) -> None:
    checked = make(ENDLESS)

    async def leave() -> None:
        task = checked.processes.check("", GrammarSource(JSON_SCHEMA, schema_bomb(26, 0)))
        waiting = asyncio.create_task(task.result())
        children = await asyncio.to_thread(until, checked.children)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(until, lambda: not children[0].is_running())

    asyncio.run(leave())
    checked.check(FINE)


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [(signal.SIGSEGV, GrammarTooCostly, "compiler fail"), (signal.SIGKILL, GrammarBusy, "ended from outside")],
)
def test_a_crash_refuses_the_grammar_and_a_kill_from_outside_does_not(
    make: Callable[..., Checked], number: signal.Signals, error: type[WorkerError], message: str
) -> None:
    checked = make(ENDLESS)
    bomb = GrammarSource(JSON_SCHEMA, schema_bomb(26, 0))
    task = checked.processes.check("", bomb)
    until(checked.children)[0].send_signal(number)
    with pytest.raises(error, match=message):
        task.future.result(WAIT_S)
    if number == signal.SIGSEGV:
        with pytest.raises(GrammarTooCostly):
            checked.processes.raise_if_costly(bomb)
    else:
        checked.processes.raise_if_costly(bomb)
    checked.check(FINE)


def test_a_killed_template_is_replaced(make: Callable[..., Checked]) -> None:
    checked = make()
    checked.check(FINE)
    template = checked.processes._template
    assert template is not None
    template._process.kill()
    template._process.wait()
    until(lambda: template.is_over)
    checked.check(FINE)


def test_a_tenant_s_bombs_leave_room_for_others(make: Callable[..., Checked]) -> None:
    checked = make(ENDLESS)
    bombs = [checked.processes.check("a", GrammarSource(JSON_SCHEMA, schema_bomb(26, i))) for i in range(6)]
    assert len(until(lambda: len(found := checked.children()) == MAX_RUNNING_PER_TENANT and found)) < MAX_RUNNING
    for i in range(5):
        checked.check(GrammarSource(REGEX, f"a{i}"), tenant="b")
    assert not any(bomb.future.done() for bomb in bombs)
    for bomb in bombs:
        bomb.cancel()


def test_tenants_take_turns_and_too_many_waiting_are_refused(make: Callable[..., Checked]) -> None:
    checked, go_on, order = make(), threading.Event(), []

    def hold(_: Task[None]) -> None:
        go_on.wait(WAIT_S)

    def note(name: str) -> Callable[[Task[None]], None]:
        return lambda _: order.append(name)

    held = [checked.processes.submit(f"holder {i}", hold) for i in range(MAX_RUNNING)]
    waiting = [checked.processes.submit("a", note(f"a{i}")) for i in range(MAX_WAITING_PER_TENANT)]
    with pytest.raises(GrammarBusy, match=f"{MAX_WAITING_PER_TENANT} grammars of this tenant wait"):
        checked.processes.submit("a", hold)
    waiting += [checked.processes.submit("b", note(f"b{i}")) for i in range(3)]
    waiting[0].cancel()
    go_on.set()
    for task in [*held, *waiting[1:]]:
        task.future.result(WAIT_S)
    assert "a0" not in order
    assert len(order) == MAX_WAITING_PER_TENANT + 2
    assert max(order.index(f"b{i}") for i in range(3)) < 2 * 3 + MAX_RUNNING


def test_closing_ends_what_runs_and_refuses_what_waits(make: Callable[..., Checked]) -> None:
    checked = make(ENDLESS)
    bombs = [checked.processes.check("a", GrammarSource(JSON_SCHEMA, schema_bomb(26, i))) for i in range(4)]
    children = until(checked.children)
    checked.processes.close()
    for bomb in bombs:
        assert isinstance(bomb.future.exception(WAIT_S), GrammarBusy)
    until(lambda: not any(child.is_running() for child in children))


@pytest.fixture(scope="module")
def shared() -> Iterator[Checked]:
    checked = Checked(JobLimits(cpu_s=1.0, wall_s=20, memory_nbytes=128 << 20))
    yield checked
    checked.processes.close()


KEYWORDS = [
    *("type", "pattern", "allOf", "anyOf", "items", "enum", "const", "properties", "patternProperties", "$ref"),
    *("minLength", "maxLength", "minItems", "maxItems", "multipleOf", "minimum", "required", "format", "a"),
]
texts = st.text(st.sampled_from("ab.*+?|()[]{}0123456789,^$\\&~/\"' \n:%x"), max_size=40)
numbers = st.integers(-3, 2000)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYWORDS),
            inner | st.sampled_from(["string", "object", "array", "integer", "#", "#/a", "email", "date"]),
            max_size=5,
        )
    ),
    max_leaves=15,
)
sources = st.one_of(
    st.builds(lambda value: GrammarSource(JSON_SCHEMA, json.dumps(value)), values),
    st.builds(lambda text: GrammarSource(REGEX, text), texts),
    st.builds(lambda text: GrammarSource(LARK, "start: " + text), texts),
    st.builds(lambda terms: GrammarSource(LARK, "start: T\nT: " + " & ".join(terms)), st.lists(texts, max_size=9)),
)


@settings(max_examples=150, deadline=None)
@given(source=sources)
def test_any_grammar_is_accepted_or_refused_and_the_next_one_is_checked(shared: Checked, source: GrammarSource) -> None:
    error = shared.processes.check("", source).future.exception(WAIT_S)
    assert error is None or (isinstance(error, GrammarError) and 0 < len(str(error)) < 700)
    shared.check(FINE)
