"""Tests of `top` and of the verdict of `status` on real clusters."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

from dalsegno.overview.verdict import VerdictCode
from tests.cli.live.screen import PtyProgram
from tests.cluster.conftest import Cli
from tests.cluster.test_repair import daemon_pid
from tests.cluster.test_shell import NOBODY
from tests.cluster.test_up_down import small
from tests.waiting import eventually

HOSTILE = "\x1b[2Jevil\u202e"


def open_top(cli: Cli, *args: str, columns: int = 120, rows: int = 40) -> PtyProgram:
    env = {**cli.env, "TERM": "xterm-256color"}
    return PtyProgram(cli.argv("top", *args), env, columns=columns, rows=rows)


def test_view_shows_nodes_and_jobs_follows_the_size_and_restores_the_terminal(shared: Cli):
    job = shared.ok("shell", "--", "sbatch", "--parsable", "-o", "/dev/null", "-J", HOSTILE, "--wrap", "sleep 300")
    try:
        with open_top(shared) as top:
            top.shows("shared  ", ">1 NODES (4)", "train-1", "train-3", "lab-1", "\\x1b[2Jevil\\u202e", "q quit")
            top.resize(80, 12)
            top.shows("NODES (4)", hides="RUNS AND JOBS")
            top.press("3")
            top.shows(">3 RUNS AND JOBS", f"job {job.strip()}")
            top.press("/no-such-name\r")
            top.shows("nothing matches the filter")
            top.press("q")
            assert top.ended() == 0 and top.restored
    finally:
        shared.ok("shell", "--", "scancel", job.strip())


def test_plain_user_and_a_user_on_a_host_of_the_cluster_get_the_view_as_text(shared: Cli):
    for text in (
        replace(shared, uid=NOBODY).ok("top", "--once"),
        shared.ok("shell", "-u", "ada", "--", "dalsegno", "top"),
    ):
        assert "\x1b" not in text and "lab-1" in text and "4 EVENTS" in text
        assert "in service" in text, "the controller has answered"


def test_json_has_the_verdict_beside_the_keys_of_status(shared: Cli):
    def first_line_is_the_verdict() -> bool:
        before, text = shared.status("shared")["verdict"], shared.ok("status")
        assert isinstance(before, dict)
        return bool(text.splitlines()[0] == before["text"])

    eventually(first_line_is_the_verdict)  # a node may change its state between the two commands
    found = json.loads(shared.ok("top", "--json"))
    assert {"verdict", "nodes", "daemons", "jobs", "recovery", "gpus", "runs", "events"} <= found.keys()
    # The GPUs are reported by the node's agent.
    gpus = eventually(lambda: json.loads(shared.ok("top", "--json"))["gpus"].get("lab-1"))
    assert [(gpu["index"], gpu["temperature_c"]) for gpu in gpus] == [(index, 34) for index in range(4)]
    assert found["verdict"]["code"] in [code.value for code in VerdictCode] and len(found["recovery"]) == 4


def test_view_survives_a_restart_of_slurmctld_and_of_the_controller(cli: Cli):
    cli.ok("up", cli.file(small(2)))
    with open_top(cli, "--interval", "300ms") as top:
        top.shows("one  healthy", "train-2")
        os.kill(daemon_pid(cli, "head", "slurmctld"), signal.SIGKILL)
        top.shows("slurmctld is not running", "slurmctld has not answered for", "train-2")
        assert cli.ok("status").startswith("slurmctld is not running")
        cli.ok("up")
        top.shows("one  healthy", hides="has not answered")
        controller = cli.home / "clusters/one/run/controller.sock"
        os.rename(controller, f"{controller}.away")
        top.shows("the controller does not answer, nodes are not repaired", "the controller has not answered for")
        os.rename(f"{controller}.away", controller)
        top.shows("one  healthy", hides="has not answered")
        cli.ok("shell", "--", "scontrol", "update", "nodename=train-2", "state=drain", "reason=new RAM")
        top.shows("1 of 2 nodes is kept out of service by an administrator", "left alone", "new RAM")
        top.press("q")
        assert top.ended() == 0 and top.restored
