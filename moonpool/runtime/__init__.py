"""Runtimes of the cluster's processes: child processes of this machine, or Ray. Supervision is the same for both."""
