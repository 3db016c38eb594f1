"""A frontend's process collects garbage at rest, in a process of its own: the collector is the whole process's."""

import subprocess
import sys

SCRIPT = """
import gc, weakref
from moonpool.role_process.garbage import collect_and_freeze, collect_when_idle, defer_full_collections

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

full = 0
def count(phase, info):
    global full
    full += phase == "start" and info["generation"] == 2

collect_and_freeze()
defer_full_collections()
gc.callbacks.append(count)
garbage = [cycle() for _ in range(100)]
live = [[n] for n in range(300_000)]
print("while serving", full)
collect_when_idle()
print("at rest", full, "left", sum(ref() is not None for ref in garbage), "settled", gc.get_freeze_count() > 300_000)
collect_when_idle()
print("nothing new", full)
"""


def test_a_full_collection_waits_for_rest_and_then_finds_all() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["while serving 0", "at rest 1 left 0 settled True", "nothing new 1"]
