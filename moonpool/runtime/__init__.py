"""What runs the cluster's processes: child processes of this machine, or Ray. Supervision is the same over both."""
