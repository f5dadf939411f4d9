"""Compile the SPANK plugin and its helper, which are written in C, on this machine: once for each Slurm version."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.system.files import make_folder, read_text, remove_tree
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.machine import program
from dalsegno.system.ownership import part_of_others, trusted_owners
from dalsegno.system.processes import LocalRunner, Runner

PLUGIN, HELPER = "dalsegno_container.so", "dalsegno-container"
NO_CONTAINER = 125  # exit code of a task that cannot enter its container; defined in `enter.h`
# -U comes first because the compilers of some distributions define the macro and warn about a second definition.
FORTIFY = ("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", *FORTIFY, "-fstack-protector-strong")
# -Werror is left out, because a newer compiler may print new warnings.
BUILD_FLAGS = tuple(flag for flag in FLAGS if flag != "-Werror")
PARTS = {
    PLUGIN: (
        "-fPIC",
        "-shared",
        "spank.c",
        "start.c",
        "wait_helper.c",
        "wait_save.c",
        "enter.c",
        "remap_root.c",
        "resume.c",
        "options.c",
        "message.c",
    ),
    HELPER: (
        "-fPIE",
        "-pie",
        "build.c",
        "save.c",
        "image.c",
        "trust.c",
        "cgroup.c",
        "unpack.c",
        "gpu.c",
        "import.c",
        "named_containers.c",
        "manage_named.c",
        "mounts.c",
        "namespaces.c",
        "options.c",
        "message.c",
    ),
}
HEADER = Path("/usr/include/slurm/slurm_version.h")
# Folders on hosts for builds of the plugin, named containers, and unpacked images
HOST_FOLDER, DATA, UNPACKED = "/usr/local/lib/dalsegno", "/var/lib/dalsegno/containers", "/var/lib/dalsegno/unpacked"
TOOLS = {
    "gcc": "gcc", "/usr/include/stdio.h": "libc6-dev", str(HEADER): "libslurm-dev", "sqfstar": "squashfs-tools",
    "unsquashfs": "squashfs-tools",
}  # fmt: skip
NAMESPACES = Path("/proc/sys/user/max_user_namespaces")
HINT = "`./dalsegno setup` installs them, or: sudo apt-get install --no-install-recommends gcc libc6-dev libslurm-dev"
FAULT_HINT = (
    "this Slurm or this compiler is not known to the plugin yet: report it with the lines above. Until then, "
    "`containers: {enabled: false}` in the cluster file starts the cluster without containers"
)
COMPILE_S = 120.0  # time limit for compiling, which takes about 1 s on an idle machine
_LINES = 10
_NO_HEADER = re.compile(r"fatal error: .*: No such file or directory")


def source_folder() -> Path:
    return Path(str(resources.files("dalsegno") / "native"))


def build_key(slurm_version: str) -> str:
    """Return the folder name of a plugin build, which changes with the sources, the flags and the Slurm version."""
    digest = hashlib.sha256(repr((slurm_version, BUILD_FLAGS, PARTS)).encode())
    for path in sorted(source_folder().glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def prepare_native(runner: Runner, cache: Path, slurm_version: str, folder: str) -> str:
    """Compile the plugin, unless it is cached, and return why this machine cannot run containers ("" if it can).

    `folder` is the cluster's folder, which plugstack.conf names.
    """
    built = (cache / "native" / build_key(slurm_version)).is_dir()
    if lacking := missing_packages(built):
        return f"this machine lacks {' and '.join(lacking)}; `./dalsegno setup` installs what is missing"
    if any(letter.isspace() for letter in folder):
        return f"plugstack.conf cannot name {folder!r}, which contains a space; set DALSEGNO_HOME to another folder"
    if (read_text(NAMESPACES) or "1").strip() == "0":
        return "user namespaces are forbidden; `sysctl user.max_user_namespaces=65536` allows them"
    try:
        build_native(runner, cache, slurm_version)
    except DalsegnoError as error:
        return f"{error.what}; `containers: {{enabled: false}}` in the cluster file turns containers off"
    return ""


def missing_packages(built: bool = False, tools: Mapping[str, str] = TOOLS) -> list[str]:
    """Return the packages that are missing for container jobs and, unless the plugin is `built`, for compiling it."""
    wanted = {name: package for name, package in tools.items() if not built or package == "squashfs-tools"}
    return list(dict.fromkeys(each for name, each in wanted.items() if not _is_there(name)))


def _is_there(name: str) -> bool:
    return os.path.exists(name) if name.startswith("/") else program(name) is not None


def build_native(runner: Runner, cache: Path, slurm_version: str, header: Path = HEADER) -> Path:
    """Return the folder with the plugin and the helper; compile them unless they are cached.

    `header` is slurm_version.h beside the other headers of Slurm, which may be outside /usr/include.
    """
    folder = cache / "native" / build_key(slurm_version)
    if os.geteuid() == 0 and (part := part_of_others(folder, trusted_owners())):
        raise DalsegnoError(
            f"root loads no plugin from {folder}: other users can change {part}",
            hint=f"`chown root {part}` and `chmod go-w {part}`, or set DALSEGNO_HOME to a folder owned by root",
        )
    if not folder.is_dir():
        check_compiler(slurm_version, header)
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        make_folder(partial)
        include = () if header == HEADER else (f"-I{header.parents[1]}",)
        try:
            for name, arguments in PARTS.items():
                _compile(runner, partial / name, (*include, *arguments), slurm_version)
            _publish(partial, folder)
        finally:
            remove_tree(partial)
    return folder


def place_native(runner: Runner, cache: Path, slurm_version: str, target: Path) -> None:
    """Copy the plugin and the helper into a cluster's folder, so that the cluster does not depend on the cache."""
    built = build_native(runner, cache, slurm_version)
    make_folder(target)
    for name in PARTS:
        if not (target / name).exists():
            partial = target / f".{name}.{os.getpid()}"
            shutil.copy2(built / name, partial)
            partial.replace(target / name)


