"""Layout of the arrays that the compiled loops of the shadow caches share.

`rows` int64 [rows, NUM_COLUMNS] has a row per known block. `head` int64 [HEAD] has counters and lists, then the events
to play, the rows to report, the requests' visits and the model's records. `model` float64 [MODEL] has the factors and
the index of `reuse`, and the experts' hits. A call is cheap because there are only three.
"""

from typing import Final

from kvpool.policy.eviction import reuse

# Columns of a row: 256 bytes, so that columns that are used together lie in one cache line.
USED_NS, CLASS, VALUE, IN, VISIT, LEAF_PLACE, LIVE, OFFERED = 0, 1, 2, 3, 4, 5, 6, 7
PARENT, DEPTH, PARTIAL, HITS, RECORD = 8, 9, 10, 11, 12
KIDS, ARC_LIST, PARKED = 13, 16, 17  # KIDS: followers in the cache of each expert
HISTORY_LINKS, LRU_LINKS, ARC_LINKS = 18, 20, 22  # each: towards the most recent, towards the least recent
# The i-th leaf of the model's policy, in row i: its row, and copies of what its index depends on.
LEAF, LEAF_USED_NS, LEAF_CLASS, LEAF_VALUE = 24, 25, 26, 27
NUM_COLUMNS: Final = 32

LRU, ARC, MODEL_POLICY = 0, 1, 2
NUM_EXPERTS: Final = 3

# Counters of `head`.
CAPACITY, CURRENT_VISIT, NUM_VISITS, NUM_EVENTS, NUM_LEFT, NUM_FREED = 0, 1, 2, 3, 4, 5
FOLLOWED, RANDOM, NUM_LEAVES, NUM_STORED, NUM_TOUCHED, NUM_ROWS = 6, 7, 8, 9, 10, 11
ARC_TARGET, NUM_RECORDS, NUM_SKIPPED, NUM_USES, RUN_PARENT, RUN_DEPTH = 12, 13, 14, 15, 16, 17
LISTS: Final = 24  # per list: first (most recent), last, length
HISTORY, RECENT, ONCE, AGAIN, ONCE_GHOSTS, AGAIN_GHOSTS = 0, 1, 2, 3, 4, 5
NUM_LISTS: Final = 6
POOL, POOL_SIZE = 48, 16  # the candidates for eviction kept from the last one
TOUCHED, MAX_TOUCHED = 64, 2048  # rows used by the current visit
EVENTS, MAX_EVENTS = TOUCHED + MAX_TOUCHED, 4096
LEFT, MAX_LEFT = EVENTS + MAX_EVENTS, 8192  # live rows that left the cache of the followed expert
FREED, MAX_FREED = LEFT + MAX_LEFT, 8192  # rows forgotten
VISITS, VISIT_RING, VISIT_FIELDS = FREED + MAX_FREED, 16384, 6
V_NOW, V_BLOCKS, V_KNOWN, V_REACHED, V_TURN, V_PAUSE = 0, 1, 2, 3, 4, 5
RECORDS = VISITS + VISIT_RING * VISIT_FIELDS
HEAD: Final = RECORDS + reuse.MAX_RECORDS * reuse.RECORD_FIELDS

# Events: row << 3 | kind, or a kind followed by operands. A run is a row of missing blocks (NEXT, LAST_PARTIAL).
USE, TOUCH, REMOVE, NEXT, LAST_PARTIAL, BEGIN, RESUME, RUN = 0, 1, 2, 3, 4, 5, 6, 7

# Regions of `model`.
FACTORS = 0
INDEX = FACTORS + reuse.NUM_FACTORS
SCORES = INDEX + reuse.NUM_STRATA * reuse.NUM_CLASSES * reuse.NUM_AGES
POOL_INDICES = SCORES + NUM_EXPERTS  # of the rows in the pool, ascending
MODEL: Final = POOL_INDICES + POOL_SIZE
