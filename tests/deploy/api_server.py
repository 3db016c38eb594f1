"""A Kubernetes API server and its etcd, as processes of this machine, and requests to it.

The programs are those that Kubernetes' own tools for tests use: `etcd` and `kube-apiserver`, in the folder that
KUBEBUILDER_ASSETS names (`setup-envtest use -p path` prints one), or on the PATH. No controller runs: objects are
authorised, admitted, validated, defaulted and stored, but nothing is made from them.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moonpool.supervision.http_port import claim_port

__all__ = ["ADMIN", "OWNER", "PROGRAMS", "ApiServer", "Reply", "find_programs", "running"]

PROGRAMS = ("etcd", "kube-apiserver")
ASSETS = "KUBEBUILDER_ASSETS"
ADMIN = "admin"  # may do everything
OWNER = "owner"  # has rights in the namespaces that `ApiServer.own` gives to it
START_LIMIT_S = 240
CALL_LIMIT_S = 60
_SERVICE_NETWORK = "10.96.0.0/16"
# The roles of which Kubernetes composes the role "admin" of a namespace; a controller does that, and none runs here.
_NAMESPACE_ROLES = ("system:aggregate-to-admin", "system:aggregate-to-edit", "system:aggregate-to-view")


@dataclass(frozen=True)
class Reply:
    """An answer of the API server."""

    status: int
    body: dict[str, Any]
    warnings: tuple[str, ...]

    def ok(self) -> Reply:
        """Return the reply itself; raises AssertionError with its text if the request was refused."""
        assert self.status < 300, (self.status, self.body)
        return self


@dataclass(frozen=True)
class Resource:
    """A kind of object in a namespace, as discovery lists it."""

    root: str  # path of its group and version
    plural: str
    can_list: bool

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of its objects in a namespace, or of one of them."""
        return f"{self.root}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")


class ApiServer:
    """Requests to a running API server, as one of its two users."""

    def __init__(self, url: str, ca_file: Path) -> None:
        self.url = url
        self.ca_file = ca_file
        self._tls = ssl.create_default_context(cafile=str(ca_file))

    def request(self, method: str, path: str, body: Any = None, *, user: str = ADMIN, **query: str) -> Reply:
        """Send one request; the query's parameters are those of the API, e.g. dryRun="All"."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        call = urllib.request.Request(
            f"{self.url}{path}?{urllib.parse.urlencode(query)}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {user}", "Content-Type": kind},
            method=method,
        )
        try:
            with urllib.request.urlopen(call, timeout=CALL_LIMIT_S, context=self._tls) as answer:
                return Reply(answer.status, json.load(answer), tuple(answer.headers.get_all("Warning", ())))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, {"message": error.read().decode()}, ())

    def resources(self) -> dict[tuple[str, str], Resource]:
        """Return the kinds of objects in namespaces by (version, kind), those of a group in its preferred version."""
        groups = self.request("GET", "/apis").ok().body["groups"]
        found: dict[tuple[str, str], Resource] = {}
        for version in ("v1", *(group["preferredVersion"]["groupVersion"] for group in groups)):
            root = f"/apis/{version}" if "/" in version else f"/api/{version}"
            for one in self.request("GET", root).ok().body["resources"]:
                if one["namespaced"] and "/" not in one["name"]:
                    found[version, one["kind"]] = Resource(root, one["name"], "list" in one["verbs"])
        return found

    def contents(self, namespace: str) -> dict[tuple[str, str], dict[str, Any]]:
        """Return all objects of a namespace by kind and name, without what the server counts and measures."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for (_, kind), resource in self.resources().items():
            if resource.can_list and kind != "Event":
                for one in self.request("GET", resource.path(namespace)).ok().body["items"]:
                    metadata = {key: one["metadata"].get(key, {}) for key in ("labels", "annotations")}
                    metadata["annotations"].pop("deprecated.daemonset.template.generation", None)
                    kept = {key: value for key, value in one.items() if key not in ("metadata", "status")}
                    found[kind, one["metadata"]["name"]] = {**kept, "metadata": metadata}
        return found

    def create_namespace(self, name: str, **labels: str) -> None:
        """Create a namespace in which the owner has the role "admin" of Kubernetes, and rights to custom objects."""
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}}).ok()
        bindings = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{name}/rolebindings"
        for number, role in enumerate((*_NAMESPACE_ROLES, "custom-objects")):
            self.request(
                "POST",
                bindings,
                {
                    "metadata": {"name": f"owner-{number}"},
                    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": OWNER}],
                },
            ).ok()

    def add_custom_resources(self, kinds: dict[str, str]) -> None:
        """Define custom resources, such as {"Certificate": "cert-manager.io/v1"}, and wait until they are served."""
        groups = sorted({version.partition("/")[0] for version in kinds.values()})
        role = {
            "metadata": {"name": "custom-objects"},
            "rules": [{"apiGroups": groups, "resources": ["*"], "verbs": ["*"]}],
        }
        self.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterroles", role).ok()
        for kind, group_version in kinds.items():
            group, version = group_version.split("/")
            plural = f"{kind.lower()}s"
            schema = {"type": "object", "properties": {"spec": _anything()}}
            definition = {
                # Groups of Kubernetes' own need the annotation.
                "metadata": {
                    "name": f"{plural}.{group}",
                    "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
                },
                "spec": {
                    "group": group,
                    "names": {"kind": kind, "plural": plural},
                    "scope": "Namespaced",
                    "versions": [
                        {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
                    ],
                },
            }
            self.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition).ok()
        deadline = time.monotonic() + START_LIMIT_S
        while missing := [kind for kind, version in kinds.items() if not self._is_served(version, kind)]:
            assert time.monotonic() < deadline, f"not served: {missing}"
            time.sleep(0.1)

    def _is_served(self, version: str, kind: str) -> bool:
        resource = self.resources().get((version, kind))
        return resource is not None and self.request("GET", resource.path("default")).status == 200

    def kubeconfig(self, user: str, namespace: str) -> str:
        """Return the content of a kubeconfig for one of the users."""
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.ca_file)}}
                ],
                "users": [{"name": user, "user": {"token": user}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
                "current-context": "test",
            }
        )


