"""Was a rejection false? The run is forked at the moment of the rejection, and in the copy the request is let in.

Both runs share their past, and what is random belongs to requests and nodes: they differ by the one decision and by
what follows from it. The copy is a forked process, as cheap as what it changes; that
needs an operating system that forks.
"""

import os
import sys
import traceback
from collections.abc import Callable

from simulator.serving.cluster import Cluster
from simulator.serving.outcome import is_good
from simulator.serving.work import Work

__all__ = ["FalseRejects"]


class FalseRejects:
    """Looks into a share of the rejections of one run."""

    def __init__(self, cluster: Cluster, share: float, from_ns: int) -> None:
        """Of the rejected requests that arrived from `from_ns` on, about `share` are looked into: the same ones
        in every run of one workload."""
        self.num_tried = 0
        self.num_false = 0
        self._cluster = cluster
        self._share = share
        self._from_ns = from_ns
        if share:
            cluster.on_reject = self._look_into

    def _look_into(self, work: Work, let_in: Callable[[], Work]) -> None:
        if work.job.is_sampled < self._share and work.job.arrival_ns >= self._from_ns:
            self.num_tried += 1
            self.num_false += in_a_copy(lambda: self._would_be_good(let_in))

    def _would_be_good(self, let_in: Callable[[], Work]) -> bool:
        cluster = self._cluster
        cluster.on_reject = lambda work, let_in: None
        work = let_in()
        cluster.clock.run(lambda: work.end is None)
        return is_good(work, cluster.settings)


def in_a_copy(question: Callable[[], bool]) -> bool:
    """The answer of a copy of this process, which may change anything: nothing of it is seen here.

    Raises ChildProcessError when the copy fails, which has told stderr why.
    """
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = int(question())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(ended)
    if status not in (0, 1):
        raise ChildProcessError(f"the copy of the simulation failed (status {status})")
    return bool(status)
