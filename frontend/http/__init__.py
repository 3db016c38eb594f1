"""The front door's side of HTTP/1.1: connections, their bounds, TLS. Knows no route."""