def find_programs() -> dict[str, str] | str:
    """Return the paths of etcd and kube-apiserver by name, or a sentence that says which of them are missing."""
    folders = os.pathsep.join(filter(None, (os.environ.get(ASSETS), os.environ.get("PATH"))))
    found = {name: shutil.which(name, path=folders) for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        return f"{' and '.join(missing)} must be on the PATH or in the folder {ASSETS} (setup-envtest use -p path)"
    return {name: path for name, path in found.items() if path is not None}


@contextmanager
def running(programs: dict[str, str], folder: Path, key: Path, certificate: Path) -> Iterator[ApiServer]:
    """Run etcd and an API server at loopback addresses, with their files in `folder`, until the end of the block.

    The server signs tokens of service accounts with `key`, of which `certificate` has the public part.
    """
    store, peers, port = (claim_port("127.0.0.1", 0) for _ in range(3))
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{ADMIN},{ADMIN},1,"system:masters"\n{OWNER},{OWNER},2\n', encoding="utf-8")
    etcd = [
        programs["etcd"],
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{store}",
        f"--advertise-client-urls=http://127.0.0.1:{store}",
        f"--listen-peer-urls=http://127.0.0.1:{peers}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
        f"--initial-cluster=default=http://127.0.0.1:{peers}",
    ]
    server = [
        programs["kube-apiserver"],
        f"--etcd-servers=http://127.0.0.1:{store}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",  # which would refuse that address
        f"--secure-port={port}",
        f"--cert-dir={folder / 'certificates'}",
        f"--service-cluster-ip-range={_SERVICE_NETWORK}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={certificate}",
        f"--service-account-signing-key-file={key}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
    ]
    with ExitStack() as stack:
        logs = {Path(command[0]).name: folder / f"{Path(command[0]).name}.log" for command in (etcd, server)}
        processes = [stack.enter_context(_process(command, logs[Path(command[0]).name])) for command in (etcd, server)]
        own = folder / "certificates" / "apiserver.crt"  # written before the port is opened
        deadline = time.monotonic() + START_LIMIT_S
        while not (own.exists() and _is_ready(f"https://127.0.0.1:{port}", own)):
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                raise AssertionError([log.read_text(encoding="utf-8")[-4000:] for log in logs.values()])
            time.sleep(0.1)
        yield ApiServer(f"https://127.0.0.1:{port}", own)


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_ready(url: str, certificate: Path) -> bool:
    try:
        tls = ssl.create_default_context(cafile=str(certificate))
        call = urllib.request.Request(f"{url}/readyz", headers={"Authorization": f"Bearer {ADMIN}"})
        with urllib.request.urlopen(call, timeout=CALL_LIMIT_S, context=tls) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _anything() -> dict[str, Any]:
    """Schema of an object whose fields the API server does not know."""
    return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
