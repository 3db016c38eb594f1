"""Settings of the policy, which `settings.conductor` declares, and the resolution of its clock."""

from settings.conductor import Admission, AdmissionMode, Objectives, PolicyConfig, RoleSwitching, Undivided

__all__ = ["NS", "Admission", "AdmissionMode", "Objectives", "PolicyConfig", "RoleSwitching", "Undivided"]

NS = 1_000_000_000  # nanoseconds in a second
