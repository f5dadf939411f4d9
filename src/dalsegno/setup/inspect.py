"""Inspect hosts before anything is changed on them, and parse their answers into frozen facts.

A host may be broken or hostile. Every value is checked for its type and bounded in length, and text is made safe to
print.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.printable import one_line
from dalsegno.system.processes import Completed
from dalsegno.system.ssh import HostRunner

PROGRAM = "host_inspector.py"
OLDEST_PYTHON = (3, 9)
TIMEOUT_S = 120.0
MARK = "inspection"
MAX_TEXT = 256
MAX_FILE = 1 << 16
MAX_ENTRIES = 5000
MAX_NUMBER = 1 << 53
NOT_INSTALLED = 127
# Host keys are copied to all other machines, so a text that does not look exactly like a key is dropped.
HOST_KEY = re.compile(r"(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)) [A-Za-z0-9+/]+={0,2}")

T = TypeVar("T")


@dataclass(frozen=True)
class InspectedGpu:
    """One GPU. Its name is the one that the driver reports."""

    name: str
    memory_mib: int = 0


@dataclass(frozen=True)
class InspectedDisk:
    """A mounted file system. For network file systems, size and free space are unknown, because a query may hang."""

    mount: str
    type: str
    source: str = ""
    size_mib: int | None = None
    free_mib: int | None = None


@dataclass(frozen=True)
class FabricDevice:
    """An InfiniBand, RoCE or EFA device."""

    device: str
    driver: str = ""
    layer: str = ""
    port_state: str = ""  # the kernel's text, for example `4: ACTIVE`
    rate: str = ""


@dataclass(frozen=True)
class ListeningPort:
    """A TCP port with a listener. The program is known only if root inspected the host."""

    port: int
    program: str = ""


@dataclass(frozen=True)
class HostUser:
    """An account of the host: a local one, or one that Dal Segno created in the cluster's directory."""

    name: str
    uid: int
    gid: int
    ours: bool = False  # whether Dal Segno created the account


@dataclass(frozen=True)
class HostGroup:
    """A local group."""

    name: str
    gid: int
    members: tuple[str, ...] = ()
    ours: bool = False


@dataclass(frozen=True)
class HostFacts:
    """The facts that a host reported about itself. `problems` names the parts that could not be read."""

    host: str
    os_id: str = ""
    os_version: str = ""
    os_like: tuple[str, ...] = ()
    os_name: str = ""
    kernel: str = ""
    machine: str = ""  # for example x86_64 or aarch64
    python: tuple[int, ...] = ()
    python_path: str = "/usr/bin/python3"
    hostname: str = ""
    machine_id: str = ""
    boot_id: str = ""
    is_root: bool = False
    systemd: bool = False
    selinux: bool = False  # whether SELinux is enforcing
    package_manager: str = ""
    cpus: int = 0  # number of hardware threads
    sockets: int = 0
    cores: int = 0
    memory_mib: int = 0
    gpus: tuple[InspectedGpu, ...] = ()
    driver: str = ""
    disks: tuple[InspectedDisk, ...] = ()
    fabric: tuple[FabricDevice, ...] = ()
    packages: tuple[tuple[str, str], ...] = ()  # name and version of each installed package
    # Name and version of packages that dnf can install, and path and version of package files on the host
    available: tuple[tuple[str, str], ...] = ()
    untrusted: tuple[str, ...] = ()  # package files that others than root can change; their content was not read
    listening: tuple[ListeningPort, ...] = ()
    cgroup_version: int = 0
    slurm_conf: str = ""  # the path of slurm.conf
    slurm_conf_head: str = ""  # the first line of slurm.conf
    pyxis: str = ""  # the plugin of Pyxis, as plugstack.conf names it; "" if Slurm would not load Pyxis
    enroot: bool = False
    munge_key: bool = False
    record: bool = False  # whether the host has a record of Dal Segno's setup
    daemons: tuple[str, ...] = ()  # running daemons of Slurm, munge and MariaDB
    users: tuple[HostUser, ...] = ()
    groups: tuple[HostGroup, ...] = ()
    host_keys: tuple[str, ...] = ()  # type and key of each host key of its sshd
    addresses: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # path -> content, which is never printed
    clock_offset_s: float = 0.0  # the host's clock minus ours
    problems: tuple[str, ...] = ()

    def version_of(self, package: str) -> str:
        """Return the version of an installed package, or an empty string."""
        return dict(self.packages).get(package, "")

    def free_mib(self, folder: str) -> int | None:
        """Return the free space of the file system that contains a folder; None if it is unknown."""
        holders = [disk for disk in self.disks if f"{folder}/".startswith(f"{disk.mount.rstrip('/')}/")]
        return max(holders, key=lambda disk: len(disk.mount)).free_mib if holders else None


def program() -> bytes:
    """Return the source of the program that runs on the host."""
    return resources.files("dalsegno.setup").joinpath(PROGRAM).read_bytes()


def inspect_hosts(
    runner: HostRunner,
    hosts: Iterable[str],
    packages: Sequence[str] = (),
    *,
    root: bool = True,
    now: Callable[[], float] = time.time,
) -> dict[str, HostFacts | DalsegnoError]:
    """Inspect many hosts at once. A host that cannot be inspected has its error as its value."""
    source = program()

    def inspect(host: str) -> HostFacts:
        done = runner.run(host, ["python3", "-", *packages], stdin=source, root=root, timeout_s=TIMEOUT_S)
        return parse_inspection(host, done, now())

    return runner.each(hosts, inspect)


