"""API keys: who may ask, for which tenant, and who may act as an operator."""

from frontend.keys.api_keys import ApiKeys
from frontend.keys.caller import ANYBODY, Caller, Quota

__all__ = ["ANYBODY", "ApiKeys", "Caller", "Quota"]
