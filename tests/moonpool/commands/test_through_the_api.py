"""Operators' commands against a real cluster: through its API server with a key, and with direct access."""

import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonpool.supervision.ready_file import ReadyFile

ADMIN, USER = "mp-admins-key", "mp-users-key"
DEADLINE_S = 150.0
OBJECTIVES = "classes:\n  chat: {ttft: 5, tbt: 100ms}\ndefault_class: chat\n"


@dataclass
class Remote:
    """A served cluster that requires keys, and the environment of a machine that has no other access to it."""

    folder: Path

    @property
    def ready(self) -> ReadyFile:
        return ReadyFile.read(self.folder / "ready.json")

    def run(self, *arguments: str, expect: int = 0, **environ: str) -> str:
        """Run `moonpool ARGUMENTS` and return its output, that of errors too."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MOONPOOL_", "XDG_"))}
        done = subprocess.run(
            [sys.executable, "-m", "moonpool", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**kept, "COLUMNS": "200", "TMPDIR": str(self.folder / "nothing"), **environ},
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    def through_api(self, *arguments: str, expect: int = 0) -> str:
        """Run a command of which only the environment names the cluster and the key."""
        return self.run(*arguments, expect=expect, MOONPOOL_URL=self.ready.url, MOONPOOL_API_KEY=f"{ADMIN}, other")

    def directly(self, *arguments: str, expect: int = 0) -> str:
        return self.run(*arguments, "--ready-file", str(self.folder / "ready.json"), expect=expect)

    def complete(self) -> str:
        """Have one request answered, and return its id."""
        body = {"model": self.ready.model, "prompt": "In the beginning there was a pool", "max_tokens": 4}
        headers = {"content-type": "application/json", "authorization": f"Bearer {USER}"}
        request = urllib.request.Request(f"{self.ready.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(json.load(reply)["id"])


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    # A short path: unix sockets allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="mpa-"))
    (folder / "nothing").mkdir()
    entries = [
        f"- {{name: {name}, hash: 'sha256:{hashlib.sha256(key.encode()).hexdigest()}', tenant: {name}, scope: {scope}}}"
        for name, key, scope in (("ops", ADMIN, "admin"), ("acme", USER, "user"))
    ]
    (folder / "keys.yaml").write_text("\n".join(("keys:", *entries, "")))
    for name, key in (("admin", ADMIN), ("user", USER)):
        (folder / name).write_text(key)
    command = [sys.executable, "-m", "moonpool", "serve", "--port=0", f"--run-dir={folder / 'run'}", "--frontends=1"]
    flags = [
        *(f"--ready-file={folder / 'ready.json'}", f"--api-keys-file={folder / 'keys.yaml'}"),
        *(f"--decision-log={folder / 'log'}", "--engine=paced", "--block-tokens=8", "--capacity-tokens=8192"),
        *("--prefill-nodes=2",),
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
    process = subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environ, "MOONPOOL_SUPERVISOR_PID": str(os.getpid()), "MOONPOOL_URL": "http://elsewhere:8000"},
    )
    try:
        give_up = time.monotonic() + DEADLINE_S
        while not (folder / "ready.json").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up, "not ready"
            time.sleep(0.05)
        yield Remote(folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        shutil.rmtree(folder)


def test_status_is_the_same_through_the_api_as_with_direct_access(remote: Remote) -> None:
    remote.complete()
    near = json.loads(remote.directly("status", "--json"))
    far = json.loads(remote.through_api("status", "--json"))
    kept = ("node", "role", "model", "state", "pid", "restarts", "capacity_tokens", "version", "address")
    assert [{key: row[key] for key in kept} for row in far["nodes"]] == [
        {key: row[key] for key in kept} for row in near["nodes"]
    ]
    assert (far["ready"], far["models"]) == (True, near["models"])
    assert {row["node"] for row in far["nodes"]} == set(remote.ready.nodes)


def test_the_environment_may_name_a_conductor_for_direct_access(remote: Remote) -> None:
    far = json.loads(remote.run("status", "--json", MOONPOOL_CONDUCTOR=remote.ready.conductor, MOONPOOL_URL="no:1"))
    assert {row["node"] for row in far["nodes"]} >= {"pool-0", "prefill-0", "decode-0"}


def test_validate_checks_every_process_and_waits_until_nothing_is_held(remote: Remote) -> None:
    remote.complete()
    far = json.loads(remote.through_api("validate", "--wait", "30", "--json"))
    assert far["ok"]
    assert {node["node_id"] for node in far["nodes"]} == set(remote.ready.nodes)


def test_top_and_the_pool_are_shown(remote: Remote) -> None:
    assert "decode-0" in remote.through_api("top", "--once", "--every", "0.2")
    pool = json.loads(remote.through_api("pool", "status", "--json"))
    assert [(node["node_id"], node["problem"]) for node in pool["nodes"]] == [("pool-0", "")]
    assert "No pool node has a block" in remote.through_api("pool", "inspect", "0123456789abcdef", expect=1)


def test_the_pool_is_verified_and_flushed_node_by_node(remote: Remote) -> None:
    remote.complete()
    remote.through_api("validate", "--wait", "30")
    checked = json.loads(remote.through_api("pool", "verify", "--json"))
    assert checked["pool-0"]["checked"] == checked["pool-0"]["total"] > 0
    assert checked["pool-0"]["corrupt"] == 0
    removed = json.loads(remote.through_api("pool", "flush", "--yes", "--json"))
    assert removed["pool-0"]["removed"] == checked["pool-0"]["total"]


def test_the_doctor_judges_all_but_the_ports_that_only_the_cluster_reaches(remote: Remote) -> None:
    said = json.loads(remote.through_api("doctor", "--cluster", "--json"))
    levels = {check["check"]: check["level"] for check in said["checks"]}
    assert said["ok"]
    assert levels["KV ports"] == "note"
    assert {levels[name] for name in ("conductors", "API servers", "control ports", "objectives")} == {"ok"}


def test_a_decision_is_explained(remote: Remote) -> None:
    request_id = remote.complete()
    said = json.loads(remote.through_api("decisions", "explain", request_id, "--json"))
    assert [record["request_id"] for record in said["records"]] == [request_id]


def test_objectives_are_changed_in_the_name_of_the_key(remote: Remote) -> None:
    path = remote.folder / "slo.yaml"
    path.write_text(OBJECTIVES)
    said = remote.through_api("slo", "set", str(path), "--reason", "a launch", "--author", "alice")
    assert "acknowledged by conductor" in said
    shown = json.loads(remote.through_api("slo", "show", "--json"))
    assert shown["author"] == "alice (key ops)"
    assert shown["objectives"]["default_class"] == "chat"
    path.write_text(OBJECTIVES.replace("default_class: chat", "default_class: nobody"))
    assert "nobody" in remote.through_api("slo", "set", str(path), "--reason", "a slip", expect=2)


def test_workers_are_switched_drained_and_started(remote: Remote) -> None:
    assert "is a decode node" in remote.through_api("node", "switch", "prefill-1", "decode")
    refused = remote.through_api("node", "drain", "prefill-0", expect=1)
    assert "--force drains it anyway" in refused
    assert "prefill-1 has left" in remote.through_api("node", "drain", "prefill-1")
    assert "decode-1" in remote.through_api("node", "scale", "decode=2")
    assert "role must be one of" in remote.through_api("node", "scale", "wizard=2", expect=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "an API key is required"),
        (("--api-key-file", "user"), "requires an API key with admin scope"),
        (("--api-key-file", "none"), "cannot read the secret"),
    ],
)
def test_without_an_admins_key_the_commands_name_what_is_missing(
    remote: Remote, arguments: tuple[str, ...], said: str
) -> None:
    given: list[str] = [str(remote.folder / each) if not each.startswith("-") else each for each in arguments]
    for command in (("status",), ("node", "drain", "decode-0"), ("slo", "show")):
        answer = remote.run(*command, "--url", remote.ready.url, *given, expect=2 if "none" in arguments else 1)
        assert said in answer
    key = str(remote.folder / "admin")
    assert "decode-0" in remote.run("status", "--url", f"{remote.ready.url}/v1", "--api-key-file", key)


def test_a_server_that_is_away_or_another_one_is_named(remote: Remote) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        assert f"{url} answers with HTTP 501: is it an API server of Moonpool?" in remote.run(
            "status", "--url", url, expect=1
        )
        other.shutdown()
    assert "no API server answers at http://127.0.0.1:1" in remote.run("status", "--url", "127.0.0.1:1", expect=1)
    said = remote.run("status", expect=1)
    assert "give --url URL (or MOONPOOL_URL)" in said
