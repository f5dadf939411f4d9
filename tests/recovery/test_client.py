"""Tests of the client of the controller's socket: time limits on a slow machine, and hints for users."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from dalsegno.recovery.client import start_hint
from dalsegno.wire.frames import send

ASK = """
import sys
from pathlib import Path
from dalsegno.recovery.client import ask
print(ask(Path(sys.argv[1]), {"runs": True}, 0.2))
"""


def test_a_slow_machine_is_given_more_time_to_answer(tmp_path: Path):
    slow = tmp_path / "true"
    slow.write_text("#!/bin/sh\nsleep 0.2\n")  # this program measures the machine's speed
    slow.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        threading.Thread(target=answer_late, args=(server,), daemon=True).start()
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        argv = [sys.executable, "-c", ASK, str(tmp_path / "socket")]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "{'runs': []}\n", done.stderr


def answer_late(server: socket.socket) -> None:
    caller, _ = server.accept()
    with caller:
        caller.recv(65536)
        time.sleep(0.6)  # three times the limit on an ordinary machine
        send(caller, {"runs": []})


def test_hint_to_start_a_daemon_is_shown_only_to_users_who_may(tmp_path: Path):
    owner = os.geteuid()
    assert "`dalsegno status` shows" in start_hint(tmp_path / "socket", 0)
    assert "`dalsegno status` shows" in start_hint(tmp_path / "socket", owner)
    assert start_hint(tmp_path / "socket", owner + 1).startswith("the cluster's owner")
