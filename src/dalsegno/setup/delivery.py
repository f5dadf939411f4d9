"""Send the applier to a machine: build the command that starts it and its standard input, and parse its answers.

The caller chooses how to run the command as root on the machine. Secrets are passed on standard input only.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dalsegno
from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.setup.node_plan import NodePlan, outline, plan_to_json

LOCK_WAIT_S = 20.0  # how long to wait for another request on the same machine
# Each module comes after the modules that it imports. All use the standard library only.
MODULES = (
    "errors", "users.homes", "setup.machine_record", "setup.machine_services", "setup.machine_accounts",
    "setup.machine_packages",
    "setup.machine_mounts", "setup.applier",
)  # fmt: skip
# This program reads the modules from stdin and starts the applier. It registers each module under its name in the
# package, so that the modules can import each other.
_BOOT = (
    "import json, sys, types\n"
    "stream = sys.stdin.buffer\n"
    "for name in ('dalsegno', 'dalsegno.users', 'dalsegno.setup'):\n"
    "    sys.modules[name] = types.ModuleType(name)\n"
    "    sys.modules[name].__path__ = []\n"
    "for name, text in json.loads(stream.read(int(stream.readline()))):\n"
    "    module = sys.modules[name] = types.ModuleType(name)\n"
    "    exec(compile(text, name, 'exec'), module.__dict__)\n"
    "sys.exit(module.main(stream))\n"
)


def applier_argv(python: str = "python3") -> list[str]:
    """Return the command that starts the applier on a machine, as root."""
    return [python, "-I", "-c", _BOOT]


@cache
def _program() -> bytes:
    room = resources.files("dalsegno")
    modules = [[f"dalsegno.{name}", room.joinpath(f"{name.replace('.', '/')}.py").read_text()] for name in MODULES]
    text = json.dumps(modules).encode()
    return b"%d\n%s" % (len(text), text)


def compare_request(plan: NodePlan, root: str = "/") -> bytes:
    """Return the standard input that makes the applier compare a machine with a plan. It contains no secrets."""
    return _request({"mode": "compare", "plan": outline(plan), "root": root})


def apply_request(plan: NodePlan, bundle: bytes = b"", root: str = "/", wait_s: float = LOCK_WAIT_S) -> bytes:
    """Return the standard input that makes the applier carry out a plan. `bundle` is our code, for a machine without
    it."""
    request = {"mode": "apply", "plan": plan_to_json(plan), "root": root, "bundle": len(bundle), "wait_s": wait_s}
    return _request(request) + bundle


def status_request() -> bytes:
    return _request({"mode": "status"})


def remove_request(cluster_id: str, root: str = "/") -> bytes:
    """Return the standard input that makes the applier remove this cluster from a machine."""
    return _request({"mode": "remove", "cluster_id": cluster_id, "root": root, "wait_s": LOCK_WAIT_S})


def _request(request: Mapping[str, Any]) -> bytes:
    text = json.dumps(request).encode()
    return _program() + b"%d\n%s" % (len(text), text)


class ChangeKind(Enum):
    """The kind of thing that a change affects on a machine."""

    PACKAGE = "package"
    USER = "user"
    GROUP = "group"
    MOUNT = "mount"
    FOLDER = "folder"
    FILE = "file"
    LINK = "link"
    CODE = "code"
    COMMAND = "command"
    SERVICE = "service"


class ChangeAction(Enum):
    """The action of a change. REPLACE keeps a copy of the administrator's file, and a removal restores it."""

    INSTALL = "install"
    CREATE = "create"
    CHANGE = "change"
    REPLACE = "replace"
    RESTORE = "restore"
    REMOVE = "remove"
    UNMOUNT = "unmount"
    RUN = "run"
    START = "start"
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True)
class MachineChange:
    """One difference between a machine and its plan."""

    kind: ChangeKind
    name: str
    action: ChangeAction


@dataclass(frozen=True)
class Answer:
    """The applier's answer to a request."""

    changes: tuple[MachineChange, ...] = ()
    cluster_id: str = ""  # the id of the cluster to which the machine belonged before the request
    services: Mapping[str, bool] = field(default_factory=dict)  # name -> whether the service runs
    left: tuple[str, ...] = ()  # one sentence for each change that a removal did not undo
    found: bool = True


def read_step(line: str) -> str:
    """Return the step that a line of the applier's output reports; "" if the line reports no step."""
    message = _read_line(line)
    return str(message.get("step", "")) if isinstance(message, dict) else ""


