"""Tests of the controller as a daemon of a real cluster."""

import json
import os
import signal
import sys

import pytest

from dalsegno.recovery.client import ask, controller_answers
from dalsegno.system.children import descendants, marked
from dalsegno.system.hosts import host_process, service_facts
from tests.cluster.conftest import SOURCE, Cli
from tests.cluster.programs import programs
from tests.cluster.test_up_down import small
from tests.waiting import eventually

ASK = """
import json, os, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from dalsegno.recovery.client import ask
print(json.dumps(ask(Path(os.environ["DALSEGNO_CONTROLLER"]), json.loads(sys.argv[2]), 60)))
"""


def ask_from(cli: Cli, request: object, *how: str) -> dict[str, object]:
    """Send a request as a user on a host of the cluster."""
    said = cli.ok("shell", *how, "--", sys.executable, "-I", "-c", ASK, str(SOURCE), json.dumps(request))
    answer: dict[str, object] = json.loads(said)
    return answer


def controller_pid(cli: Cli) -> int | None:
    """Return the controller's PID on the machine, which differs from its PID on the head."""
    head = host_process(cli.home / "clusters/shared/hosts/head")
    assert head is not None
    found = programs(descendants(head.pid), lambda words: "controller" in words)
    return found[0] if found else None


def test_status_shows_the_controller(shared: Cli):
    assert "controller" in shared.ok("status")
    assert controller_answers(shared.home / "clusters/shared/run/controller.sock")


@pytest.mark.parametrize("how", [(), ("--user", "ada"), ("--node", "train-2", "--user", "bob"), ("--node", "head")])
def test_controller_answers_root_and_users_on_every_host(shared: Cli, how: tuple[str, ...]):
    assert ask_from(shared, {"runs": True}, *how) == {"runs": []}
    refused = ask_from(shared, {"start": str(shared.home)}, *how)
    assert "error" in refused and "hint" in refused


def test_killed_service_is_restarted(shared: Cli):
    before, path = controller_pid(shared), shared.home / "clusters/shared/run/controller.sock"
    assert before is not None
    os.kill(before, signal.SIGKILL)
    eventually(lambda: controller_pid(shared) not in (None, before) and controller_answers(path))
    assert service_facts(shared.home / "clusters/shared/hosts/head")["controller"].running
    assert ask(path, {"runs": True}, 60) == {"runs": []}
    assert shared.run("up").err.strip() == "nothing to do: the cluster is as the file says"


def test_log_level_of_up_reaches_the_controller(shared: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DALSEGNO_LOG_LEVEL", "debug")
    assert "restarts controller" in shared.run("up").err
    assert ask_from(shared, {"runs": True}) == {"runs": []}
    assert "DEBUG controller: request of uid 0: runs" in shared.ok("logs", "--daemon", "controller")
    assert shared.run("up").err.strip() == "nothing to do: the cluster is as the file says"
    monkeypatch.delenv("DALSEGNO_LOG_LEVEL")
    shared.ok("up")


def test_loopback_cluster_has_a_controller_until_down(cli: Cli):
    cli.ok("up", cli.file(small(1) + "local: {hosts: loopback}\n"))
    path = cli.home / "clusters/one/run/controller.sock"
    assert ask_from(cli, {"runs": True}, "-M", "one") == {"runs": []}
    ours = [process.pid for process in marked(str(path.parents[1]))]
    (pid,) = programs(ours, lambda words: "controller" in words)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: controller_answers(path))
    assert cli.status("one")["phase"] == "up"
    cli.ok("down", "one")  # the fixture checks for leftovers
    assert not controller_answers(path)
