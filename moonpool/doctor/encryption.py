"""The key material of traffic between hosts, where the environment names any: can it be used, and for how long."""

import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moonpool.doctor.finding import Check, Level, Needs, Verdict
from moonpool.doctor.importing import ONE_AT_A_TIME
from moonpool.encryption import settings_of_environment
from moonpool.errors import ConfigError

_SOON_S: Final = 14 * 86400.0


@dataclass(frozen=True)
class KeyMaterial:
    """`cert` "" where none is named; `problem` "" when it can be used, which then is so for `left_s`."""

    cert: str = ""
    problem: str = ""
    left_s: float = 0.0
    open_key: str = ""  # a private key that other users can read


def observe_key_material(environ: Mapping[str, str] = os.environ) -> KeyMaterial:
    try:
        settings = settings_of_environment(environ).tls
    except ConfigError as error:
        return KeyMaterial("?", str(error))
    with ONE_AT_A_TIME:
        files = settings.files
        if files is None:
            return KeyMaterial()
        from rpc.errors import InvalidArgument
        from rpc.tls import load

    try:
        material = load(files)
    except InvalidArgument as error:
        return KeyMaterial(str(files.cert), str(error))
    is_open = files.key.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    return KeyMaterial(str(files.cert), "", material.expires_s - time.time(), str(files.key) if is_open else "")


def judge_key_material(seen: KeyMaterial, needs: Needs) -> Verdict:
    if seen.problem:
        return (
            Level.FAIL,
            seen.problem,
            "Until then no node starts with it: see Encrypting traffic in docs/operations.md.",
        )
    if not seen.cert:
        advice = "Between hosts set tls_cert, tls_key and tls_ca, unless the network is closed to others."
        return Level.NOTE, "MOONPOOL_TLS_CERT and MOONPOOL_CONFIG name no certificate", advice
    found = f"{seen.cert} can be used for {seen.left_s / 86400:.0f} days"
    if seen.open_key:
        return Level.WARN, f"{found}; other users may read {seen.open_key}", f"chmod 600 {seen.open_key}"
    if seen.left_s < _SOON_S:
        return Level.WARN, found, "Have a new one made and put it in the same files: nodes take it without a restart."
    return Level.OK, found, ""


CHECKS: Final = (Check("encryption", observe_key_material, judge_key_material),)
