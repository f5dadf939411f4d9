"""The scratch folder of a job on a node, which Slurm's prolog creates and its epilog removes. The program runs as root.

    job-scratch create BASE [--required] [--boot-id FILE]
    job-scratch remove BASE

The folder is `BASE/job-JOBID`, belongs to the job's user and has mode 0700. Only root can write to BASE itself, so no
user can put a link in the way. A finished job's folder is renamed into `BASE/.dalsegno/trash`, which is fast whatever
its size. A background process empties the trash. Slurm drains a node whose prolog or epilog fails. Therefore errors are
ignored and waiting times are short. With `--required`, jobs must not start without scratch, so the prolog fails.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dalsegno.system.hanging_calls import fork
from dalsegno.system.ownership import trusted_folder

JOB = re.compile(r"job-[1-9]\d{0,9}")
OWN, TRASH, BOOT = ".dalsegno", "trash", "boot"
KERNEL_BOOT_ID = "/proc/sys/kernel/random/boot_id"
CREATE_S, REMOVE_S = 10.0, 10.0  # timeouts; a disk that takes longer is broken, and the process is abandoned
MAX_DEPTH = 64  # number of levels removed at a time, because each level needs a descriptor
MAX_PASSES = 100  # limit on passes, because a process that outlived its job may keep writing files
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# ioctls of chattr(1), and the flags that prevent root from removing a file
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IMMUTABLE, FS_APPEND = 0x80086601, 0x40086602, 0x10, 0x20


@dataclass(frozen=True)
class ScratchJob:
    """The job in the environment of a prolog or epilog."""

    id: int
    uid: int
    gid: int

    @property
    def folder(self) -> str:
        return f"job-{self.id}"


def job_here(env: Mapping[str, str]) -> ScratchJob:
    """Return the job from Slurm's variables; raise ValueError if they are missing."""
    found = {name: env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_JOB_UID")}
    if bad := [name for name, value in found.items() if not re.fullmatch(r"\d{1,10}", value)]:
        raise ValueError(f"{bad[0]} is not set: Slurm's prolog and epilog start this program")
    uid, gid = int(found["SLURM_JOB_UID"]), env.get("SLURM_JOB_GID", "")
    return ScratchJob(int(found["SLURM_JOB_ID"]), uid, int(gid) if gid.isdecimal() else _group_of(uid))


def _group_of(uid: int) -> int:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid


def create(base: Path, job: ScratchJob, boot: str) -> None:
    """Create the folder of a job.

    If the node has booted since the last job, first move the folders of all earlier jobs to the trash.
    """
    with _opened(base) as (top, own):
        fcntl.flock(own, fcntl.LOCK_EX)  # after a boot, two first jobs must not move each other's folders to the trash
        if _read(own, BOOT) != boot:
            for name in [entry for entry in os.listdir(top) if JOB.fullmatch(entry)]:
                _retire(top, own, name)
            _write(own, BOOT, boot)
        if _is_of(top, job):
            return
        with contextlib.suppress(FileNotFoundError):
            _retire(top, own, job.folder)
        # The folder gets its owner before its final name, so that no process sees it incomplete.
        new = f"new.{secrets.token_hex(8)}"
        os.mkdir(new, 0o700, dir_fd=own)
        folder = os.open(new, FOLDER, dir_fd=own)
        try:
            os.fchown(folder, job.uid, job.gid)
            os.fchmod(folder, 0o700)
        finally:
            os.close(folder)
        os.rename(new, job.folder, src_dir_fd=own, dst_dir_fd=top)


def retire(base: Path, job: ScratchJob) -> None:
    """Move a finished job's folder to the trash."""
    with _opened(base) as (top, own), contextlib.suppress(FileNotFoundError):
        _retire(top, own, job.folder)


def empty_trash(base: Path) -> None:
    """Remove everything in the trash, unless another process is doing so. Entries that cannot be removed stay there."""
    with _opened(base) as (_, own):
        trash = _subfolder(own, TRASH)
        try:
            fcntl.flock(trash, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for _ in range(MAX_PASSES):
                if not _empty(trash, trash, 0):
                    return
        except BlockingIOError:
            pass
        finally:
            os.close(trash)


@contextlib.contextmanager
def _opened(base: Path) -> Iterator[tuple[int, int]]:
    """Yield descriptors of the base folder, which only root can change, and of `.dalsegno` in it."""
    if os.path.realpath(base) != str(base):
        raise PermissionError(errno.EPERM, "a link leads to it", str(base))
    with trusted_folder(base) as top:
        own = _subfolder(top, OWN)
        try:
            os.close(_subfolder(own, TRASH))
            yield top, own
        finally:
            os.close(own)


def _subfolder(parent: int, name: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    folder = os.open(name, FOLDER, dir_fd=parent)
    about = os.fstat(folder)
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        os.close(folder)
        raise PermissionError(errno.EPERM, "others can change it", name)
    return folder


def _is_of(top: int, job: ScratchJob) -> bool:
    """Return whether the job has its folder already, for example after a restart of slurmd."""
    try:
        about = os.stat(job.folder, dir_fd=top, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == job.uid


def _retire(top: int, own: int, name: str) -> None:
    trash = _subfolder(own, TRASH)
    try:
        _insist(lambda: os.rename(name, f"{name}.{secrets.token_hex(8)}", src_dir_fd=top, dst_dir_fd=trash), name, top)
    finally:
        os.close(trash)


def _read(folder: int, name: str) -> str:
    try:
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)) as file:
            return file.read(1000)
    except FileNotFoundError:
        return ""


def _write(folder: int, name: str, text: str) -> None:
    new = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600, dir_fd=folder), "w") as file:
        file.write(text)
    os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)