def parse_inspection(host: str, done: Completed, answered_at: float) -> HostFacts:
    """Parse the answer of a host. Raise an error if it is not an answer of our program."""
    answer = _find_answer(done.stdout)
    if answer is None:
        raise _no_answer(host, done)
    read = _AnswerReader(answer)
    return HostFacts(
        host=host,
        os_id=read.text("os_id"),
        os_version=read.text("os_version"),
        os_name=read.text("os_name"),
        kernel=read.text("kernel"),
        machine=read.text("machine"),
        hostname=read.text("hostname"),
        machine_id=read.text("machine_id"),
        boot_id=read.text("boot_id"),
        package_manager=read.text("package_manager"),
        driver=read.text("driver"),
        slurm_conf=read.text("slurm_conf"),
        slurm_conf_head=read.text("slurm_conf_head"),
        pyxis=read.text("pyxis"),
        enroot=read.flag("enroot"),
        systemd=read.flag("systemd"),
        selinux=read.flag("selinux"),
        munge_key=read.flag("munge_key"),
        record=read.flag("record"),
        cpus=read.number("cpus"),
        sockets=read.number("sockets"),
        cores=read.number("cores"),
        memory_mib=read.number("memory_mib"),
        cgroup_version=read.number("cgroup_version"),
        os_like=read.texts("os_like"),
        daemons=read.texts("daemons"),
        addresses=read.texts("addresses"),
        problems=read.texts("problems"),
        untrusted=read.texts("untrusted"),
        python_path=read.text("python_path") or "/usr/bin/python3",
        python=tuple(_number(each) for each in read.entries("python")[:3]),
        is_root=answer.get("uid") == 0,
        gpus=read.objects("gpus", lambda each: InspectedGpu(each.text("name"), each.number("memory_mib"))),
        disks=read.objects("disks", _disk),
        fabric=read.objects("fabric", lambda each: FabricDevice(*map(each.text, _FABRIC))),
        packages=read.pairs("packages"),
        available=read.pairs("available"),
        listening=read.objects("listening", lambda each: ListeningPort(each.number("port"), each.text("program"))),
        users=read.objects("users", _user),
        groups=read.objects("groups", _group),
        host_keys=tuple(key for key in read.texts("host_keys") if HOST_KEY.fullmatch(key)),
        files={_text(path): text for path, text in read.mapping("files").items() if _is_file(text)},
        clock_offset_s=read.time("time", answered_at) - answered_at,
    )


_FABRIC = ("device", "driver", "layer", "port_state", "rate")


class _AnswerReader:
    """Reads values of an expected type from a host's answer. A missing value, or one of another type, is read as
    empty."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self._answer = answer

    def text(self, name: str) -> str:
        return _text(self._answer.get(name))

    def flag(self, name: str) -> bool:
        return self._answer.get(name) is True

    def number(self, name: str) -> int:
        return _number(self._answer.get(name))

    def optional_number(self, name: str) -> int | None:
        return _number(self._answer[name]) if name in self._answer else None

    def time(self, name: str, otherwise: float) -> float:
        value = self._answer.get(name)
        # NaN is refused too, because every comparison with it is false.
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < MAX_NUMBER:
            return otherwise
        return float(value)

    def entries(self, name: str) -> list[Any]:
        value = self._answer.get(name)
        return value[:MAX_ENTRIES] if isinstance(value, list) else []

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(text for each in self.entries(name) if (text := _text(each)))

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._answer.get(name)
        return dict(list(value.items())[:MAX_ENTRIES]) if isinstance(value, dict) else {}

    def pairs(self, name: str) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((_text(key), _text(value)) for key, value in self.mapping(name).items()))

    def objects(self, name: str, make: Callable[[_AnswerReader], T]) -> tuple[T, ...]:
        return tuple(make(_AnswerReader(each)) for each in self.entries(name) if isinstance(each, dict))


def _disk(each: _AnswerReader) -> InspectedDisk:
    sizes = (each.optional_number("size_mib"), each.optional_number("free_mib"))
    return InspectedDisk(each.text("mount"), each.text("type"), each.text("source"), *sizes)


def _user(each: _AnswerReader) -> HostUser:
    return HostUser(each.text("name"), each.number("uid"), each.number("gid"), each.flag("ours"))


def _group(each: _AnswerReader) -> HostGroup:
    return HostGroup(each.text("name"), each.number("gid"), each.texts("members"), each.flag("ours"))


def _text(value: object) -> str:
    return one_line(value[:MAX_TEXT]) if isinstance(value, str) else ""


def _is_file(text: object) -> bool:
    """Return whether a text is short enough to be a complete file. A truncated file must not be written back."""
    return isinstance(text, str) and len(text) <= MAX_FILE


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER else 0


def _find_answer(stdout: str) -> dict[str, Any] | None:
    """Return the last line that our program printed. The startup files of a shell may print other lines before it."""
    for line in reversed(stdout.splitlines()[-50:]):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and found.get("dalsegno") == MARK:
            return found
    return None


def _no_answer(host: str, done: Completed) -> DalsegnoError:
    if done.exit_code == NOT_INSTALLED:
        hint = "install it there: `apt-get install python3` or `dnf install python3`"
        return TargetError(f"{host}: `python3` is not installed", hint=hint)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["nothing"]
    oldest = ".".join(map(str, OLDEST_PYTHON))
    what = f"{host}: the inspection ended with code {done.exit_code} and printed: {_text(said[0])}"
    return TargetError(what, hint=f"Python {oldest} or later must run there: try `python3 --version` on the host")
