"""Make this machine match a `NodePlan`, compare it with one, report its services, or undo everything.

This program is sent to machines without Dal Segno (see `delivery.py`), so it uses only the standard library of Python
3.9. It reads a request from stdin: a line with the length of a JSON object, then the object. In some requests, an
archive of code follows. It prints one JSON object per line: a step of the work, the result, or an error.

Replaced files are kept below /var/lib/dalsegno/setup, with a record of every change. The record is written before each
change. So a repeated request continues after an interruption, and a removal finds everything.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from typing import BinaryIO, TextIO

from dalsegno.errors import DalsegnoError
from dalsegno.setup.machine_accounts import MachineAccounts
from dalsegno.setup.machine_mounts import MachineMounts
from dalsegno.setup.machine_packages import MachinePackages
from dalsegno.setup.machine_record import (
    BEGIN,
    CODE,
    END,
    SETUP,
    Change,
    Json,
    Record,
    Refused,
    checked,
    digest,
    emit,
    ids,
    make_folder,
    read,
    read_file,
    run,
    split_block,
    write,
)
from dalsegno.setup.machine_services import MachineServices, end_marked


class Applier:
    """Compares one machine with a plan, or makes it match. `root` is the folder in which the machine's files are,
    normally /."""

    def __init__(self, plan: Json, root: str = "/", bundle: bytes | None = None) -> None:
        self.plan, self.root, self.bundle = plan, root.rstrip("/"), bundle
        self.record = Record(root)
        self.services = MachineServices(plan, self.record, self.root)
        self.accounts = MachineAccounts(plan, self.record, self.root)
        self.packages = MachinePackages(plan, self.record, self.root)
        self.mounts = MachineMounts(plan, self.record, self.root)
        owner = self.record.data.get("id")
        if owner and owner != plan["cluster_id"]:
            raise Refused(
                f"{plan['host']} belongs to another cluster of Dal Segno, `{self.record.data.get('cluster')}`",
                "remove that cluster first, where it was created: `dalsegno down NAME`",
            )

    def place(self, path: str) -> str:
        return self.root + path

    def changes(self) -> list[Json]:
        """Return the differences between the machine and its plan."""
        found: list[Change] = [("package", name, "install") for name in self.packages.missing()]
        found += [
            ("folder", each["path"], what) for each in self.plan["folders"] if (what := self.folder_differs(each))
        ]
        found += [("file", each["path"], what) for each in self.plan["files"] if (what := self.file_differs(each))]
        found += [("link", each["path"], what) for each in self.plan["links"] if (what := self.link_differs(each))]
        if self.lacks_bundle():
            found.append(("code", self.plan["bundle"], "install"))
        found += [("command", item["name"], "run") for item in self.plan["commands"] if self.is_due(item)]
        found += [("file", path, "restore") for path in self.stale("files")]
        found += [("file", path, "restore") for path in self.stale("blocks")]
        found += [*self.mounts.changes(), *self.accounts.changes(), *self.services.changes()]
        return [{"kind": kind, "name": name, "what": what} for kind, name, what in found]

    def apply(self) -> list[Json]:
        """Make all changes and return them."""
        changes = self.changes()
        self.record.data.update(cluster=self.plan["cluster"], id=self.plan["cluster_id"], host=self.plan["host"])
        self.record.save()
        self.packages.install(self.packages.missing())
        self.mounts.remove_stale()
        for item in self.plan["folders"]:
            if self.folder_differs(item):
                self.make_folder(item)
        written = [item["path"] for item in self.plan["files"] if self.file_differs(item)]
        for item in self.plan["files"]:
            if item["path"] in written:
                self.write_file(item)
        if written:
            emit(step=f"wrote {len(written)} file{'s' * (len(written) > 1)}")
        if self.lacks_bundle():
            self.unpack()
        for item in self.plan["links"]:
            if self.link_differs(item):
                self.record.back_up(self.place(item["path"]), "links")
                self.make_link(self.place(item["path"]), item["to"])
        for path in self.stale("files"):
            self.record.restore(self.place(path), "files")
        for path in self.stale("blocks"):
            self.remove_block(self.place(path))
        self.mounts.apply()
        self.accounts.apply()
        self.run_commands("")
        self.services.apply(self.run_commands)
        self.accounts.complete_homes()
        self.remove_old_code()
        return changes

    def stale(self, kind: str) -> list[str]:
        """Return the paths that an earlier plan wrote and that are not in this plan."""
        wanted = {self.place(item["path"]) for item in self.plan["files"]}
        return [path[len(self.root) :] for path in self.record.part(kind) if path not in wanted]

    def folder_differs(self, item: Json) -> str:
        try:
            found = os.stat(self.place(item["path"]))
        except OSError:
            return "create"
        return "" if self.has_owner(item, found) else "change"

    def has_owner(self, item: Json, found: os.stat_result) -> bool:
        if found.st_mode & 0o7777 != item["mode"]:
            return False
        try:
            return bool(self.root) or (found.st_uid, found.st_gid) == ids(item)
        except Refused:
            return False  # the account will be created by a package that is not installed yet

    def make_folder(self, item: Json) -> None:
        path = self.place(item["path"])
        if not os.path.isdir(path) and not item["keep"]:
            self.record.part("folders")[path] = {}
            self.record.save()
        owner = None if self.root else ids(item)
        folder = make_folder(path)
        try:
            os.fchmod(folder, item["mode"])
            if owner is not None:
                os.fchown(folder, *owner)
        finally:
            os.close(folder)

    def file_differs(self, item: Json) -> str:
        path = self.place(item["path"])
        present = read_file(path)
        if present is None:
            return "replace" if os.path.lexists(path) else "create"
        data, found = present
        if item["block"]:
            block = split_block(data.decode(errors="surrogateescape"))[0].encode(errors="surrogateescape")
            return "" if digest(block) == self.wanted(item) else "change"
        same = digest(data) == self.wanted(item) and self.has_owner(item, found)
        return "" if same else "change" if path in self.record.part("files") else "replace"

    @staticmethod
    def wanted(item: Json) -> str:
        return str(item.get("digest") or digest(item["content"].encode()))

    def write_file(self, item: Json) -> None:
        path, data = self.place(item["path"]), item["content"].encode()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if item["block"]:
            self.record.part("blocks").setdefault(path, {"created": not os.path.exists(path)})
            self.record.save()
            rest = split_block((read(path) or b"").decode(errors="surrogateescape"))[1]
            rest += "" if rest.endswith("\n") or not rest else "\n"
            data = f"{rest}{BEGIN}\n{item['content']}{END}\n".encode(errors="surrogateescape")
        else:
            self.record.back_up(path, "files")
            self.record.part("files")[path]["digest"] = digest(data)
            self.record.save()
        write(path, data, item["mode"], (0, 0) if self.root else ids(item))

    def link_differs(self, item: Json) -> str:
        path = self.place(item["path"])
        return "" if os.path.islink(path) and os.readlink(path) == item["to"] else "create"

    @staticmethod
    def make_link(path: str, to: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temp = f"{path}.dalsegno"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        os.symlink(to, temp)
        os.replace(temp, path)

    def lacks_bundle(self) -> bool:
        key = self.plan["bundle"]
        return bool(key) and not os.path.exists(self.place(f"{CODE}/{key}/complete"))

    def unpack(self) -> None:
        """Unpack our code into its own folder."""
        if self.bundle is None:
            raise Refused("the code of Dal Segno was not sent along", "run `dalsegno up` again")
        emit(step="installing Dal Segno")
        folder = self.place(f"{CODE}/{self.plan['bundle']}")
        self.record.part("folders").setdefault(self.place(CODE), {})
        self.record.save()
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder, mode=0o755)
        with tarfile.open(fileobj=io.BytesIO(self.bundle)) as archive:
            archive.extractall(folder)  # safe, because the archive comes from the operator
        write(f"{folder}/complete", b"", 0o644)

    def remove_old_code(self) -> None:
        """Delete old versions of our code. Keep the previous version, and every version that a process still runs from.

        The coordinators and agents of a run use the code that they started with until they end.
        """
        key = self.plan["bundle"]
        if not key:
            return
        kept: list[str] = [each for each in self.record.part("code").get("keys", []) if each != key]
        self.record.part("code")["keys"] = [*kept[-1:], key]
        self.record.save()
        try:
            found = os.listdir(self.place(CODE))
        except FileNotFoundError:
            return
        for name in found:
            folder = self.place(f"{CODE}/{name}")
            old = name not in (key, *kept[-1:]) and os.path.exists(f"{folder}/complete")
            if old and not os.path.islink(folder) and not runs_from(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def is_due(self, item: Json) -> bool:
        if item["creates"]:
            return not os.path.exists(self.place(item["creates"]))
        if item["after"] and not self.services.runs(item["after"]):
            return True
        return run(item["unless"])[0] != 0

    def run_commands(self, after: str) -> None:
        for item in self.plan["commands"]:
            if item["after"] == after and self.is_due(item):
                emit(step=item["name"])
                checked(item["argv"])

    def remove(self) -> list[str]:
        """Undo the changes in the record. Accounts and packages stay on the machine.

        Return sentences that name these accounts and packages, and one for each file that somebody edited.
        """
        left = self.accounts.kept()
        self.services.stop_all()
        self.mounts.unmount_all()  # must come before any folder is deleted
        if not self.root:
            end_marked(f"DALSEGNO_MARK={os.path.dirname(SETUP)}/clusters/{self.record.data.get('cluster', '')}")
        for kind in ("links", "files"):
            for path in list(self.record.part(kind)):
                if edited := self.record.restore(path, kind):
                    left.append(f"{path} was edited on the machine; the edited file is now {edited}")
        for path in list(self.record.part("blocks")):
            self.remove_block(path)
        for path in sorted(self.record.part("folders"), key=len, reverse=True):
            shutil.rmtree(path, ignore_errors=True)
        self.services.restore()
        if packages := list(self.record.part("packages")):
            left.append(f"packages stay installed: {' '.join(packages)}")
        shutil.rmtree(self.record.folder, ignore_errors=True)
        return left

    def remove_block(self, path: str) -> None:
        """Remove our part of a file that other programs or people also edit."""
        found, created = read(path), self.record.part("blocks").pop(path)["created"]
        rest = split_block((found or b"").decode(errors="surrogateescape"))[1]
        if found is not None and created and not rest:
            os.unlink(path)
        elif found is not None:
            about = os.stat(path)
            write(path, rest.encode(errors="surrogateescape"), about.st_mode & 0o7777, (about.st_uid, about.st_gid))
        self.record.save()


def runs_from(folder: str) -> bool:
    """Return whether the command line of a process names a file in this folder."""
    mark = f"{folder}/".encode()
    return any(mark in (read(f"/proc/{pid}/cmdline") or b"") for pid in filter(str.isdigit, os.listdir("/proc")))


def answer(request: Json, rest: BinaryIO) -> Json:
    """Carry out one request and return the result. `rest` is the input after the request, such as the code archive."""
    root = request.get("root", "/")
    lists: Json = {name: [] for name in ("services", "users", "groups", "mounts")}
    empty = {"cluster": "", "host": "", **lists, "cluster_id": Record(root).data.get("id", "")}
    if request["mode"] == "status":
        applier = Applier(empty, root)
        owner = {key: applier.record.data.get(key, "") for key in ("cluster", "id", "host")}
        return {"owner": owner, "services": applier.services.status()}
    if request["mode"] == "compare":
        return {"changes": Applier(request["plan"], root).changes(), "owner": Record(root).data.get("id", "")}
    with lock(root, request.get("wait_s", 0.0)):
        if request["mode"] == "remove":
            found = Record(root).data.get("id", "")
            if found != request["cluster_id"]:
                return {"left": [], "found": False}
            return {"left": Applier(empty, root).remove(), "found": True}
        bundle = rest.read(request["bundle"]) if request.get("bundle") else None
        return {"changes": Applier(request["plan"], root, bundle).apply()}


@contextlib.contextmanager
def lock(root: str, wait_s: float) -> Iterator[None]:
    """Hold the machine's lock while a request changes the machine. Wait up to `wait_s` seconds for the lock.

    After a broken connection, the program of the previous request may need some time to notice this and to release the
    lock.
    """
    folder = root.rstrip("/") + os.path.dirname(SETUP)
    os.makedirs(folder, exist_ok=True)
    # The mode is 0600, because a user who can open the file could hold the lock and block all requests.
    handle = os.open(f"{folder}/setup.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(handle, "r+") as file:
        os.fchmod(handle, 0o600)  # an earlier release created a lock file that all users can read
        until = time.monotonic() + wait_s
        while not taken(file):
            if time.monotonic() >= until:
                raise Refused("another `dalsegno up` or `down` works on this machine", "wait until it has ended")
            time.sleep(0.1)
        yield


def taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(stream: BinaryIO | None = None) -> int:
    """Read a request from a stream, carry it out, and print the result. Return 0 if the request was carried out."""
    stream = stream or sys.stdin.buffer
    os.umask(0o022)
    try:
        request: Json = json.loads(stream.read(int(stream.readline())))
        emit(result=answer(request, stream))
        return 0
    except (Refused, DalsegnoError) as error:
        emit(error=error.what, hint=error.hint)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = f": {error.filename}" if error.filename else ""
        hint = "free some space on that machine, then run `dalsegno up` again" if full else ""
        emit(error=f"{error.strerror or error}{where}", hint=hint)
    return 1
