"""Configuration of the endpoint picker."""

from dataclasses import dataclass, field

from frontend import FrontendConfig
from settings.endpoint_picker import EndpointPickerSettings
from settings.frontend import HttpSettings
from settings.node import ListenSettings, NodeSettings


@dataclass(frozen=True)
class EndpointPickerConfig:
    """Configuration of `serve_endpoint_picker`."""

    picker: EndpointPickerSettings
    node: NodeSettings = field(default_factory=lambda: NodeSettings("endpoint-picker-0"))
    listen: ListenSettings = field(default_factory=ListenSettings)
    # Of it, the grace period for exchanges that are under way when the picker is stopped: answers pass through it.
    http: HttpSettings = field(default_factory=HttpSettings)
    # The API servers' configuration, by which requests are read for the conductor; None: the endpoints are not
    # Moonpool's, and no request is rejected for load.
    admission: FrontendConfig | None = None
