"""Run a command as root on a host through the `ssh` client, where sudo asks for a password.

`dalsegno shell` and `dalsegno storage check` start this program instead of ssh, unless a person is at the terminal. It
reads the password from its file and writes it to ssh's input when sudo on the host asks. The password is in no argument
and in no environment.

There is no terminal on the host, only pipes: other users can write to a terminal (`write`, `wall`), and so could ask
for the password in sudo's name.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from dalsegno.errors import DalsegnoError
from dalsegno.system.execute import write_all
from dalsegno.system.hanging_calls import die_with_parent
from dalsegno.system.ssh import read_password_file

PROGRAM = "sudo-session"
CHUNK = 1 << 16
LAST_OUTPUT_S = 1.0
TURN_S = 1.0
# With -k, sudo ignores a remembered password. So it is certain which of the two commands asks for one. $0 is the script
# that root runs (_STARTED). In that script, $0 is the PID of sshd's process.
_SCRIPT = """\
if sudo -k -n -- true 2>/dev/null; then exec sudo -n -- sh -c "$0" "$PPID" "$@"; fi
exec sudo -k -S -p MARK-ask -- sh -c "$0" "$PPID" "$@\""""
# Without a terminal, sshd does not end the command when the connection ends, so a loop does. The lines up to the mark
# are not input of the command: they can contain the password, if sudo has not read it.
_STARTED = """\
( (while kill -0 $$; do kill -0 "$0" || kill -HUP 0; sleep 1; done) </dev/null >/dev/null 2>&1 & )
printf %s MARK-go >&2
line=; until [ "$line" = MARK ]; do IFS= read -r line || exit 1; done
exec "$@\""""


def session_argv(password_file: str, mark: str, ssh: Sequence[str]) -> list[str]:
    """Return the arguments with which this program runs the command line `ssh`. The remote command in it must come from
    `sudo_argv`."""
    return [PROGRAM, password_file, mark, *ssh]


def sudo_argv(command: Sequence[str], mark: str) -> list[str]:
    """Return the command for the host. It prints the mark when sudo asks, and when the command is about to start."""
    return ["sh", "-c", _SCRIPT.replace("MARK", mark), _STARTED.replace("MARK", mark), *command]


class SudoDialog:
    """Reads what the host prints until the command starts, and answers the question of sudo once.

    When the command is about to start, the mark is sent as a line, and the command's own input follows. From then on
    nothing is answered, because the command can print anything.
    """

    def __init__(self, password: str, mark: str) -> None:
        self._line = password.encode(errors="surrogateescape") + b"\n"
        self._begin = mark.encode() + b"\n"
        self._words = [f"{mark}-ask".encode(), f"{mark}-go".encode()]
        self._pattern = re.compile(b"|".join(map(re.escape, self._words)))
        self._held = b""
        self._answered = False
        self.started = False

    def __call__(self, data: bytes) -> tuple[bytes, bytes]:
        """Take output of the host. Return the output to show, and what to write to the host's input."""
        if self.started:
            return data, b""
        self._held += data
        shown = answer = b""
        while not self.started and (found := self._pattern.search(self._held)):
            shown += self._visible(found.start())
            self._held = self._held[found.end() - found.start() :]
            if found[0] == self._words[1]:
                self.started = True
                answer += self._begin
            elif self._answered:
                raise DalsegnoError(
                    "sudo on the host refuses the password",
                    hint="correct the file that `ssh: sudo_password_file:` in the cluster file names",
                )
            else:
                answer, self._answered = answer + self._line, True
        return shown + self._visible(len(self._held) - (0 if self.started else self._incomplete())), answer

    def _visible(self, size: int) -> bytes:
        """Take this number of bytes from the held output. After the answer, leave out the line break that ends sudo's
        question."""
        part, self._held = self._held[:size], self._held[size:]
        return part.lstrip(b"\r\n") if self._answered and not self.started else part

    def rest(self) -> bytes:
        """Return the output that was held back, after the host has closed the connection."""
        rest, self._held = self._held, b""
        return rest

    def _incomplete(self) -> int:
        """Return the length of the end of the output that may be the beginning of a mark."""
        longest = max(map(len, self._words)) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        return next((size for size in sizes if any(word.startswith(self._held[-size:]) for word in self._words)), 0)


def main(arguments: Sequence[str]) -> int:
    file, mark, *argv = arguments
    try:
        return _run(argv, SudoDialog(read_password_file(Path(file)), mark))
    except DalsegnoError as error:
        hint = f"hint: {error.hint}\n" if error.hint else ""
        os.write(2, f"error: {error.what}\n{hint}".encode())
        return 1


def _run(argv: Sequence[str], dialog: SudoDialog) -> int:
    """Run ssh with pipes. Its standard output is this program's own."""
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=partial(die_with_parent, os.getpid())
    )
    assert process.stdin and process.stderr

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C ends ssh, whose exit code is returned
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    refusals: list[DalsegnoError] = []

    def answer(entrance: IO[bytes], errors: IO[bytes]) -> None:
        sending = threading.Thread(target=_send, args=(entrance,), daemon=True)  # may wait for input that never comes
        try:
            while data := os.read(errors.fileno(), CHUNK):
                shown, line = dialog(data)
                write_all(2, shown)
                if line:
                    write_all(entrance.fileno(), line)
                if dialog.started and sending.ident is None:
                    sending.start()
        except DalsegnoError as error:
            refusals.append(error)
            process.kill()

    answering = threading.Thread(target=answer, args=(process.stdin, process.stderr), daemon=True)
    answering.start()
    code = _wait(process)
    answering.join(LAST_OUTPUT_S)  # a connection that ssh shares with other sessions keeps the stream open
    write_all(2, dialog.rest())
    if refusals:
        raise refusals[0]
    return code if code >= 0 else 128 - code


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait in short turns. A signal right before a wait without a limit would be handled only after the wait."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=TURN_S)


def _send(entrance: IO[bytes]) -> None:
    """Copy standard input to the command, which may end before it has read everything."""
    with contextlib.suppress(OSError):
        while data := os.read(0, CHUNK):
            entrance.write(data)
            entrance.flush()
    with contextlib.suppress(OSError):
        entrance.close()
