"""Coverage-guided fuzzing of everything that the cluster parses; see docs/security-testing.md.

target.py     interface of a target: seeds, mutation, one case, its verdict
targets/      the targets, by package
mutation.py   mutation of bytes and of structured values
coverage.py   lines reached in the target's modules
fuzzer.py     one target in this process: corpus, cases, defects
process.py    one target in a process of its own, which may hang, die or grow
campaign.py   all targets, each for its share of the time
report.py     report as JSON and as a table
"""
