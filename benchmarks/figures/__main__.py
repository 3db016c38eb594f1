"""Generate the figures in docs/performance.md from the stored benchmark results, and the results in
docs/guarantees.md from `tests/prove.json` and `tests/live_matrix.json`.

    python -m benchmarks.figures write | check

`benchmarks/results/NAME-DATE.json` contains the output of a benchmark; the latest date of each name is used. The
generated parts of the pages are between the lines `<!-- figures -->` and `<!-- end of figures -->`; `write` also draws
their charts. `check` exits with status 1 if a page differs from the results.
"""

import sys

from benchmarks.figures.pages import main

if __name__ == "__main__":
    if sys.argv[1:] not in (["write"], ["check"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
