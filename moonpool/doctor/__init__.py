"""`moonpool doctor`: checks of this machine or of a running cluster, with advice on each problem found.

Each module is a topic. A check has two halves: `observe_*` looks at the machine and returns plain data; `judge_*` is
pure, and turns the data into a result. `examine` runs the checks concurrently.
"""
