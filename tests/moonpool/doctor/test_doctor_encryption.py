"""The doctor's findings about the key material that the environment names."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool.doctor.checks import Level
from moonpool.doctor.network import KeyMaterial, judge_key_material, observe_key_material

TlsSettings = Callable[..., dict[str, Path]]


def environment(settings: dict[str, Path]) -> dict[str, str]:
    return {f"MOONPOOL_{key.upper()}": str(path) for key, path in settings.items()}


def test_usable_key_material_is_found_by_variables_and_by_the_file(tls_settings: TlsSettings, tmp_path: Path) -> None:
    settings = tls_settings()
    file = tmp_path / "cluster.yaml"
    file.write_text("".join(f"{key}: {path}\n" for key, path in settings.items()))
    for environ in (environment(settings), {"MOONPOOL_CONFIG": str(file)}):
        level, found, advice = judge_key_material(observe_key_material(environ), frozenset())
        assert (level, advice) == (Level.OK, "")
        assert found.startswith(f"{settings['tls_cert']} is valid for ")


def test_that_nothing_is_encrypted_is_said() -> None:
    level, found, _ = judge_key_material(observe_key_material({}), frozenset())
    assert (level, found) == (Level.NOTE, "MOONPOOL_TLS_CERT and MOONPOOL_CONFIG name no certificate")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"name": "expired"}, "certificate has expired"),
        ({"key": "successor"}, "does not belong to the certificate"),
        ({"name": "stranger"}, "is not signed by the CA"),
    ],
)
def test_what_nodes_would_refuse_fails(tls_settings: TlsSettings, given: dict[str, str], found: str) -> None:
    seen = observe_key_material(environment(tls_settings(**given)))
    level, text, _ = judge_key_material(seen, frozenset())
    assert level is Level.FAIL
    assert found in text


def test_an_incomplete_setting_fails(tls_settings: TlsSettings) -> None:
    environ = environment(tls_settings())
    del environ["MOONPOOL_TLS_CA"]
    level, found, _ = judge_key_material(observe_key_material(environ), frozenset())
    assert level is Level.FAIL
    assert "tls_ca must be set" in found


def test_a_key_that_others_can_read_is_warned_of(tls_settings: TlsSettings) -> None:
    settings = tls_settings()
    settings["tls_key"].chmod(0o640)
    level, _, advice = judge_key_material(observe_key_material(environment(settings)), frozenset())
    assert (level, advice) == (Level.WARN, f"Run chmod 600 {settings['tls_key']}.")


def test_a_certificate_that_ends_soon_is_warned_of() -> None:
    def level(days: float) -> Level:
        return judge_key_material(KeyMaterial("node.pem", "", days * 86400), frozenset())[0]

    assert [level(days) for days in (1, 13.9, 14.1, 400)] == [Level.WARN, Level.WARN, Level.OK, Level.OK]


def test_key_material_and_rdma_are_looked_at_at_once(tls_settings: TlsSettings) -> None:
    # Both import the messenger, on threads of their own, in a process that has not imported it yet.
    script = """
import json
from moonpool.doctor.command import DoctorOptions, all_checks
from moonpool.doctor.checks import examine
findings = examine(all_checks(DoctorOptions()), frozenset(), deadline_s=60.0)
print(json.dumps([[finding.check, finding.found] for finding in findings]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        timeout=100,
        check=True,
        env={**os.environ, **environment(tls_settings())},
    )
    checks = json.loads(ended.stdout)
    assert [found for _, found in checks if "the check failed" in found] == []
    assert any("is valid for" in found for check, found in checks if check == "encryption")
