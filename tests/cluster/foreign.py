"""A Slurm cluster set up without our code, and an ordinary user with `pip install dalsegno` at home.

A mount namespace has its own /etc/slurm and /etc/passwd, so that the user needs no SLURM_CONF. Every node is a slurmd
in its own PID namespace, on a loopback port. Killing the first process of the namespace loses the node.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.system.hanging_calls import slowness
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PYTHON = str(Path(sys.executable).resolve())
NODES = ("c1", "c2", "c3")
USER, UID = "ana", 4242
NEEDED = (
    *("click", "yaml", "_yaml", "pydantic", "pydantic_core", "annotated_types", "typing_extensions"),
    "typing_inspection",
)

SLURM_CONF = """
ClusterName=campus
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/slurmctld
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
SlurmdTimeout=6
ReturnToService=1
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
NodeName=c1 NodeHostname={host} NodeAddr=127.0.0.1 Port={c1} CPUs=2 RealMemory=4000
NodeName=c2 NodeHostname={host} NodeAddr=127.0.0.1 Port={c2} CPUs=2 RealMemory=4000
NodeName=c3 NodeHostname={host} NodeAddr=127.0.0.1 Port={c3} CPUs=2 RealMemory=4000
PartitionName=all Nodes=c[1-3] Default=YES MaxTime=1:00:00
PartitionName=short Nodes=c[2-3] MaxTime=10 PriorityTier=5
"""


# Nodes that exist only while a job needs them. The settings are those of ParallelCluster, with shorter times.
ON_DEMAND = ("train-dy-train-1", "train-dy-train-2", "train-dy-train-3", "train-dy-train-4")
POWER_SAVING = """
SuspendProgram={root}/suspend
ResumeProgram={root}/resume
SuspendTime=4
SuspendTimeout=4
ResumeTimeout=60
SuspendRate=0
ResumeRate=0
PrivateData=CLOUD
SlurmctldParameters=idle_on_node_suspend,power_save_interval=1,power_save_min_interval=0
"""
RESUME = """#!/bin/sh
# Start a machine for each node: a slurmd that reports a new boot, in a PID namespace of its own
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
for node in $(scontrol show hostnames "$1"); do
  mkdir -p {root}/spool/"$node"
  setsid unshare --pid --fork --kill-child --mount-proc slurmd -D -b -N "$node" \
    </dev/null >>{root}/machines.out 2>&1 &
  echo $! >{root}/machines/"$node"
  echo "up $node" >>{root}/power
