"""Control plane shared by every role: gRPC servers and calls, TLS, join tokens, protocol versions."""
