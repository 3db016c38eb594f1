"""Endpoint picker: tells a gateway which endpoint serves a request, over Envoy's external processing.

In the order in which a request passes them: `server` and `service` (gRPC), `exchange` (the protocol, pure), `request`
(model and dialogue of a body), `endpoints` (which there are, and their load), `admission` (the conductor's judgement),
`choice` (the order of the endpoints, pure). docs/gateway.md describes the protocol and its limits.
"""

from endpoint_picker.config import EndpointPickerConfig
from endpoint_picker.server import serve_endpoint_picker

__all__ = ["EndpointPickerConfig", "serve_endpoint_picker"]