done
"""
SUSPEND = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
for node in $(scontrol show hostnames "$1"); do
  if [ -e {root}/machines/"$node" ]; then
    kill -9 "$(cat {root}/machines/"$node")"
    rm {root}/machines/"$node"
  fi
  echo "down $node" >>{root}/power
done
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass
class ForeignCluster:
    """The cluster, and its user's home."""

    root: Path
    daemons: ExitStack
    holder: int = 0
    slurmd: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.root / "home" / USER

    @property
    def inside(self) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self.holder}/ns/mnt"]

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a daemon, which ends with the cluster."""
        with (self.root / f"{Path(argv[0]).name}.out").open("ab") as log:
            process = subprocess.Popen(
                [*(self.inside if self.holder else []), *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, start_new_session=True,
            )  # fmt: skip
        self.daemons.callback(end, process)
        return process

    def boot(self, node: str) -> None:
        """Start a node. When its first process is killed, all others end with it."""
        (self.root / "spool" / node).mkdir(parents=True, exist_ok=True)
        argv = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "slurmd", "-D", "-N", node)
        self.slurmd[node] = self.start(*argv)

    def lose(self, node: str) -> None:
        if node in ON_DEMAND:
            os.kill(int((self.root / "machines" / node).read_text()), signal.SIGKILL)
            (self.root / "machines" / node).unlink()
            return
        self.slurmd[node].kill()
        self.slurmd[node].wait()

    def powered(self) -> list[str]:
        """Return the actions of Slurm's power-saving programs, in order, such as "up train-dy-train-1"."""
        path = self.root / "power"
        return path.read_text().splitlines() if path.exists() else []

    def as_root(self, *argv: str) -> str:
        """Return the output of an administrator's command, whether it succeeds or not."""
        argv = tuple(self._root_argv(*argv))
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout

    def _root_argv(self, *argv: str) -> list[str]:
        path = f"{self.home}/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return [*self.inside, "env", "-i", f"DALSEGNO_HOME={self.root}/admin", f"PATH={path}", *argv]

    def ok_as_root(self, *argv: str) -> str:
        """Run a command as an administrator, with a separate state folder."""
        done = subprocess.run(self._root_argv(*argv), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{' '.join(argv)} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start_as_root(self, *argv: str) -> subprocess.Popen[bytes]:
        with (self.root / "watcher.out").open("ab") as log:
            process = subprocess.Popen(self._root_argv(*argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.daemons.callback(process.kill)
        return process

    def states(self) -> dict[str, str]:
        return dict(line.split() for line in self.as_root("sinfo", "-h", "-N", "-o", "%N %T").splitlines())

    def argv(self, *argv: str) -> list[str]:
        """Return a command as the user runs it, in the environment of a login shell without variables of Slurm."""
        become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        path = f"{self.home}/venv/bin:/usr/local/bin:/usr/bin:/bin"
        return [
            *self.inside,
            *become,
            "env",
            "-i",
            f"--chdir={self.home}",
            f"HOME={self.home}",
            f"USER={USER}",
            f"PATH={path}",
            *argv,
        ]

    def user(self, *argv: str, timeout_s: float = 60) -> Done:
        done = subprocess.run(
            self.argv(*argv), cwd=self.home, capture_output=True, text=True, timeout=timeout_s * slowness(),
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    def ok(self, *argv: str, timeout_s: float = 60) -> str:
        done = self.user(*argv, timeout_s=timeout_s)
        assert done.code == 0, f"{' '.join(argv)} -> {done.code}\n{done.out}\n{done.err}"
        return done.out


@contextmanager
def foreign_cluster(*, on_demand: bool = False) -> Iterator[ForeignCluster]:
    """Yield the cluster when all nodes are idle, or with `on_demand` when all are powered down. Remove everything
    afterwards."""
    root = Path(tempfile.mkdtemp(prefix="ds-foreign-", dir="/tmp"))
    root.chmod(0o755)
    nodes = ON_DEMAND if on_demand else NODES
    with ExitStack() as daemons:
        daemons.callback(shutil.rmtree, root, ignore_errors=True)
        cluster = ForeignCluster(root, daemons)
        _write_files(cluster, nodes)
        cluster.holder = _hold_namespace(cluster)
        _start_munged(cluster)
        if on_demand:
            daemons.callback(_end_machines, cluster)
        cluster.start("slurmctld", "-D", "-c")
        for node in () if on_demand else nodes:
            cluster.boot(node)
        ready = "idle~" if on_demand else "idle"
        eventually(lambda: list(cluster.states().values()) == [ready] * len(nodes))
        yield cluster


def _end_machines(cluster: ForeignCluster) -> None:
    """End the machines that the resume program has started."""
    for path in (cluster.root / "machines").iterdir():
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def _write_files(cluster: ForeignCluster, nodes: Sequence[str]) -> None:
    root = cluster.root
    ports = free_ports(len(nodes) + 1)
    for name in ("etc-slurm", "slurmctld", "spool", "empty", "machines"):
        (root / name).mkdir()
    host, places = socket.gethostname().partition(".")[0], dict(zip(nodes, ports[1:], strict=True))
    common, _, _ = SLURM_CONF.partition("NodeName=")
    if nodes == ON_DEMAND:
        conf = common.format(host=host, root=root, port=ports[0]) + POWER_SAVING.format(root=root)
        for node, port in places.items():
            conf += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 "
            conf += "State=CLOUD\n"
        conf += f"PartitionName=train Nodes={','.join(nodes)} Default=YES MaxTime=1:00:00\n"
        for name, text in (("resume", RESUME), ("suspend", SUSPEND)):
            (root / name).write_text(text.format(root=root))
            (root / name).chmod(0o755)
    else:
        conf = SLURM_CONF.format(host=host, root=root, port=ports[0], **places)
    (root / "etc-slurm/slurm.conf").write_text(conf)
    known = [line for line in Path("/etc/passwd").read_text().splitlines() if f":{UID}:" not in line]
    (root / "passwd").write_text("\n".join([*known, f"{USER}:x:{UID}:{UID}::{cluster.home}:/bin/sh"]) + "\n")
    cluster.home.mkdir(parents=True)
    os.chown(cluster.home, UID, UID)
    cluster.home.chmod(0o700)


def free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        socks = [opened.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


def _hold_namespace(cluster: ForeignCluster) -> int:
    """Start a process whose mount namespace has the cluster's /etc/slurm and users; return its PID."""
    root = cluster.root
    mounts = [
        f"mount --bind {root}/etc-slurm /etc/slurm",
        f"mount --bind {root}/passwd /etc/passwd",
        # Hides the clusters of this machine
        f"[ ! -d /var/lib/dalsegno ] || mount --bind {root}/empty /var/lib/dalsegno",
        f"touch {root}/held",
        "exec sleep infinity",
    ]
    holder = cluster.start("unshare", "--mount", "--propagation", "private", "sh", "-ec", "; ".join(mounts))
    eventually((root / "held").exists)
    return holder.pid


def _start_munged(cluster: ForeignCluster) -> None:
    root = cluster.root
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munged.seed"}
    options = [f"--{option}={root / name}" for option, name in files.items()]
    cluster.start("munged", "--foreground", "--force", f"--key-file={key}", *options)
    eventually((root / "munge.socket").exists)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants that are still in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# `pip install dalsegno`


def install(cluster: ForeignCluster, packages: Sequence[str] = NEEDED) -> None:
    """Install a wheel of this project with pip, as the user, into a virtual environment in the home.

    pip and the dependencies of dalsegno are copied from the environment of the tests, so that no network is needed.
    """
    library, wheels = cluster.root / "library", cluster.root / "wheels"
    for folder in (library, wheels):
        folder.mkdir()
    for name in ("pip", *packages):
        _copy_package(name, library)
    wheel = build_wheel(wheels)
    cluster.ok(PYTHON, "-m", "venv", "--without-pip", "venv")
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check")
    cluster.ok("venv/bin/python", f"{library}/pip", "install", *options, str(wheel), timeout_s=120)
    (site,) = cluster.home.glob("venv/lib/python3*/site-packages")
    (site / "needed.pth").write_text(f"{library}\n")


def _copy_package(name: str, library: Path) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return
    origin = Path(spec.origin)
    if origin.name == "__init__.py":
        shutil.copytree(origin.parent, library / name, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(origin, library / origin.name)


def build_wheel(folder: Path) -> Path:
    """Build a wheel with the build backend if it is installed, otherwise by hand according to pyproject.toml."""
    if importlib.util.find_spec("hatchling"):
        argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
        return next(folder.glob("*.whl"))
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/dalsegno/__init__.py").read_text())
    needs = re.search(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    scripts = re.search(r"^\[project.scripts\]\n(.*?)\n\n", project, re.DOTALL | re.MULTILINE)
    assert version and needs and scripts
    required = "".join(f"Requires-Dist: {each}\n" for each in re.findall(r'"(.+?)"', needs[1]))
    info = f"dalsegno-{version[1]}.dist-info"
    files = {
        **{str(path.relative_to(ROOT / "src")): path.read_bytes() for path in _sources(ROOT / "src/dalsegno")},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: dalsegno\nVersion: {version[1]}\n{required}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{scripts[1].replace(chr(34), '')}\n".encode(),
    }
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    wheel = folder / f"dalsegno-{version[1]}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(name, data)
    return wheel


def _sources(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
