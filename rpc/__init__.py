"""Control plane that all roles share: gRPC servers, channels and calls, mutual TLS, join tokens, protocol versions.

`control` starts servers and makes calls; `grpc_tls` and `join_tokens` authenticate them; `tls` loads certificates for
the messenger, too.
"""
