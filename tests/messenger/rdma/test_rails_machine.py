"""Slices over rails that fail and return at any time: a state machine over a model of the hardware."""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from messenger.path_health import FIRST_REST_NS, LONGEST_REST_NS, PathState
from messenger.rdma.policy.posting import Announce, Instruction, Limits, Post, RailSpec
from messenger.rdma.policy.rails import Rails
from messenger.slices import LOCAL, NBYTES, REMOTE, Rows

KIB, MIB, MS, SECOND = 1 << 10, 1 << 20, 1_000_000, 1_000_000_000


def rows_of(*sizes: int, start: int = 0) -> Rows:
    """Slices one behind the other in the remote memory, with gaps in the local one."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    return np.stack([start + starts * 2, start + starts, np.array(sizes)], axis=1).astype(np.int64)


class Fabric(RuleBasedStateMachine):
    """Rails over a model of the hardware: each queue pair works in order, and what it has done may not be told any more
    when it dies. The peer takes a frame in once, and from then on the memory of all that came before it is its own."""

    @initialize(
        speeds=st.lists(st.sampled_from([0.0, 1.0, 100.0, 400.0]), min_size=1, max_size=4), spares=st.integers(0, 1)
    )
    def start(self, speeds: list[float], spares: int) -> None:
        self.limits = Limits(16 * KIB, 96 * KIB, 12, 32 * KIB, 8)
        specs = [RailSpec(str(index), gbit, index >= len(speeds) - spares) for index, gbit in enumerate(speeds)]
        self.rails = Rails(specs, self.limits, 0)
        self.now_ns = 0
        self.queues: list[list[Instruction]] = [[] for _ in speeds]  # posted, not landed
        self.untold: list[list[Instruction]] = [[] for _ in speeds]  # landed, completion not taken
        self.wanted: dict[int, Rows] = {}
        self.announced: set[int] = set()
        self.landed: dict[int, list[tuple[int, int]]] = {}
        self.delivered: list[int] = []
        self.done: list[int] = []
        self.probing: set[int] = set()

    @rule(sizes=st.lists(st.integers(1, 60_000), max_size=10), announce=st.booleans())
    def submit(self, sizes: list[int], announce: bool) -> None:
        if not sizes and not announce:
            return
        rows = rows_of(*sizes)
        number = self.rails.submit(rows, announce=announce)
        self.wanted[number] = rows
        self.landed[number] = []
        if announce:
            self.announced.add(number)

    @rule()
    def post(self) -> None:
        for each in self.rails.due(self.now_ns):
            assert self.rails.state(each.rail) is PathState.UP
            self.queues[each.rail].append(each)

    @rule(rail=st.integers(0, 3))
    def land(self, rail: int) -> None:
        """The oldest instruction of a rail takes effect at the peer."""
        if rail < len(self.queues) and self.queues[rail]:
            each = self.queues[rail].pop(0)
            self.untold[rail].append(each)
            if isinstance(each, Announce):
                if each.batch not in self.delivered:
                    self.deliver(each.batch)
                return
            assert not self.delivered or each.batch > self.delivered[-1], "written into memory that was handed over"
            self.landed[each.batch] += [(row[REMOTE], row[REMOTE] + row[NBYTES]) for row in each.rows.tolist()]
            assert all(row[LOCAL] == 2 * start for row, start in self.starts(each))

    def starts(self, post: Post) -> list[tuple[list[int], float]]:
        """Each row with half of the local offset that belongs to its remote one."""
        whole = self.wanted[post.batch]
        result = []
        for row in post.rows.tolist():
            index = int(np.searchsorted(whole[:, REMOTE], row[REMOTE], side="right")) - 1
            within = row[REMOTE] - int(whole[index, REMOTE])
            assert within + row[NBYTES] <= int(whole[index, NBYTES])
            result.append((row, (int(whole[index, LOCAL]) + within) / 2))
        return result

    def deliver(self, batch: int) -> None:
        assert not self.delivered or self.delivered[-1] < batch
        for number in self.wanted:
            if number <= batch:
                self.assert_whole(number)
        self.delivered.append(batch)

    def assert_whole(self, number: int) -> None:
        end = 0
        for start, stop in sorted(self.landed[number]):
            assert start <= end, f"a hole in batch {number}"
            end = max(end, stop)
        assert end == int(self.wanted[number][:, NBYTES].sum())

    @rule(rail=st.integers(0, 3), took_ns=st.integers(0, 10 * MS))
    def complete(self, rail: int, took_ns: int) -> None:
        if rail < len(self.queues) and self.untold[rail]:
            self.now_ns += took_ns
            each = self.untold[rail].pop(0)
            if self.rails.doubts and isinstance(each, Announce):
                self.untold[rail].insert(0, each)  # cannot be: frames have one rail, and it is dead
                raise AssertionError("a frame is under way on a rail that works while others are in doubt")
            self.finish(self.rails.completed(each.number, rail, self.now_ns))

    def finish(self, batch: int | None) -> None:
        if batch is not None:
            self.assert_whole(batch)
            assert batch not in self.announced or batch in self.delivered
            self.done.append(batch)

    @rule(rail=st.integers(0, 3))
    def fail(self, rail: int) -> None:
        if rail < len(self.queues) and self.rails.state(rail) is PathState.UP:
            self.queues[rail].clear()
            self.untold[rail].clear()
            self.rails.rail_failed(rail, self.now_ns)

    @precondition(lambda self: self.rails.doubts)
    @rule()
    def ask_the_peer(self) -> None:
        last = max((batch for batch in self.rails.doubts if batch in self.delivered), default=0)
        for batch in self.rails.resolve(last):
            self.finish(batch)

    @rule(wait_ns=st.integers(0, 2 * FIRST_REST_NS))
    def rest(self, wait_ns: int) -> None:
        self.now_ns += wait_ns
        self.probing |= set(self.rails.probes_due(self.now_ns))

    @precondition(lambda self: self.probing)
    @rule(works=st.booleans())
    def probed(self, works: bool) -> None:
        rail = self.probing.pop()
        if works:
            self.rails.rail_returned(rail, self.now_ns)
        else:
            self.rails.rail_failed(rail, self.now_ns)

    @invariant()
    def books_agree_and_windows_hold(self) -> None:
        if not hasattr(self, "rails"):
            return
        self.rails.validate()
        for rail in range(len(self.queues)):
            assert self.rails.in_flight_nbytes(rail) <= self.limits.window_nbytes
            under_way = [*self.queues[rail], *self.untold[rail]]
            assert sum(len(each.rows) for each in under_way if isinstance(each, Post)) <= self.limits.window_rows
        assert self.rails.num_unfinished == len(self.wanted) - len(self.done)

    def teardown(self) -> None:
        """Whatever happened: once rails work again, everything ends."""
        if not hasattr(self, "rails"):
            return
        for _ in range(100 + 60 * len(self.wanted)):
            if not self.rails.num_unfinished:
                break
            if self.rails.doubts:
                self.ask_the_peer()
            self.rest(LONGEST_REST_NS)
            while self.probing:
                self.probed(True)
            self.post()
            for rail in range(len(self.queues)):
                while self.queues[rail]:
                    self.land(rail)
                while self.untold[rail]:
                    self.complete(rail, MS)
        assert self.rails.num_unfinished == 0
        assert sorted(self.done) == sorted(self.wanted)
        assert self.delivered == sorted(self.announced)


TestFabric: Any = Fabric.TestCase
TestFabric.settings = settings(max_examples=60, stateful_step_count=40)
