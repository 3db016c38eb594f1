"""Simulation under virtual time that runs the cluster's own policy classes rather than copies of them."""
