"""Lookup of cost profiles for the paced engine by name or file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from worker.errors import ProfileError
from worker.policy.cost_profile import BUNDLED_PROFILES, CostProfile, DecodeCost, PrefillCost, Range, load_profile

INSTANT: Final = "instant"

_ANY: Final = Range(least=0.0, most=1e18)


def profile_of(name: str) -> CostProfile:
    """Return the profile `instant`, a bundled profile by name, or a profile from a JSON file. Raises ProfileError."""
    if name == INSTANT:
        return _instant()
    path = Path(name)
    if not path.suffix and path.name == name:
        path = BUNDLED_PROFILES / f"{name}.json"
        if not path.is_file():
            bundled = sorted(each.stem for each in BUNDLED_PROFILES.glob("*.json"))
            raise ProfileError(
                f"cost profile must be a profile's .json file or one of {', '.join([INSTANT, *bundled])}, got {name!r}"
            )
    return load_profile(path)


def _instant() -> CostProfile:
    """Return a profile of zero durations, which leaves the overhead of the rest of the cluster."""
    return CostProfile(
        name=INSTANT,
        kind="analytic",
        made="2026-11-22",
        model="any",
        model_fingerprint="",
        hardware="none",
        kv_bytes_per_token=0,
        engine={},
        prefill=PrefillCost(fixed_s=0.0, per_token_s=0.0, per_pair_s=0.0, new_tokens=_ANY, prompt_tokens=_ANY),
        decode=DecodeCost(fixed_s=0.0, per_token_s=0.0, per_sequence_s=0.0, batch=_ANY, context_tokens=_ANY),
        transfers={},
    )
