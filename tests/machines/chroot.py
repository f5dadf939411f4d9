"""Other Debian releases on this machine, at full speed. Each has a root folder, which is entered in new namespaces.

`python -m tests.machines.chroot build trixie` makes the folder, `fresh` makes it again, `push` copies this clone into
it, and `run trixie COMMAND...` runs a command in the copy. Folders are below $DALSEGNO_MACHINES. `RELEASE.base` is what
debootstrap made; `RELEASE` is a copy that the set-up and the tests change. Only the set-up uses this machine's network;
tests have an empty one. Everything needs root.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]
CLONE_THERE = "/opt/dalsegno"  # a clone for the release's own Python
# A clone for an interpreter of this machine, for which a CPU build of torch is available.
TRAINING_THERE = "/opt/dalsegno-torch"
MIRROR = "http://deb.debian.org/debian"

# bookworm is bare, so that the set-up has to install Python too. The others have a newer Slurm.
PACKAGES = {
    "bookworm": "ca-certificates",
    "trixie": "ca-certificates,git,iproute2,procps,python3,python3-venv",
    "sid": "ca-certificates,git,iproute2,procps,python3,python3-venv",
}

# Runs as the first process of the namespaces. $1: the root folder; $2: "own" for a network of its own; $3: folders of
# this machine to show read-only; $4: the folders that stand in for its cgroup hierarchies; $5: where to run; then the
# command. The shell keeps running, and reaps processes that the command leaves behind.
ENTER = r"""
set -eu
root=$1 network=$2 shown=$3 cgroups=$4 where=$5
shift 5
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 cgroup sys/fs/cgroup
for folder in $cgroups; do
    mkdir -p ".${folder%/*}"
    mount --bind "$folder" ".${folder%/*}"
done
mount --rbind /dev dev
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
mount --bind dev/pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 shm dev/shm
mount -t tmpfs -o mode=755 run run
for folder in $shown; do
    mkdir -p ".$folder"
    mount --bind "$folder" ".$folder"
    mount -o remount,bind,ro ".$folder"
done
hostname "$(cat etc/hostname)"
if [ "$network" = own ]; then # with an address beside loopback's: getaddrinfo() asks for one
    ip link set lo up
    ip link add eth0 type veth peer name eth0-peer
    ip address add 198.18.0.1/24 dev eth0
    ip link set eth0 up
    ip link set eth0-peer up
fi
mkdir -p .old
pivot_root . .old
cd "$where"
umount -l /.old
rmdir /.old
"$@"
"""

# Runs before ENTER, because a process must enter the folders before its cgroup namespace is created.
ENTER_CGROUPS = 'for folder in $0; do echo $$ >"$folder/cgroup.procs"; done; exec unshare --cgroup -- "$@"'


def folder() -> Path:
    """Return the folder that holds built machines; it may be large, and everything in it can be rebuilt."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DALSEGNO_MACHINES") or Path(cache) / "dalsegno-machines")


# Build ------------------------------------------------------------------------------------------------------


