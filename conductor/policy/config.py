"""Settings of the policy, which `settings.conductor` declares, and the resolution of its clock."""

from settings.conductor import Admission, AdmissionMode, ColocatedPrefill, Objectives, PolicyConfig, RoleSwitching

__all__ = ["NS", "Admission", "AdmissionMode", "ColocatedPrefill", "Objectives", "PolicyConfig", "RoleSwitching"]

NS = 1_000_000_000  # nanoseconds in a second
