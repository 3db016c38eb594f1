"""The cluster's own policies under virtual time. It owns a clock and a trace, never a copy of a policy."""
