"""Which blocks are copied when: a model of vLLM's scheduler drives the table."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_worker.kv_jobs import BlocksToCopy, JobTable, KvJob, StepCopies

BLOCK = 4


def job(slots: int, *, load_tokens: int = 0, save_from: int | None = None, saves_layers: bool = False) -> KvJob:
    save_from = load_tokens if save_from is None else save_from
    return KvJob(7, tuple(range(100, 100 + slots)), load_tokens, save_from, saves_layers)


@given(st.builds(job, st.integers(0, 5), load_tokens=st.integers(0, 20), saves_layers=st.booleans()))
def test_a_job_survives_its_way_through_vllm(asked: KvJob) -> None:
    assert KvJob.of({"other": 1, **asked.to_params()}) == asked
    assert KvJob.of({"other": 1}) is None
    assert KvJob.of(None) is None


@given(
    prompt=st.integers(2, 30),
    answer=st.integers(1, 10),
    reused=st.integers(0, 29),
    own_cache=st.integers(0, 7),
)
def test_every_block_is_loaded_or_computed_and_then_saved_unless_it_was_reused_whole(
    prompt: int, answer: int, reused: int, own_cache: int
) -> None:
    reused = min(reused, prompt - 1)
    own = min(own_cache, (prompt - 1) // BLOCK) * BLOCK  # what vLLM's own prefix cache has
    total = prompt + answer - 1
    asked = job(-(-total // BLOCK), load_tokens=reused)
    blocks = list(range(-(-total // BLOCK)))
    table = JobTable(BLOCK)
    to_load = table.matched_tokens(asked, own)
    assert to_load == max(0, reused - own)
    if to_load:
        table.allocated("r", asked, blocks, to_load)
    loads = table.take().loads
    assert [block for copy in loads for block, _ in copy.pairs] == [
        block for block in blocks if own < (block + 1) * BLOCK and own <= block * BLOCK < reused and to_load
    ]
    table.loaded(["r"])
    table.scheduled("r", asked, blocks, end=prompt, prompt_tokens=prompt)
    assert table.ended("r", asked, blocks)
    (end,) = table.take().ends
    assert end == BlocksToCopy(7, "r", [(b, 100 + b) for b in blocks if (b + 1) * BLOCK > reused], keeps_blocks=True)
    assert table.take() == StepCopies()


@given(
    prompt=st.integers(1, 40),
    reused=st.integers(0, 39),
    cuts=st.lists(st.integers(1, 40), max_size=6),
    preempted_at=st.integers(0, 6),
)
def test_layers_of_every_block_that_was_not_reused_are_saved_once_it_is_complete(
    prompt: int, reused: int, cuts: list[int], preempted_at: int
) -> None:
    reused = min(reused, prompt - 1)
    count = -(-prompt // BLOCK)
    asked, blocks = job(count, load_tokens=reused, saves_layers=True), list(range(count))
    table = JobTable(BLOCK)
    saved: list[int] = []
    spans: list[tuple[int, int]] = []
    ends = sorted({*(c for c in cuts if reused < c < prompt), prompt})
    for step, end in enumerate([*ends, *ends[:preempted_at]]):  # computed again after a preemption
        table.scheduled("r", asked, blocks, end=end, prompt_tokens=prompt)
        for copy in table.take().layers:
            assert all((block + 1) * BLOCK <= copy.end or copy.end == prompt for block, _ in copy.pairs)
            saved += [block for block, _ in copy.pairs]
            spans.append((copy.start, copy.end))
        del step
    assert saved == list(range(reused // BLOCK, count))
    assert spans[0][0] == reused
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    table.scheduled("r", asked, blocks, end=prompt + 1, prompt_tokens=prompt)  # vLLM schedules ahead of its outputs
    assert table.ended("r", asked, blocks)
    assert table.take() == StepCopies(ends=[BlocksToCopy(7, "r", [], keeps_blocks=True)])


@pytest.mark.parametrize(("in_step", "has_arrived"), [(False, False), (False, True), (True, True)])
def test_a_request_that_is_aborted_during_its_load_saves_nothing_and_vllm_frees_it(
    in_step: bool, has_arrived: bool
) -> None:
    table, asked = JobTable(BLOCK), job(3, load_tokens=6)
    table.allocated("r", asked, [5, 6, 7], 6, in_step=in_step)
    table.take()
    if has_arrived and not in_step:
        table.loaded(["r"])
    assert table.ended("r", asked, [5, 6, 7]) is has_arrived
    (end,) = table.take().ends
    assert end.keeps_blocks is has_arrived
    assert end.pairs == ([(6, 101), (7, 102)] if has_arrived else [])


def test_an_answer_that_outgrew_its_slots_saves_those_it_has() -> None:
    table = JobTable(BLOCK)
    assert table.ended("r", job(2), [9, 8, 7])
    assert table.take().ends[0].pairs == [(9, 100), (8, 101)]
