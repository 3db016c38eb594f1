"""Simulation under virtual time that drives the cluster's own policy classes; it never copies a policy."""
