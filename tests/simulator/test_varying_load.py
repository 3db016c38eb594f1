"""Workloads whose rate follows a curve, and several workloads as one."""

from collections import Counter

import pytest

from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.requests import SimulatedWorkload, draw_workload
from simulator.serving.varying_load import alternating, diurnal, merged, thinned
from traces import load_trace


@pytest.fixture(scope="module")
def workload() -> SimulatedWorkload:
    return draw_workload(load_trace("conversation"), seed=1, rate_per_s=4.0, requests=2400)


def test_the_rate_follows_the_curve_and_conversations_stay_whole(workload: SimulatedWorkload) -> None:
    day_s = workload.duration_s
    less = thinned(workload, diurnal(day_s, 0.1), seed=1)
    quarters = Counter(int(4 * job.arrival_ns / NS / day_s) for job in less.jobs)
    assert min(quarters[1], quarters[2]) > 1.5 * quarters[0]
    assert 0.4 < len(less.jobs) / len(workload.jobs) < 0.75
    sizes, whole = (Counter(job.conversation for job in each.jobs) for each in (less, workload))
    assert all(whole[name] == count for name, count in sizes.items())
    assert [job.index for job in less.jobs] == list(range(len(less.jobs)))
    assert {name for name, _ in less.before} <= {name for name, _ in workload.before}


def test_curves_begin_and_alternate_as_told() -> None:
    curve = diurnal(100.0, 0.2)
    assert [round(curve(time_s), 3) for time_s in (0, 50, 100)] == [0.2, 1.0, 0.2]
    first, second = alternating(10.0, is_first=True), alternating(10.0, is_first=False, low=0.3)
    assert [first(time_s) for time_s in (0, 9, 10, 25)] == [1, 1, 0, 1]
    assert [second(time_s) for time_s in (0, 9, 10, 25)] == [0.3, 0.3, 1, 0.3]


def test_merged_workloads_share_no_prefix_but_the_first_block(workload: SimulatedWorkload) -> None:
    both = merged([workload, workload])
    assert len(both.jobs) == 2 * len(workload.jobs)
    assert [job.arrival_ns for job in both.jobs] == sorted(job.arrival_ns for job in both.jobs)
    owners: dict[int, set[int]] = {}
    for job in both.jobs:
        for block in job.blocks[1:]:
            owners.setdefault(block, set()).add(job.conversation)
    assert all(len(names) == 1 for names in owners.values())


def test_wrong_arguments_are_refused(workload: SimulatedWorkload) -> None:
    other = draw_workload(load_trace("conversation"), seed=1, rate_per_s=4.0, requests=100)
    for wrong in (
        lambda: diurnal(0, 0.5),
        lambda: diurnal(10, 1.5),
        lambda: alternating(-1, is_first=True),
        lambda: merged([workload, other]),
    ):
        with pytest.raises(BadSetting):
            wrong()
