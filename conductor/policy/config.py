"""Configuration of the policy, as declared in `settings.conductor`, and the unit of its clock."""

from settings.conductor import Admission, AdmissionMode, Objectives, PolicyConfig, RoleSwitching, Undivided

__all__ = ["NS", "Admission", "AdmissionMode", "Objectives", "PolicyConfig", "RoleSwitching", "Undivided"]

NS = 1_000_000_000  # nanoseconds in a second
