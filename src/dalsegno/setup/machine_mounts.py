"""The mounts of one machine: mount the file systems of the plan, and unmount those that the plan no longer has.

Like `applier.py`, this module uses only the standard library of Python 3.9. The applier itself writes the lines of
/etc/fstab, in a marked block. All other lines belong to the administrator.
"""

from __future__ import annotations

import contextlib
import os

from dalsegno.setup.machine_record import (
    Change,
    Json,
    Record,
    Refused,
    checked,
    emit,
    make_folder,
    read,
    run,
    split_block,
)

FSTAB = "/etc/fstab"
MOUNT_TIMEOUT_S = 90.0


class MachineMounts:
    """Compares the mounts of a plan with those of the machine. If the root folder is not /, there is nothing to
    compare."""

    def __init__(self, plan: Json, record: Record, root: str) -> None:
        self.record = record
        self.wanted: list[Json] = [] if root else list(plan["mounts"])
        self.kept: Json = record.part("mounts")  # mount point -> {line, created}
        if self.wanted:
            refuse_taken(self.wanted, (read(FSTAB) or b"").decode(errors="surrogateescape"))

    def changes(self) -> list[Change]:
        mounted = mount_points() if self.wanted or self.kept else set()
        found = [("mount", path, "unmount") for path in self.stale()]
        return found + [("mount", each["path"], what) for each in self.wanted if (what := self.differs(each, mounted))]

    def stale(self) -> list[str]:
        wanted = {each["path"] for each in self.wanted}
        return [path for path in self.kept if path not in wanted]

    def differs(self, item: Json, mounted: set[str]) -> str:
        path = item["path"]
        if path not in mounted:
            return "create"
        if path not in self.kept:
            hint = "unmount it, choose another mount point, or write `type: existing` for this storage"
            raise Refused(f"something is mounted at {path} already", hint)
        return "" if self.kept[path]["line"] == item["line"] else "change"

    def remove_stale(self) -> None:
        """Unmount the file systems that are no longer in the plan. Call it before /etc/fstab changes."""
        for path in self.stale():
            self.unmount(path)

    def apply(self) -> None:
        """Mount the missing file systems. /etc/fstab must already have their lines."""
        todo = [(item, what) for item in self.wanted if (what := self.differs(item, mount_points()))]
        if todo and os.path.isdir("/run/systemd/system"):
            checked(["systemctl", "daemon-reload"])  # systemd generates mount units from /etc/fstab
        for item, what in todo:
            path = item["path"]
            emit(step=f"mounting {path}")
            if what == "change":
                self.unmount(path)
            created = self.kept.get(path, {}).get("created", not os.path.isdir(path))
            self.kept[path] = {"line": item["line"], "created": created}
            self.record.save()
            os.close(make_folder(path))
            hint = "check that the server exports the folder to this machine, and that port 2049 is open"
            checked(["mount", path], hint, MOUNT_TIMEOUT_S)

    def unmount(self, path: str) -> None:
        """Unmount a file system, even if processes use it. They keep their open files until they end."""
        emit(step=f"unmounting {path}")
        if path in mount_points() and run(["umount", path], MOUNT_TIMEOUT_S)[0] != 0:
            checked(["umount", "--lazy", path])
        if self.kept.pop(path)["created"]:
            with contextlib.suppress(OSError):  # the folder is not empty if its file system is still mounted
                os.rmdir(path)
        self.record.save()

    def unmount_all(self) -> None:
        for path in list(self.kept):
            self.unmount(path)


def refuse_taken(wanted: list[Json], fstab: str) -> None:
    """Raise if a line of the administrator uses one of the mount points."""
    rows = [line.split() for line in split_block(fstab)[1].splitlines() if not line.lstrip().startswith("#")]
    taken = {row[1] for row in rows if len(row) > 1}
    for each in wanted:
        if each["path"] in taken:
            raise Refused(
                f"{FSTAB} already mounts something at {each['path']}",
                "write `type: existing` for this storage in the cluster file, or remove that line",
            )


def mount_points() -> set[str]:
    """Return the mount points of this machine. The kernel's list writes a space in a path as `\\040`."""
    lines = (read("/proc/self/mounts") or b"").decode(errors="surrogateescape").splitlines()
    return {line.split()[1].replace("\\040", " ") for line in lines if len(line.split()) > 1}
