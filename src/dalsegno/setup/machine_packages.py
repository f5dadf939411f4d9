"""Packages of this machine: which of a plan are missing, and how they are installed. Part of `setup/applier.py`.

A package is a name, a name with a version (`slurmd=24.11.5-1`), or the path of a package file on this machine.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat

from dalsegno.setup.machine_record import PATH, Json, Record, Refused, checked, emit, run, write

PACKAGES_TIMEOUT_S = 1800.0
# Package -> its unit. The unit is disabled, because it would start a second server at the next boot, beside our own.
UNUSED_UNITS = {"mariadb-server": "mariadb.service", "slapd": "slapd.service"}
# The user that slurmctld runs as. Debian's packages create it with this uid. Packages of SchedMD do not create it, and
# its uid must be the same on all machines.
SLURM_USER, SLURM_UID = "slurm", "64030"


class MachinePackages:
    """Compares the packages of one machine with a plan, and installs those that are missing."""

    def __init__(self, plan: Json, record: Record, root: str) -> None:
        self.plan, self.record, self.root = plan, record, root

    def missing(self) -> list[str]:
        """Return the packages of the plan that are not installed. A package file counts as installed only if the
        installed version is that of the file."""
        if self.root or not self.plan["packages"]:
            return []
        if not shutil.which("dpkg-query", path=PATH):
            # dnf and rpm write a version with `-` in place of `=`
            wanted = [name if name.startswith("/") else name.replace("=", "-", 1) for name in self.plan["packages"]]
            return [name for name in wanted if run(["rpm", "-q", _content_of_rpm(name)])[0] != 0]
        contents = {name: _content_of_deb(name) for name in self.plan["packages"]}
        names = [content.partition("=")[0] for content in contents.values()]
        query = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Status}\n", *names]
        rows = [line.split() for line in run(query)[1].splitlines() if line.endswith(" installed")]
        there = {word for row in rows for word in (row[0], f"{row[0]}={row[1]}")}
        return [name for name, content in contents.items() if content not in there]

    def install(self, names: list[str]) -> None:
        """Install packages without starting their daemons. The daemons start later, when their files exist."""
        if not names:
            return
        if any(folder["owner"] == SLURM_USER for folder in self.plan["folders"]):
            create_slurm_user()  # before the packages, whose scripts may use it
        emit(step=f"installing {', '.join(names)}")
        self.record.part("packages").update(dict.fromkeys(names, True))
        self.record.save()
        policy = "/usr/sbin/policy-rc.d"
        self.record.back_up(policy, "files")  # recorded, so that it is removed even if this program is killed here
        write(policy, b"#!/bin/sh\n# Dal Segno installs packages; their daemons start later.\nexit 101\n", 0o755)
        try:
            files = paths_to_install(names)
            hint = "fix what the package manager complains about on that machine, then run `dalsegno up` again"
            if shutil.which("apt-get", path=PATH):
                install = ["apt-get", "-y", "--no-install-recommends", "install", *files]
                if run(install, PACKAGES_TIMEOUT_S)[0] != 0:  # the package lists may be missing or old
                    checked(["apt-get", "update"], hint, PACKAGES_TIMEOUT_S)
                    checked(install, hint, PACKAGES_TIMEOUT_S)
            else:
                checked(["dnf", "-y", "install", *files], hint, PACKAGES_TIMEOUT_S)
            for name in names if os.path.isdir("/run/systemd/system") else ():
                if name in UNUSED_UNITS:
                    run(["systemctl", "disable", "--quiet", UNUSED_UNITS[name]])
        finally:
            self.record.restore(policy, "files")


def create_slurm_user() -> None:
    """Create Slurm's user if it does not exist. A removal keeps this user, like the users that packages create."""
    try:
        pwd.getpwnam(SLURM_USER)
    except KeyError:
        emit(step=f"adding the system user {SLURM_USER}")
        hint = f"create a system user `{SLURM_USER}` there, with the same uid on all hosts"
        try:
            grp.getgrnam(SLURM_USER)
        except KeyError:
            checked(["groupadd", "--system", "--gid", SLURM_UID, SLURM_USER], hint)
        home = ["--home-dir", "/nonexistent", "--no-create-home", "--shell", "/usr/sbin/nologin"]
        checked(["useradd", "--system", "--uid", SLURM_UID, "--gid", SLURM_USER, *home, SLURM_USER], hint)


def _content_of_deb(package: str) -> str:
    """Return `NAME=VERSION` for a package file, and any other name of a package as it is."""
    if not package.startswith("/"):
        return package
    file = refuse_untrusted(package)
    fields = checked(["dpkg-deb", "--show", "--showformat=${Package}=${Version}", file])
    return fields.strip()


def _content_of_rpm(package: str) -> str:
    if not package.startswith("/"):
        return package
    file = refuse_untrusted(package)
    return checked(["rpm", "-qp", "--qf", "%{NAME}-%{VERSION}-%{RELEASE}", file]).strip()


def paths_to_install(names: list[str]) -> list[str]:
    """Return the packages with the resolved paths of files."""
    return [refuse_untrusted(name) if name.startswith("/") else name for name in names]


def refuse_untrusted(path: str) -> str:
    """Return the resolved path of a package file. Raise if the file does not exist, or if anyone but root could have
    written or replaced it."""
    hint = f"copy the file to {path} on that machine, as root, into a folder that only root can change"
    real = os.path.realpath(path)
    for start in (path, real):
        place = start
        while True:
            try:
                about = os.lstat(place)
            except OSError as error:
                raise Refused(f"the package {path} cannot be read: {error.strerror}", hint) from None
            if about.st_uid != 0 or (about.st_mode & 0o022 and not stat.S_ISLNK(about.st_mode)):
                raise Refused(f"users can change {place}, from which root would install {path}", hint)
            if place == "/":
                break
            place = os.path.dirname(place)
    return real