# Removal: by descriptor, without following links or entering other file systems


def _empty(folder: int, trash: int, depth: int) -> int:
    """Remove the content of a folder. Return how many entries were removed or moved up."""
    removed = 0
    # The entries are not read as a list, because there may be millions of them.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    removed += _remove_folder(entry.name, folder, trash, depth)
                else:
                    _insist(partial(os.unlink, entry.name, dir_fd=folder), entry.name, folder)
                    removed += 1
            except OSError as error:
                _complain(f"{entry.name} stays in the trash: {error.strerror}")
    return removed


def _remove_folder(name: str, parent: int, trash: int, depth: int) -> int:
    if depth >= MAX_DEPTH:  # too deep for one descriptor per level, so continue from the top
        deep = f"deep.{secrets.token_hex(8)}"
        _insist(lambda: os.rename(name, deep, src_dir_fd=parent, dst_dir_fd=trash), name, parent)
        return 1
    folder = os.open(name, FOLDER, dir_fd=parent)
    try:
        if _mount_of(folder) != _mount_of(trash):
            return 0
        removed = _empty(folder, trash, depth + 1)
    finally:
        os.close(folder)
    try:
        _insist(lambda: os.rmdir(name, dir_fd=parent), name, parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise
        return removed
    return removed + 1


def _mount_of(folder: int) -> tuple[int, str]:
    """Return the device and the mount id of a folder. A bind mount of the same file system has a different mount id."""
    with open(f"/proc/self/fdinfo/{folder}") as file:
        mount = next((line for line in file if line.startswith("mnt_id:")), "")
    return os.fstat(folder).st_dev, mount


def _insist(act: Callable[[], None], name: str, parent: int) -> None:
    """Try to remove or move an entry. If the entry or its folder is immutable, remove that flag and try again."""
    try:
        act()
    except PermissionError:
        _unlock(parent)
        about = os.stat(name, dir_fd=parent, follow_symlinks=False)
        # A file with several links keeps its flag, because it may be a file of the system.
        alone = stat.S_ISREG(about.st_mode) and about.st_nlink == 1
        if alone or stat.S_ISDIR(about.st_mode):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            entry = os.open(name, flags, dir_fd=parent)
            try:
                _unlock(entry)
            finally:
                os.close(entry)
        act()


def _unlock(handle: int) -> None:
    value = array.array("i", [0])
    with contextlib.suppress(OSError):  # some file systems do not have these flags
        fcntl.ioctl(handle, FS_IOC_GETFLAGS, value)
        if value[0] & (FS_IMMUTABLE | FS_APPEND):
            value[0] &= ~(FS_IMMUTABLE | FS_APPEND)
            fcntl.ioctl(handle, FS_IOC_SETFLAGS, value)


# The program that the prolog and epilog start


def main(arguments: Sequence[str]) -> int:
    """Create or remove the folder of the job in the environment. Return 1 only if a required folder was not created."""
    action, base = arguments[0], Path(arguments[1])
    boot_id = arguments[arguments.index("--boot-id") + 1] if "--boot-id" in arguments else KERNEL_BOOT_ID
    required = "--required" in arguments
    try:
        job = job_here(os.environ)
        boot = Path(boot_id.replace("%n", os.environ.get("SLURMD_NODENAME", ""))).read_text().strip()
        if action == "create":
            done = _within(CREATE_S, base, lambda: create(base, job, boot))
        else:
            done = _within(REMOVE_S, base, lambda: retire(base, job))
        start_detached(lambda: empty_trash(base))
    except (OSError, ValueError) as error:
        _complain(str(error))
        done = False
    return 1 if action == "create" and required and not done else 0


def _within(seconds: float, base: Path, body: Callable[[], None]) -> bool:
    """Run `body` in a separate process, because a hanging disk cannot be interrupted.

    Return whether it succeeded in time.
    """

    def run(sock: socket.socket) -> None:
        try:
            body()
            sock.sendall(b"1")
        except OSError as error:
            _complain(f"no folder in {base}: {error.filename}: {error.strerror}")

    child = fork(run)
    if not child.wait(seconds):
        _complain(f"{base} does not answer within {seconds:g} s")
        child.kill()
        return False
    try:
        return child.sock.recv(1) == b"1"
    except OSError:
        return False


def start_detached(body: Callable[[], None]) -> None:
    """Run `body` in a process that outlives this one. slurmd kills the process group of an epilog that has ended."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            os.closerange(3, 1 << 12)
            os.chdir("/")
            os.nice(19)
            body()
    finally:
        os._exit(0)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"scratch: {text}\n".encode(errors="replace"))
