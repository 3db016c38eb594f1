"""Models of the Hugging Face hub: their files are downloaded once per host, into the hub's own cache.

The cache's location, the token and the offline mode follow the hub's own variables: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE
and others.
"""

from engine.hub.download import download

__all__ = ["download"]
