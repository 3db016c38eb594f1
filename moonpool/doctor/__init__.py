"""`moonpool doctor`: what this machine offers for serving, and what to do about what is missing.

Each module is a topic. A check has two halves: `observe_*` looks at the machine and returns plain data, `judge_*` turns
the data into a finding and is pure. `examine` runs the checks at once, so that none can hold up the others.
"""
