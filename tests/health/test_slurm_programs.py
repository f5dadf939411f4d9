"""The programs that Slurm starts to check a node: what they contain, and when they drain it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.health.slurm_programs import may_act, prolog_lines, render_health_check
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.spec.facts import Cluster, Health, Node, Partition

PARTS = (Partition("train", ("n1", "n2")), Partition("debug", ("n2",)))
LAB = Cluster("lab", "ssh", (Node("n1", 1, 1), Node("n2", 1, 1)), PARTS)
FAILED = "echo HEALTH_CHECK_RESULT:n1:Failed:reset:gpu-ecc; exit 1"


def exit_code(folder: Path, script: str, program: str | None) -> int:
    """Run a script with this checking program, or with none, and return its exit code."""
    command = folder / "dalsegno"
    command.unlink(missing_ok=True)
    if program is not None:
        command.write_text(f"#!/bin/sh\n{program}\n")
        command.chmod(0o755)
    return subprocess.run(["sh", "-c", script], capture_output=True, timeout=20).returncode


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (FAILED, 1),
        ("echo HEALTH_CHECK_RESULT:n1:Passed:none:23 checks", 0),
        ("echo error: the settings are damaged >&2; exit 1", 0),
        ("exit 127", 0),
        (None, 0),
    ],
)
def test_prolog_fails_only_for_a_failed_check(tmp_path, program, code):
    assert exit_code(tmp_path, f"{prolog_lines(str(tmp_path / 'dalsegno'))}exit 0\n", program) == code


@pytest.mark.parametrize("mode", ["auto", "observe", "off"])
@pytest.mark.parametrize("armed", [(), ("train",), ("train", "debug")])
def test_programs_of_slurm_may_act_exactly_where_the_controller_may(mode, armed):
    health = Health(mode=mode, armed=armed if mode == "observe" else ())
    policy = Policy.of(health, frozenset(), frozenset())
    for node, own in (("n1", ("train",)), ("n2", ("train", "debug"))):
        assert may_act(replace(LAB, health=health), node) is not policy.observes(own)


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0A01A8C0:1AA4 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0B01A8C0:B2C4 0A01A8C0:1AA4 STATE 00000000:00000000 02:000A6C12 00000000     UID        0 4712 2 0 20 4 30 10 -1
"""
CALLED = "health --context continuous --drain on n1\n"


def calls(folder: Path, cluster: Cluster, state: str = "", uid: str = "0", more: str = "") -> str:
    """Run the health check with a connection to the controller in this state; return the call of the program."""
    called, table = folder / "called", folder / "tcp"
    called.unlink(missing_ok=True)
    table.write_text(TABLE.replace("STATE", state or "06").replace("UID", uid) + more)
    script = render_health_check(cluster, "n1", str(folder / "dalsegno"), 6820).replace("/proc/net/", f"{folder}/")
    assert exit_code(folder, script, f'echo "$@ on $SLURMD_NODENAME" > {called}; exit 1') == 0
    return called.read_text() if called.exists() else ""


def test_health_check_leaves_a_node_to_the_controller_that_its_agent_is_connected_to(tmp_path):
    established, waiting = "01", "08"
    assert calls(tmp_path, LAB, established) == ""
    assert calls(tmp_path, LAB, waiting) == CALLED
    assert calls(tmp_path, LAB, established, uid="1000") == CALLED, "a user cannot pretend to be the agent"


def test_health_check_ignores_connections_to_a_server_of_root(tmp_path):
    """A user can connect to sshd from any port, also from that of the controller. sshd's end belongs to root."""
    sshd = "   2: 0B01A8C0:B2C4 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0\n"
    assert calls(tmp_path, LAB, "01", more=sshd) == CALLED


def test_health_check_never_fails_and_does_nothing_where_nobody_may_act(tmp_path):
    assert exit_code(tmp_path, render_health_check(LAB, "n1", str(tmp_path / "dalsegno"), 6820), None) == 0
    assert calls(tmp_path, LAB) == CALLED
    assert calls(tmp_path, replace(LAB, health=Health(mode="observe"))) == ""
