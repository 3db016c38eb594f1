"""The simulated world: its clock and scheduler, processes, threads, event loops, network and disks."""