class Chroot:
    """A release's root folder."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.root = folder() / release
        self.base = folder() / f"{release}.base"
        self.logs = folder() / f"{release}.logs"

    def build(self, *, fresh: bool = False) -> None:
        """Create the base and the copy to work in, if they do not exist. An interrupted build starts over."""
        half = folder() / f"{self.release}.half"
        shutil.rmtree(half, ignore_errors=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        if not self.base.exists():
            include = f"--include={PACKAGES[self.release]}"
            run(["debootstrap", "--variant=minbase", include, self.release, str(half), MIRROR])
            half.rename(self.base)
        if fresh and self.root.exists():
            shutil.rmtree(self.root)
        if not self.root.exists():
            run(["cp", "-a", "--", str(self.base), str(half)])
            self.configure(half)
            half.rename(self.root)

    def configure(self, root: Path) -> None:
        """Give the new system this machine's package settings, name server and certificates, and a name."""
        for name in ("etc/resolv.conf", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"):
            if (Path("/") / name).exists():
                shutil.copy(Path("/") / name, root / name)
        for file in Path("/etc/apt/apt.conf.d").glob("99*"):
            shutil.copy(file, root / "etc/apt/apt.conf.d")
        (root / "etc/hostname").write_text(f"{self.release}\n")
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost {self.release}\n")
        # Other users also run the interpreter for training, which may be below this folder.
        (root / "root").chmod(0o711)

    def push(self, there: str = CLONE_THERE) -> None:
        """Copy this clone's tracked and new files. Of the files there, only the environment is kept."""
        target = self.root / there[1:]
        target.mkdir(parents=True, exist_ok=True)
        for old in target.iterdir():
            if old.is_dir() and not old.is_symlink():
                old.name == ".venv" or shutil.rmtree(old)
            else:
                old.unlink()
        listed = "git ls-files -z --cached --others --exclude-standard --deduplicate"
        pack = f"cd {shlex.quote(str(CLONE))} && {listed} | tar -c --null --ignore-failed-read -T - 2>/dev/null"
        run(["sh", "-c", f"({pack}) | tar -x -C {shlex.quote(str(target))} --no-same-owner"])

    # Run ----------------------------------------------------------------------------------------------------

    def run(
        self, command: Sequence[str], *, where: str = CLONE_THERE, network: bool = False, log: Path | None = None
    ) -> int:
        """Run a command in the chroot. When it ends, everything that it started ends too."""
        namespaces = ["--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", *([] if network else ["--net"])]
        shown = " ".join(folders_shown())
        with own_cgroups(f"dalsegno-{self.release}-{os.getpid()}") as cgroups:
            inside = [str(self.root), "host" if network else "own", shown, cgroups, where, *command]
            argv = ["sh", "-c", ENTER_CGROUPS, cgroups, "unshare", *namespaces, "sh", "-c", ENTER, "sh", *inside]
            if log is None:
                return subprocess.run(argv, env=environment(), check=False).returncode
            with log.open("w") as out:
                quiet = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
                return subprocess.run(argv, env=environment(), check=False, **quiet).returncode


KEPT = re.compile(r"PIP_|SSL_|REQUESTS_CA|TERM$|DALSEGNO_(LONG|PYTHON)$")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def environment() -> dict[str, str]:
    """Return the settings for pip and TLS, and nothing else of this machine's environment."""
    kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
    return {**kept, "HOME": "/root", "PATH": PATH, "LC_ALL": "C.UTF-8"}


def folders_shown() -> list[str]:
    """Return the folders of this machine to show: pip's package folders, and the interpreter for training."""
    interpreter = training_python()
    return [*local_indexes(), *([str(interpreter.parents[1])] if interpreter else [])]


def local_indexes() -> list[str]:
    """Return the folders on this machine that pip is set up to take packages from."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=False)
    paths = [word.removeprefix("file://") for word in re.split(r"['=\s]+", listed.stdout)]
    return sorted({path.removesuffix("/simple") for path in paths if path.startswith("/") and Path(path).is_dir()})


def training_python() -> Path | None:
    """Return an interpreter outside /usr for which a wheel folder on this machine has torch.

    Releases with another Python would download gigabytes of CUDA libraries. $DALSEGNO_TRAINING_PYTHON names the
    interpreter; otherwise pyenv's are searched.
    """
    if named := os.environ.get("DALSEGNO_TRAINING_PYTHON"):
        return Path(named)
    wheels = [wheel.name for path in local_indexes() for wheel in Path(path).glob("torch-*+cpu-cp3*.whl")]
    tags = {tag for wheel in wheels for tag in re.findall(r"-cp3(\d+)-", wheel)}
    found = [path for tag in tags for path in Path.home().glob(f".pyenv/versions/3.{tag}.*/bin/python3.{tag}")]
    return max(found, default=None)


@contextmanager
def own_cgroups(name: str) -> Iterator[str]:
    """Create a folder in each cgroup hierarchy, and yield their paths, separated by blanks.

    This separates clusters of the same name on two machines. What a killed cluster leaves behind is removed at the end.
    """
    top = Path("/sys/fs/cgroup")  # the hierarchy of cgroup v2, or a folder with one hierarchy for each controller
    hierarchies = [top / "cgroup.procs"] if (top / "cgroup.procs").exists() else top.glob("*/cgroup.procs")
    folders = [path.parent / name for path in hierarchies]
    for path in folders:
        path.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # v1: without them no process may enter
            if (path.parent / setting).exists() and not (path / setting).read_text().strip():
                (path / setting).write_text((path.parent / setting).read_text())
    try:
        yield " ".join(map(str, folders))
    finally:
        for path in folders:
            remove_cgroup(path)


def remove_cgroup(path: Path) -> None:
    """Remove a cgroup and those below it; its killed processes may take a moment to leave."""
    for inner in [each for each in path.iterdir() if each.is_dir()]:
        remove_cgroup(inner)
    for _ in range(100):
        try:
            return path.rmdir()
        except OSError:
            time.sleep(0.05)
    print(f"could not remove {path}", file=sys.stderr)


def run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, check=False)
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {shlex.join(argv)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "fresh", "push", "run"))
    parser.add_argument("release", choices=sorted(PACKAGES))
    parser.add_argument("--network", action="store_true", help="with this machine's network")
    parser.add_argument("--training", action="store_true", help="in the clone whose environment has torch")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="a command, or the names of checks")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends all processes in the chroot, and removes its cgroups
    machine = Chroot(asked.release)
    where = TRAINING_THERE if asked.training else CLONE_THERE
    machine.build(fresh=asked.what == "fresh")
    if asked.what == "push":
        machine.push(where)
    elif asked.what == "run":
        sys.exit(machine.run(asked.words, where=where, network=asked.network))


if __name__ == "__main__":
    main()
