"""Quotas of tenants at one front door: requests and tokens per minute, requests at a time."""

from frontend.quotas.door_quotas import UNCOUNTED, DoorQuotas, Stay

__all__ = ["UNCOUNTED", "DoorQuotas", "Stay"]
