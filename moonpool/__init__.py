"""The application: command line, configuration, and the processes of a cluster. Nothing below imports it."""

import os

# Left to itself, gRPC's core prints every handshake that fails, past our logs. What is wrong is told by those who
# called. It looks at this once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