def check_compiler(slurm_version: str, header: Path = HEADER) -> None:
    """Raise if there is no compiler or no matching Slurm headers, with a clearer error than the compiler or Slurm would
    give."""
    lacking = [] if program("gcc") else ["gcc"]
    if not header.is_file():
        lacking.append("Slurm's headers (libslurm-dev)")
    if lacking:
        raise DalsegnoError(f"containers need {' and '.join(lacking)} to compile our Slurm plugin", hint=HINT)
    ours, theirs = header_version(header.read_text()), ".".join(re.findall(r"\d+", slurm_version)[:3])
    if ours != _plain(theirs):
        raise DalsegnoError(
            f"Slurm's headers are version {ours}, but Slurm itself is {theirs}, which refuses a plugin built with them",
            hint="install slurmd, slurmctld, slurm-client and libslurm-dev in the same version",
        )


def header_version(text: str) -> str:
    """Return the version in Slurm's header: 22.5.8 for `0x160508`."""
    found = re.search(r"SLURM_VERSION_NUMBER\s+0x([0-9a-fA-F]+)", text)
    number = int(found[1], 16) if found else 0
    return f"{number >> 16}.{(number >> 8) & 0xFF}.{number & 0xFF}"


def _plain(version: str) -> str:
    return ".".join(str(int(part)) for part in version.split("."))


def _compile(runner: Runner, target: Path, arguments: tuple[str, ...], slurm_version: str) -> None:
    argv = [program("gcc") or "gcc", *BUILD_FLAGS, *arguments, "-o", str(target)]
    done = runner.run(argv, cwd=str(source_folder()), timeout_s=COMPILE_S * slowness())
    if done.exit_code != 0:
        raise not_compiled(slurm_version, shlex.join(argv), done.stderr.splitlines())


def not_compiled(slurm_version: str, command: str, output: Sequence[str], host: str = "") -> DalsegnoError:
    """Return the error for a failed compilation, with the compiler's output. If headers are missing, the hint names
    packages."""
    first = next((number for number, line in enumerate(output) if "error" in line), 0)
    lines = "".join(f"\n  {line}" for line in output[first : first + _LINES])
    missing = any(_NO_HEADER.search(line) for line in output)
    slurm = ".".join(re.findall(r"\d+", slurm_version)[:3]) or "an unknown version"
    return DalsegnoError(
        f"the container plugin does not compile with Slurm {slurm}{f' on {host}' if host else ''}: `{command}` failed:"
        f"{lines or ' no output'}",
        hint=HINT if missing else FAULT_HINT,
    )


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # another `up` may have compiled the same plugin in the meantime
            raise


def main(arguments: Sequence[str]) -> int:
    """Compile the plugin on this machine. The arguments are the folder for the result and the version of Slurm."""
    folder, slurm_version = arguments
    try:
        build_native(LocalRunner(), Path(folder), slurm_version)
    except DalsegnoError as error:
        raise SystemExit(f"{error.what}\n{error.hint}") from None
    return 0
