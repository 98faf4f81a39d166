"""A Docker engine in namespaces of its own: nothing of it is left on the machine when it has stopped, however it ended.

Its processes live in a pid namespace, and the kernel ends them all with the first; the first ends with this process
(``setpriv --pdeathsig``, ``unshare --kill-child``). Its mounts and, unless it needs the network, its interfaces and
firewall rules are in namespaces too. Only control groups are the machine's: they get a parent of their own, which is
removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from pipeline.core.errors import Misconfigured

ENTER = Path(__file__).with_name("enter.sh")
CGROUPS = Path("/sys/fs/cgroup")
OF_CONTAINERS = ("containers", "volumes", "network")
"""In the engine's store: what a run that was cut short left, and the engine would start again."""
START_SECONDS, STOP_SECONDS = 60.0, 60.0
TOOLS = ("unshare", "setpriv", "nsenter", "mount", "umount", "pivot_root", "apt-get")


def require_machine() -> None:
    """Raises Misconfigured with one line where an engine cannot be started."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Misconfigured(f"{', '.join(missing)}: not found; `make engines` needs a Debian machine")
    if os.geteuid() != 0:
        raise Misconfigured("`make engines` needs root, for namespaces, mounts and a Docker engine")


class Engine:
    """A context: dockerd runs within. root: a Debian with Docker; data: what the engine stores; mounts: folders of
    this machine, by the path at which they are shown read-only. offline: with a network of its own, in which containers
    reach each other and published ports are on loopback; otherwise with this machine's, for pulling and building only.
    """

    def __init__(self, root: Path, data: Path, log: Path, mounts: Mapping[str, Path], *, offline: bool) -> None:
        self._root, self._data, self._log, self._mounts, self._offline = root, data, log, mounts, offline
        self._cgroup = f"penstock-engines-{os.getpid()}"
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init: psutil.Process | None = None

    def __enter__(self) -> Engine:
        self._data.mkdir(parents=True, exist_ok=True)
        for name in OF_CONTAINERS:
            shutil.rmtree(self._data / name, ignore_errors=True)
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def command(self, *command: str) -> list[str]:
        """The command line that runs this command inside. Only while the engine runs."""
        if self._init is None:
            raise RuntimeError("the engine does not run")
        namespaces = ["--mount", "--pid", *(["--net"] if self._offline else [])]
        return ["nsenter", f"--target={self._init.pid}", *namespaces, "--", *command]

    def run(
        self, *command: str, seconds: float, environment: Mapping[str, str] | None = None, send: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside; its output is also appended to the log. Raises subprocess.TimeoutExpired."""
        done = subprocess.run(
            self.command(*command),
            env={**self._environment(), **(environment or {})},
            input=send,
            stdin=None if send is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
        with self._log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}exit code {done.returncode}\n")
        return done

    def _environment(self) -> dict[str, str]:
        """The variables of this process that commands inside see: proxies, and nothing else."""
        proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        return {**proxies, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/run", "LANG": "C.UTF-8"}

    def _start(self) -> None:
        shown = [
            part for target, source in self._mounts.items() for part in ("--read-only", str(source.resolve()), target)
        ]
        network = [] if self._offline else ["--bridge=none", "--iptables=false", "--ip6tables=false"]
        with self._log.open("ab") as log:
            self._unshare = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child", *(["--net"] if self._offline else [])),
                    *("sh", str(ENTER), str(self._root.resolve()), *shown),
                    *("--writable", str(self._data.resolve()), "/var/lib/docker", "--"),
                    *("tini", "--", "dockerd", "--log-level=warn", f"--cgroup-parent=/{self._cgroup}"),
                    *("--exec-opt", "native.cgroupdriver=cgroupfs", "--shutdown-timeout=40", *network),
                ],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._unshare.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(self._unshare.pid).children()
                self._init = children[0] if children else None
            if self._init is not None and self._answers():
                return
            time.sleep(0.2)
        raise Misconfigured(f"the Docker engine did not start: {_last_line(self._log)} (log: {self._log})")

    def _answers(self) -> bool:
        command = self.command("docker", "info", "--format", "{{.ServerVersion}}")
        done = subprocess.run(command, env=self._environment(), capture_output=True, check=False, timeout=30)
        return done.returncode == 0

    def _stop(self) -> None:
        """Ask the first process to end, then kill it, and with it all others."""
        if self._unshare is None:
            return
        if self._init is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._init.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._unshare.wait(STOP_SECONDS)
        if self._unshare.poll() is None:
            self._unshare.kill()
            self._unshare.wait()
        self._unshare = self._init = None
        _remove_cgroups(self._cgroup)


def _remove_cgroups(name: str) -> None:
    """A control group can be removed when its last process has been reaped."""
    deadline = time.monotonic() + 5
    for parent in [CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())]:
        top = parent / name
        while top.exists():
            try:
                for path in sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True):
                    path.rmdir()
                top.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    return lines[-1][:300]


def packages(root: Path, *names: str) -> dict[str, str]:
    """Versions of Debian's packages in the root."""
    command: Sequence[str] = ("dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f", "${Package} ${Version}\n")
    listed = subprocess.run([*command, *names], capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ", 1) for line in listed.splitlines())
