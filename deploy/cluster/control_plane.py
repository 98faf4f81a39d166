"""A kube-apiserver with its etcd on this machine, for as long as a ``with`` block lasts: no kubelet, no controllers."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from deploy.cluster import programs
from deploy.local.service import HOST, clean_env, free_port, is_free, reason
from pipeline.core.errors import Misconfigured

START_SECONDS = 120
STOP_SECONDS = 20
COMMAND_SECONDS = 120
_PR_SET_PDEATHSIG = 1


class ClusterSettings(BaseSettings):
    """``PENSTOCK_CLUSTER_PORT_API`` and so on. A port that is not set is found free."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CLUSTER_", frozen=True, extra="ignore")

    port_api: int | None = Field(None, ge=1, le=65535)
    port_etcd: int | None = Field(None, ge=1, le=65535)
    port_etcd_peer: int | None = Field(None, ge=1, le=65535)


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a command of kubectl or helm."""

    ok: bool
    output: str
    errors: str

    @property
    def complaint(self) -> str:
        return " ".join((self.errors or self.output).split())[:400]


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running API server."""

    url: str
    token: str
    authority: Path
    scratch: Path

    def kubectl(self, *arguments: str, text: str | None = None) -> Answer:
        """Run kubectl as an administrator. text: its standard input."""
        options = [f"--server={self.url}", f"--token={self.token}", f"--certificate-authority={self.authority}"]
        program = str(programs.require("kubectl"))
        return self._run([program, *options, f"--cache-dir={self.scratch / 'kubectl'}", *arguments], text)

    def helm(self, *arguments: str) -> Answer:
        """Run helm as an administrator."""
        options = [f"--kube-apiserver={self.url}", f"--kube-token={self.token}", f"--kube-ca-file={self.authority}"]
        return self._run([str(programs.require("helm")), *options, *arguments], None)

    def _run(self, command: list[str], text: str | None) -> Answer:
        home = {"HOME": str(self.scratch), "KUBECONFIG": os.devnull}
        done = subprocess.run(
            command,
            input=text or "",
            env={**clean_env(), **home},
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )
        return Answer(done.returncode == 0, done.stdout, done.stderr)


@contextmanager
def running(settings: ClusterSettings) -> Iterator[ControlPlane]:
    """A control plane that answers; it ends with the block, or with this process. Raises Misconfigured when it does not
    start."""
    api, etcd, peer = _ports(settings)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-cluster-")))
        storage = _spawn(stack, scratch, "etcd", _etcd_options(scratch, etcd, peer))
        token = secrets.token_urlsafe(32)
        server = _spawn(stack, scratch, "kube-apiserver", _api_options(scratch, api, etcd, token))
        plane = ControlPlane(f"https://{HOST}:{api}", token, scratch / "certificates/apiserver.crt", scratch)
        deadline = time.monotonic() + START_SECONDS
        while not (plane.authority.exists() and plane.kubectl("get", "--raw", "/readyz").ok):
            for name, process in (("etcd", storage), ("kube-apiserver", server)):
                if process.poll() is not None:
                    raise Misconfigured(f"{name} has ended: {reason(scratch / f'{name}.log', 0)}")
            if time.monotonic() > deadline:
                raise Misconfigured(f"kube-apiserver is not ready after {START_SECONDS} s")
            time.sleep(0.2)
        yield plane


def _ports(settings: ClusterSettings) -> list[int]:
    ports: list[int] = []
    for name in ("port_api", "port_etcd", "port_etcd_peer"):
        port = getattr(settings, name)
        if port is not None and not is_free(port):
            raise Misconfigured(f"port {port} (PENSTOCK_CLUSTER_{name.upper()}) is taken by another program")
        ports.append(port or free_port(taken=frozenset(ports)))
    return ports


def _etcd_options(scratch: Path, port: int, peer: int) -> list[str]:
    client_url, peer_url = f"http://{HOST}:{port}", f"http://{HOST}:{peer}"
    return [
        f"--data-dir={scratch / 'etcd'}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        "--unsafe-no-fsync",  # nobody needs what it stores after this run
    ]


def _api_options(scratch: Path, port: int, etcd: int, token: str) -> list[str]:
    key, tokens = scratch / "accounts.pem", scratch / "tokens.csv"
    private = ec.generate_private_key(ec.SECP256R1())
    for path, text in (
        (key, private.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()),
        (tokens, f"{token},administrator,1,system:masters\n"),
    ):
        path.touch(mode=0o600)
        path.write_text(text)
    return [
        f"--etcd-servers=http://{HOST}:{etcd}",
        f"--bind-address={HOST}",
        f"--secure-port={port}",
        f"--advertise-address={HOST}",
        "--endpoint-reconciler-type=none",  # a loopback address cannot be an endpoint of the service `kubernetes`
        f"--cert-dir={scratch / 'certificates'}",
        "--service-cluster-ip-range=10.0.0.0/24",
        f"--service-account-issuer=https://{HOST}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        "--allow-privileged",  # so that Pod Security decides
        "--disable-admission-plugins=ServiceAccount",  # no controller creates the tokens that it waits for
    ]


def _spawn(stack: ExitStack, scratch: Path, name: str, options: list[str]) -> subprocess.Popen[bytes]:
    program = str(programs.require(name))
    log = stack.enter_context((scratch / f"{name}.log").open("wb"))
    process = subprocess.Popen(
        [program, *options],
        cwd=scratch,
        env=clean_env(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=_end_with_parent,
    )
    stack.callback(_stop, process)
    return process


def _end_with_parent() -> None:
    """In the child: the kernel ends it when the process that started it is killed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
