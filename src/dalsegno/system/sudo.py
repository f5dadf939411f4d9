"""Root's rights through sudo: how a command asks for them, and whose command it is once it has them.

Nothing of the caller's environment reaches root but the few variables named here. What root then runs is the caller's
own copy of this program: whoever may use sudo could run it as root anyway.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Callable, Mapping, Sequence

from dalsegno.errors import DalsegnoError
from dalsegno.system.machine import UNSHARE, program
from dalsegno.system.processes import Runner

KEPT = ("TERM", "NO_COLOR", "LANG", "LC_ALL", "TZ", "COLUMNS", "LINES", "DALSEGNO_CLUSTER")
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def sudo_command(argv: Sequence[str], env: Mapping[str, str], uid: int, gid: int) -> list[str]:
    """Return the words that run a command as root, without questions, for the user `uid`."""
    kept = {name: env[name] for name in KEPT if name in env}
    clean = {"PATH": ROOT_PATH, "HOME": "/root", **kept, "SUDO_UID": str(uid), "SUDO_GID": str(gid)}
    variables = [f"{name}={value}" for name, value in clean.items()]
    return [program("sudo") or "sudo", "-n", "--", "/usr/bin/env", "-i", *variables, *argv]


def refusal(runner: Runner) -> str:
    """Return why sudo does not let us make virtual hosts now; "" if it does."""
    sudo, unshare = program("sudo"), program("unshare")
    if sudo is None or unshare is None:
        return "there is no sudo on this machine"
    if runner.run([sudo, "-n", "--", unshare, *UNSHARE, "true"], timeout_s=60).exit_code == 0:
        return ""
    if runner.run([sudo, "-n", "--", "true"], timeout_s=60).exit_code == 0:
        return "this kernel or container does not permit namespaces"
    return "sudo does not let you in without a password"


def caller(env: Mapping[str, str] = os.environ) -> int:
    """Return the uid of the person behind this command: with root's rights, who asked sudo for them."""
    uid, behind = os.geteuid(), env.get("SUDO_UID", "")
    return int(behind) if uid == 0 and behind.isdecimal() else uid


def as_caller(body: Callable[[], None], env: Mapping[str, str] = os.environ) -> None:
    """Run `body` with the caller's rights: in a folder of the caller's, root must not create or follow anything."""
    uid = caller(env)
    if uid == os.geteuid():
        body()
        return
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os._exit(_with_rights_of(uid, body, writer))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise DalsegnoError(said or f"a process of uid {uid} was killed", hint="name a place that you may write to")


def _with_rights_of(uid: int, body: Callable[[], None], writer: int) -> int:
    try:
        person = pwd.getpwuid(uid)
        os.initgroups(person.pw_name, person.pw_gid)
        os.setresgid(person.pw_gid, person.pw_gid, person.pw_gid)
        os.setresuid(uid, uid, uid)
        body()
    except DalsegnoError as error:
        said = error.what
    except OSError as error:
        said = error.strerror or str(error)
    except BaseException as error:  # this copy must not go on as if it were the program
        said = str(error) or type(error).__name__
    else:
        return 0
    with contextlib.suppress(OSError):
        os.write(writer, said.encode())
    return 1
