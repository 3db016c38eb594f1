"""The numbers of a request's turn in the line of its prefill node, as rows of `RequestTable.turns`. Nothing else."""

__all__ = ["ACCOUNT", "AGES", "ARRIVED", "DUE", "LEVEL", "NUM_COLUMNS", "PRIORITY", "TICKET"]

LEVEL = 0  # of its class: lower goes first
ACCOUNT = 1  # number of the account that is charged
TICKET = 2  # virtual start time that it uses there now, ns
PRIORITY = 3  # among the account's own: lower goes first
DUE = 4  # when its first token should be there, ns of the policy's clock, as are the next two
ARRIVED = 5
AGES = 6  # from then on nothing newer goes before it
NUM_COLUMNS = 7
