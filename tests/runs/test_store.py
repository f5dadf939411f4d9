"""The rendezvous store of a generation, started as a separate program for workers that are not forked."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.runs.agent.worker_processes import STORE_FILE


def test_store_file_needs_nothing_of_the_package():
    assert "dalsegno" not in "".join(line for line in Path(STORE_FILE).read_text().splitlines() if "import" in line)


@pytest.mark.cluster  # it needs no cluster, but Pythons that import torch
def test_ranks_meet_at_a_store_that_is_run_as_a_file():
    distributed = pytest.importorskip("torch.distributed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        argv = [sys.executable, "-P", STORE_FILE, str(fd), str(port)]
        with subprocess.Popen(argv, pass_fds=(fd,), cwd="/") as store:
            try:
                distributed.TCPStore("127.0.0.1", port, is_master=False).set("rank", "0")
                assert distributed.TCPStore("127.0.0.1", port, is_master=False).get("rank") == b"0"
            finally:
                store.kill()
