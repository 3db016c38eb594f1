"""The HTTP front door: OpenAI's API, tokenising, streaming, keys; drives each request through the cluster."""

from frontend.config import FrontendConfig, ModelConfig
from frontend.errors import ConfigError, FrontendError, ModelFolderError, PortInUse
from frontend.server import serve_frontend

__all__ = [
    "ConfigError",
    "FrontendConfig",
    "FrontendError",
    "ModelConfig",
    "ModelFolderError",
    "PortInUse",
    "serve_frontend",
]
