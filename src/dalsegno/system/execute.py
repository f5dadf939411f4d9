"""Replace this process with another program, run a program as another user, and become root through sudo."""

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
from dalsegno.log import LEVEL
from dalsegno.system.machine import UNSHARE, program
from dalsegno.system.ownership import caller
from dalsegno.system.processes import Runner


class CannotStart(DalsegnoError):
    """The program does not exist (exit code 127) or may not be run (126), as in a shell."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


def become(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process with the program. The program keeps the terminal and receives the signals."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except FileNotFoundError:
        raise CannotStart(f"`{argv[0]}`: no such command", 127) from None
    except PermissionError:
        raise CannotStart(f"`{argv[0]}`: permission denied", 126) from None


def run_for_another(argv: Sequence[str], env: Mapping[str, str], uid: int) -> int:
    """Run a program that switches to user `uid`, in its own session and terminal; return its exit code.

    If the caller has a terminal, the program gets a new one, and this process forwards input, output, the window size
    and signals. On the caller's own terminal, the program could fake the caller's input (TIOCSTI), and its background
    processes could read the caller's later input. Closing the new terminal ends the session.
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
            os.close(master)  # background processes of the session lose their terminal
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _new_terminal(ours: Sequence[int], uid: int) -> tuple[int, int]:
    """Return a new terminal that the user owns, with the settings and window size of the caller's terminal."""
    import termios

    master, slave = os.openpty()
    settings = termios.tcgetattr(ours[0])
    if 0 not in ours:  # the caller's terminal is not in raw mode, so it translates line endings itself
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
    """Replace the forked child with the program.

    Streams on the caller's terminal move to the new terminal; others stay unchanged.
    """
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
    """Forward input and output until the child ends, without waiting for its background processes."""
    sources = [master, woken, *([0] if typing else [])]
    while True:
        ready, _, _ = select.select(sources, [], [])
        ended = woken in ready and os.read(woken, 4096) and _has_ended(child)
        if 0 in ready:
            data = _read(0)
            if not data:
                sources.remove(0)
            write_all(master, data)
        while master in ready or ended:
            data = _read(master) if select.select([master], [], [], 0)[0] else b""
            write_all(output, data)
            if ended and not data:
                return
            if not ended:
                if not data:
                    sources.remove(master)  # the other side has closed the terminal, so only wait for the child to end
                break


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _read(source: int) -> bytes:
    try:
        return os.read(source, 65536)
    except OSError:  # EIO: the other side has closed the terminal
        return b""


def write_all(target: int, data: bytes) -> None:
    """Write all of the data, unless the other side is closed."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _typed_raw(typing: bool) -> Iterator[None]:
    """Set the caller's terminal to raw mode, so that every key reaches the new terminal.

    Restore the mode afterwards.
    """
    if not typing:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # keeps input that was typed ahead
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be closed
            termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _passing_on(child: int, master: int, ours: Sequence[int]) -> Iterator[int]:
    """Forward signals and window changes to the session; yield a descriptor that is readable after a signal."""

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number)

    def resize(_number: int, _frame: FrameType | None) -> None:
        _copy_window(ours[0], master)

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT), forward)
    if master >= 0:
        handlers[signal.SIGWINCH] = resize
    handlers[signal.SIGCHLD] = lambda number, frame: None
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    os.write(wake, b"!")  # wake the loop once, because the child may have ended before the handler was set
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


KEPT = ("TERM", "NO_COLOR", "LANG", "LC_ALL", "TZ", "COLUMNS", "LINES", "DALSEGNO_CLUSTER", LEVEL)
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def sudo_command(argv: Sequence[str], env: Mapping[str, str], uid: int, gid: int) -> list[str]:
    """Return the command line that runs a command as root for user `uid`, without a password prompt."""
    kept = {name: env[name] for name in KEPT if name in env}
    clean = {"PATH": ROOT_PATH, "HOME": "/root", **kept, "SUDO_UID": str(uid), "SUDO_GID": str(gid)}
    variables = [f"{name}={value}" for name, value in clean.items()]
    return [program("sudo") or "sudo", "-n", "--", "/usr/bin/env", "-i", *variables, *argv]


def refusal(runner: Runner, find: Callable[[str], str | None] = program) -> str:
    """Return why this user cannot create virtual hosts through sudo; "" if it is possible."""
    sudo, unshare = find("sudo"), find("unshare")
    if sudo is None or unshare is None:
        return f"there is no {'sudo' if sudo is None else 'unshare'} on this machine"
    if runner.run([sudo, "-n", "--", unshare, *UNSHARE, "true"], timeout_s=60).exit_code == 0:
        return ""
    if runner.run([sudo, "-n", "--", "true"], timeout_s=60).exit_code == 0:
        return "this kernel or container does not permit namespaces"
    return "sudo requires a password"


def as_caller(body: Callable[[], None], env: Mapping[str, str] = os.environ) -> None:
    """Run `body` with the caller's permissions.

    Root then neither creates files nor follows links in the caller's folders.
    """
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
        failure = pipe.read()
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise DalsegnoError(failure or f"a process of uid {uid} was killed", hint="choose a path that you may write to")


def _with_rights_of(uid: int, body: Callable[[], None], writer: int) -> int:
    try:
        import pwd  # imported here, because Windows does not have this module

        person = pwd.getpwuid(uid)
        os.initgroups(person.pw_name, person.pw_gid)
        os.setresgid(person.pw_gid, person.pw_gid, person.pw_gid)
        os.setresuid(uid, uid, uid)
        body()
    except DalsegnoError as error:
        failure = error.what
    except OSError as error:
        failure = error.strerror or str(error)
    except BaseException as error:  # this forked child must not return into the parent's code
        failure = str(error) or type(error).__name__
    else:
        return 0
    with contextlib.suppress(OSError):
        os.write(writer, failure.encode())
    return 1