def read_answer(host: str, output: str) -> Answer:
    """Parse the applier's output. Raise TargetError if the applier refused, or if the output has no answer."""
    for line in reversed(output.splitlines()):
        message = _read_line(line)
        if isinstance(message, dict) and "error" in message:
            raise TargetError(f"{host}: {message['error']}", hint=str(message.get("hint") or _AGAIN))
        if isinstance(message, dict) and isinstance(message.get("result"), dict):
            try:
                return _answer(message["result"])
            except (KeyError, TypeError, ValueError, AttributeError):  # one bad host must not stop the others
                raise TargetError(f"{host}: the setup program gave an invalid answer", hint=_DISTRUST) from None
    last = output.strip().splitlines()[-3:]
    shown = "".join(f"\n  {line}" for line in last)
    raise TargetError(f"{host}: the setup program ended without an answer{shown}", hint=_AGAIN)


def _read_line(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


_DISTRUST = "do not trust that machine before you know why: only a changed program answers like this"
_AGAIN = "run `dalsegno up` again; it continues from there"


def _answer(result: Mapping[str, Any]) -> Answer:
    changes = [
        MachineChange(ChangeKind(each["kind"]), str(each["name"]), ChangeAction(each["what"]))
        for each in result.get("changes", [])
    ]
    owner = result.get("owner", "")
    return Answer(
        tuple(changes),
        cluster_id=str(owner.get("id", "") if isinstance(owner, dict) else owner),
        services={name: bool(fact.get("running")) for name, fact in result.get("services", {}).items()},
        left=tuple(map(str, result.get("left", []))),
        found=bool(result.get("found", True)),
    )


@dataclass(frozen=True)
class CodeFit:
    """The Python version and the processor architecture that a bundle is built for."""

    python: tuple[int, ...]
    machine: str

    @classmethod
    def here(cls) -> CodeFit:
        return cls(sys.version_info[:2], platform.machine())


DEPENDENCIES = ("click", "pydantic", "yaml")
_PACKAGES = ("click", "pydantic", "pydantic_core", "yaml", "_yaml", "annotated_types", "typing_extensions",
             "typing_inspection")  # fmt: skip


@dataclass(frozen=True)
class CodeBundle:
    """Our package and the packages that it needs. `key` is a hash of the files; it names the bundle's folder on
    machines."""

    key: str
    files: tuple[tuple[Path, str], ...]  # each file, and its name in the archive

    def archive(self) -> bytes:
        """Return the archive to send to the machines."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            for path, inside in self.files:
                info, data = tarfile.TarInfo(inside), path.read_bytes()
                info.size, info.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
                archive.addfile(info, io.BytesIO(data))
        return packed.getvalue()


def find_bundle(names: Iterable[str] = _PACKAGES, wheels: Path | None = None, more: Iterable[str] = ()) -> CodeBundle:
    """Return a bundle of this installation of Dal Segno, the packages that it needs, and the packages `more`.

    For machines with another Python or processor, `wheels` is the folder of compiled packages (`setup/wheels.py`). All
    other packages are pure Python, or work without their compiled part.
    """
    files = tuple(found for name in ("dalsegno", *names, *more) for found in _files_of(name))
    if wheels is not None:
        own = [path for path in sorted(wheels.rglob("*")) if path.is_file()]
        replaced = {path.name for path in wheels.iterdir() if path.is_dir()}
        kept = [
            (path, inside)
            for path, inside in files
            if inside.partition("/")[0] not in replaced and not inside.endswith(".so")
        ]
        files = (*kept, *((path, path.relative_to(wheels).as_posix()) for path in own))
    contents = hashlib.sha256()
    for path, inside in files:
        contents.update(inside.encode() + b"\0" + path.read_bytes() + b"\0")
    return CodeBundle(f"{dalsegno.__version__}-{contents.hexdigest()[:12]}", files)


@cache
def pinned_requirements() -> tuple[str, ...]:
    """Return pip requirements for the packages that our code needs, pinned to the versions installed here."""
    distributions = metadata.packages_distributions()
    names = dict.fromkeys(name for module in _PACKAGES for name in distributions.get(module, ()))
    return tuple(f"{name}=={metadata.version(name)}" for name in names)


def _files_of(name: str) -> list[tuple[Path, str]]:
    """Return the files of an installed package, and their names in the archive. Return [] for a missing package, unless
    Dal Segno needs it."""
    found = find_spec(name)
    if found is None or found.origin is None:
        if name in DEPENDENCIES:
            raise DalsegnoError(f"Python's package `{name}` is missing", hint="install Dal Segno again with pip")
        return []
    origin = Path(found.origin)
    if not found.submodule_search_locations:
        return [(origin, origin.name)]
    folder = origin.parent
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [(path, f"{name}/{path.relative_to(folder).as_posix()}") for path in files]
