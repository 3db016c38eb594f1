"""Development tools: soak tests, training of the bundled model, the RDMA test VM. Not shipped in the wheel."""
