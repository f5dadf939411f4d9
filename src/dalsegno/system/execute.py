"""Becoming another program: the last thing a command does. One for another user gets a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from dalsegno.errors import DalsegnoError
from dalsegno.system.machine import UNSHARE, program
from dalsegno.system.processes import Runner


class CannotStart(DalsegnoError):
    """The program to become is not there (127) or may not be run (126): a shell's own codes."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


def become(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process; signals, terminal and exit code are then the program's own."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except FileNotFoundError:
        raise CannotStart(f"`{argv[0]}`: no such command", 127) from None
    except PermissionError:
        raise CannotStart(f"`{argv[0]}`: may not be run", 126) from None


def run_for_another(argv: Sequence[str], env: Mapping[str, str], uid: int) -> int:
    """Run a program that becomes the user `uid`, in a session and on a terminal of its own; return its exit code.

    On our terminal it could type commands for us (TIOCSTI), and what it leaves behind could read what we type later.
    So where we have a terminal it gets a new one, and we pass on what is typed and printed, the size of the window and
    signals. A terminal that is closed ends the session.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ours = [number for number in (0, 1, 2) if os.isatty(number)]
    master, slave = _new_terminal(ours, uid) if ours else (-1, -1)
    child = os.fork()
    if child == 0:
        _start_session(argv, env, slave, ours)
    if slave >= 0:
        os.close(slave)
    typing = 0 in ours and _in_foreground()
    with _passing_on(child, master, ours) as woken, _typed_raw(typing):
        if master >= 0:
            _relay(master, child, woken, typing, 1 if 1 in ours else 2)
            os.close(master)  # whatever the session has left loses its terminal
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _new_terminal(ours: Sequence[int], uid: int) -> tuple[int, int]:
    """A terminal with the settings and the window of ours, which belongs to the user."""
    import termios

    master, slave = os.openpty()
    settings = termios.tcgetattr(ours[0])
    if 0 not in ours:  # ours stays as it is, and ends lines itself
        settings[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    _copy_window(ours[0], master)
    os.fchown(slave, uid, -1)
    return master, slave


def _copy_window(source: int, target: int) -> None:
    import fcntl
    import termios

    with contextlib.suppress(OSError):
        fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8)))


def _start_session(argv: Sequence[str], env: Mapping[str, str], slave: int, ours: Sequence[int]) -> NoReturn:
    """In the child: become the program. What was on our terminal is on the new one; the rest stays as it was given."""
    code = 126
    try:
        os.setsid()
        if slave >= 0:
            import fcntl
            import termios

            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for number in ours:
                os.dup2(slave, number)
        os.closerange(3, 1 << 16)
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(argv[0], list(argv), dict(env))
    except FileNotFoundError:
        code = 127
    finally:
        os._exit(code)


def _relay(master: int, child: int, woken: int, typing: bool, output: int) -> None:
    """Pass on what is typed and printed until the child ends; what it leaves in the background is not waited for."""
    sources = [master, woken, *([0] if typing else [])]
    while True:
        ready, _, _ = select.select(sources, [], [])
        ended = woken in ready and os.read(woken, 4096) and _has_ended(child)
        if 0 in ready:
            data = _read(0)
            if not data:
                sources.remove(0)
            _write_all(master, data)
        while master in ready or ended:
            data = _read(master) if select.select([master], [], [], 0)[0] else b""
            _write_all(output, data)
            if ended and not data:
                return
            if not ended:
                if not data:
                    sources.remove(master)  # closed by all: only the end is left to be waited for
                break


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _read(source: int) -> bytes:
    try:
        return os.read(source, 65536)
    except OSError:  # EIO: the other side is gone
        return b""


def _write_all(target: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody is there any more
        while data:
            data = data[os.write(target, data) :]


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _typed_raw(typing: bool) -> Iterator[None]:
    """Every key goes to the new terminal, Ctrl-C and Ctrl-Z too; afterwards ours is as it was."""
    if not typing:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is kept
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # it may be gone
            termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _passing_on(child: int, master: int, ours: Sequence[int]) -> Iterator[int]:
    """What we are told to do is done by the session; what changes our window changes its. Gives what a signal wakes."""

    def tell(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number)

    def resize(_number: int, _frame: FrameType | None) -> None:
        _copy_window(ours[0], master)

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT), tell)
    if master >= 0:
        handlers[signal.SIGWINCH] = resize
    handlers[signal.SIGCHLD] = lambda number, frame: None
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    os.write(wake, b"!")  # it may have ended before we could be told
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- Root's rights through sudo: how a command asks for them, and whose command it is once it has them.


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
        import pwd  # not on Windows, where this module is imported too

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
