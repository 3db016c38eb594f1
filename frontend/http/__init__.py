"""Connections of the HTTP/1.1 server: accepting, limits, TLS. Routes are in `frontend.api`."""
