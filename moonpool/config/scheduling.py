"""Configuration keys of admission and placement."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.errors import ConfigError


@dataclass(frozen=True)
class SchedulingSettings(Slice):
    """Admission and placement."""

    panel: ClassVar[str] = "Scheduling"
    ttft_slo: Annotated[
        float,
        Key(
            "Objective for the time to the first token, seconds; a request predicted to miss it gets a 429",
            low=0,
            high=86400,
            default_text="off",
        ),
    ] = 0.0
    tbt_slo: Annotated[
        float, Key("Objective for the time between tokens, seconds", low=0, high=3600, default_text="off")
    ] = 0.0
    cost_profile: Annotated[
        tuple[str, ...],
        Key(
            "What a model's work costs until nodes report it: [MODEL=]PROFILE, a JSON file of `moonpool profile` or a "
            "bundled one's name; may be given several times",
            default_text="a guess",
        ),
    ] = ()
    balancing_threshold: Annotated[
        float,
        Key("Ratio of the best cached prefix to a node's own above which KV is copied to the node", low=1, high=1e6),
    ] = 1.5
    max_copies: Annotated[
        int, Key("Copies of hot prefixes between pool nodes under way at once; 0: none are made", low=0, high=1024)
    ] = 8
    replication_horizon: Annotated[
        float,
        Key("Seconds over which demand for a prefix is measured and what a copy saves is predicted", low=1, high=86400),
    ] = 60.0
    replica_idle: Annotated[
        float, Key("Seconds without use after which a copied prefix is given up again", low=1, high=86400)
    ] = 180.0
    max_queue: Annotated[
        float, Key("Longest predicted wait, seconds, with which a request is still admitted", low=0.1, high=86400)
    ] = 60.0
    admission: Annotated[
        str,
        Key(
            "Requests predicted to miss their objectives: off serves them, shadow too but counts them, enforce refuses",
            choices=("off", "shadow", "enforce"),
        ),
    ] = "enforce"
    admission_mode: Annotated[
        str,
        Key(
            "What admission goes by: load when the request comes (early), load when its prefill ends, with answers of "
            "equal (predicted-uniform) or learned lengths (predicted)",
            choices=("none", "early", "predicted-uniform", "predicted"),
        ),
    ] = "predicted-uniform"
    attained_share: Annotated[
        float,
        Key(
            "Share of the admitted requests that are to meet each objective: predictions stay below it by margins "
            "learned from what came of others; 0 keeps none",
            low=0,
            high=0.99,
        ),
    ] = 0.95
    overrun_probability: Annotated[
        float,
        Key(
            "How often an answer may take more pages than the conductor reserved, by the lengths it learned; "
            "0 reserves for max_tokens",
            low=0,
            high=0.5,
        ),
    ] = 0.0
    prefill_group_size: Annotated[
        int,
        Key(
            "Prefill nodes that may compute one long prompt together, chunk by chunk; 1 = each by itself",
            low=1,
            high=64,
        ),
    ] = 1
    prefill_group_min_tokens: Annotated[
        int, Key("Tokens of a prompt that are not in the pool, from which on several nodes may compute it", low=1)
    ] = 4096
    role_switching: Annotated[
        str,
        Key(
            "Whether nodes change between prefill and decode as the load does: off; advise only says so; act",
            choices=("off", "advise", "act"),
        ),
    ] = "off"
    undivided: Annotated[
        str,
        Key(
            "Whether a request is prefilled on its decode node when that is faster and breaks nobody's time between "
            "tokens: off; advise only counts and explains; act",
            choices=("off", "advise", "act"),
        ),
    ] = "off"
    role_hold: Annotated[
        float, Key("Seconds for which such a change must have been the better split", low=1, high=86400)
    ] = 30.0
    role_rest: Annotated[float, Key("Seconds between two changes of a model's nodes", low=1, high=86400)] = 120.0
    size_grow_hold: Annotated[
        float,
        Key("Seconds for which more nodes of a role must have been needed until they are wanted", low=0, high=86400),
    ] = 15.0
    size_shrink_hold: Annotated[
        float, Key("Seconds for which fewer nodes must have been enough until fewer are wanted", low=0, high=86400)
    ] = 300.0
    aging: Annotated[
        float,
        Key(
            "Seconds that a request waits at most until nothing newer goes before it, whatever its class",
            low=1,
            high=86400,
        ),
    ] = 60.0
    max_tenants: Annotated[
        int,
        Key("Tenants of a model with shares and metrics of their own; all others share one", low=1, high=4096),
    ] = 64
    max_endless: Annotated[
        int, Key("Endless requests that one tenant may have of a model at a time; 0: none are taken", low=0, high=1024)
    ] = 4
    report_timeout: Annotated[
        float,
        Key(
            "Seconds of silence after which a node gets no work until it reports again, at least 2; 0: never",
            low=0,
            high=3600,
        ),
    ] = 5.0

    def check(self) -> None:
        if 0 < self.report_timeout < 2:
            raise ConfigError(
                f"--report-timeout is {self.report_timeout:g}: nodes report every second, so expected at least 2, or 0 "
                "to suspect none"
            )
