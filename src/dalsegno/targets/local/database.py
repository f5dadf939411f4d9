"""The accounting database of a local cluster."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.system.files import make_folder, remove_tree
from dalsegno.system.machine import program
from dalsegno.system.processes import Runner

NEEDED_MIB = 256


def fill_database(runner: Runner, target: Path, cache: Path, user: str) -> None:
    """Create an empty accounting database for the cluster, unless the cluster already has one."""
    if target.exists():
        return
    free_mib = shutil.disk_usage(target.parent).free >> 20
    if free_mib < NEEDED_MIB:
        raise TargetError(
            f"no space left for the accounting database: it needs {NEEDED_MIB} MiB, {target.parent} has {free_mib}",
            hint="free some space, set DALSEGNO_HOME to another disk, or set `slurm: {accounting: false}`",
        )
    template = cache / f"mariadb-{_mariadb_version(runner)}"
    if not template.exists():
        _make_template(runner, template, user)
    # The copy gets its final name last, so that an interrupted copy is never used as a database.
    part = target.with_name("db.part")
    remove_tree(part)
    runner.run(["cp", "-a", "--sparse=always", str(template), str(part)], timeout_s=120).checked(
        hint="is the disk full? free some space, or set DALSEGNO_HOME to another disk"
    )
    part.rename(target)


def _mariadb_version(runner: Runner) -> str:
    output = runner.run([program("mariadbd") or "mariadbd", "--version"], timeout_s=30).checked().stdout
    found = re.search(r"Ver (\S+?)(-MariaDB)?\s", output)
    if not found:
        raise TargetError(
            f"unexpected output of `mariadbd --version`: {output.strip()[:200]}",
            hint="`./dalsegno setup` installs MariaDB",
        )
    return re.sub(r"[^\w.+-]", "_", found[1])


def _make_template(runner: Runner, template: Path, user: str) -> None:
    make_folder(template.parent)
    for old in template.parent.glob("*.part"):
        if not Path(f"/proc/{old.suffixes[-2][1:]}").exists():
            remove_tree(old)  # the folder was left by an `up` that was killed at this point
    part = template.with_name(f"{template.name}.{os.getpid()}.part")
    install = program("mariadb-install-db") or "mariadb-install-db"
    # The command runs in the parent folder with relative paths, because mariadb-install-db fails if a path contains a
    # blank.
    argv = [install, "--no-defaults", f"--datadir=./{part.name}", f"--user={user}", "--skip-test-db"]
    env = {**os.environ, "TMPDIR": "."}  # the parent folder, because the user's TMPDIR may be full or missing
    done = runner.run([*argv, "--auth-root-authentication-method=normal"], cwd=str(part.parent), env=env, timeout_s=120)
    if done.exit_code != 0:
        remove_tree(part)
        done.checked()
    part.chmod(0o700)
    try:
        part.rename(template)
    except OSError:
        remove_tree(part)  # another `up` created the template first
