"""Tests of a cloud's notice that it will take a node back. The virtual hosts have a metadata service like EC2's."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.system.hanging_calls import slowness
from dalsegno.wire.cloud_notice import CLOUD_FILE, find_notice
from tests.cluster.conftest import NO_LOAD_TESTS, PINGED_S, Cli, at_home, taken_down
from tests.cluster.runs import STEPPING, Run
from tests.waiting import PATIENCE, eventually

CLUSTER = f"""
name: one
target: local
local: {{hosts: virtual, cloud: ec2}}
partitions:
  - {{name: train, nodes: 3, cpus: 4, memory: 2G, default: true}}
slurm: {{accounting: false}}
health: {{checks: {NO_LOAD_TESTS}}}
"""

# Two ranks step together. The rank that is ordered to save informs the other, so that both save after the same step.
SAVES = f"""{STEPPING}
import signal

told = []
signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
host, port = os.environ["JAX_COORDINATOR_ADDRESS"].rsplit(":", 1)
saved = f"{{steps}}.saved.{{rank}}"

def connected():
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except OSError:  # rank 0 does not listen yet
            time.sleep(0.02)

if rank == 0:
    with socket.create_server(("", int(port))) as server:
        peer = server.accept()[0]
else:
    peer = connected()
step, word = int(open(saved).read()) if os.path.exists(saved) else 0, b"."
while word == b".":
    mine = b"s" if told else b"e" if os.path.exists(stop) else b"."
    if rank == 0:
        theirs = peer.recv(1)
        word = theirs if mine == b"." else mine
        peer.sendall(word)
    else:
        peer.sendall(mine)
        word = peer.recv(1)
    if not word:
        raise ConnectionError("Connection closed by peer")
    step += 1
    tell(step)
    time.sleep(0.1)
if word == b"s":
    with open(saved, "w") as file:
        file.write(str(step))
    sys.exit(75)
"""


WORDS = ("-N", "2", "--framework", "jax", "--nproc-per-node", "1")


@pytest.fixture(scope="module")
def on_ec2(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(CLUSTER))
        yield cli


def assert_no_step_is_lost(run: Run) -> None:
    for rank in (0, 1):
        made = [step.step for step in run.steps(rank)]
        assert made == list(range(1, len(made) + 1)), "a step was lost or made twice"


def state(cli: Cli, node: str) -> str:
    return cli.ok("shell", "--", "sinfo", "-h", "-n", node, "-o", "%T").strip()


def reason(cli: Cli, node: str) -> str:
    return cli.ok("shell", "--", "sinfo", "-h", "-n", node, "-o", "%E").strip()


def test_run_saves_and_moves_to_its_spare_when_the_cloud_takes_a_node(on_ec2: Cli) -> None:
    cli = on_ec2
    run = Run.start(cli, cli.home / "moves", *WORDS, "--spares", "1", script=SAVES)
    run.wait_for_step(1)
    run.wait_for_spares(1)
    taken, spare = run.nodes[1], run.spares[0]

    cli.ok("inject", "cloud-notice", taken, "--by", f"{30 * slowness() * PATIENCE:.0f}s")
    run.wait_for_step(2)

    assert run.nodes == [run.nodes[0], spare]
    assert_no_step_is_lost(run)
    assert run.restarts == 0
    eventually(lambda: find_notice(reason(cli, taken)))  # the agent of the run may have read the notice first
    notice = find_notice(reason(cli, taken))
    assert notice is not None
    (noticed,), (left,) = run.journal("notice"), run.journal("left")
    assert (noticed["node"], noticed["kind"], noticed["deadline"]) == (taken, "spot", notice.deadline)
    assert left["node"] == taken and left["at"] < notice.deadline
    eventually(lambda: "cloud-notice[spot:" in cli.ok("events"))
    assert "the cloud provider ends this instance" in cli.ok("why", run.id)
    assert "it is not repaired" in cli.ok("why", taken)
    assert taken in cli.ok("status") and "cloud" in cli.ok("nodes")
    assert run.finish() == 0

    cli.ok("inject", "--clear", taken)  # the new machine has no notice
    eventually(lambda: state(cli, taken) == "idle", PINGED_S)


def test_run_moves_without_the_node_agent_because_its_own_agent_reads_the_notice(on_ec2: Cli) -> None:
    cli = on_ec2
    run = Run.start(cli, cli.home / "alone", *WORDS, "--spares", "1", script=SAVES)
    run.wait_for_step(1)
    run.wait_for_spares(1)
    taken = run.nodes[1]

    cli.ok("inject", "agent-dead", taken)
    cli.ok("inject", "cloud-notice", taken)
    run.wait_for_step(2)

    assert taken not in run.nodes and find_notice(reason(cli, taken)) is None
    assert_no_step_is_lost(run)
    assert run.finish() == 0
    cli.ok("inject", "--clear", taken)
    eventually(lambda: state(cli, taken) == "idle", PINGED_S)


@pytest.mark.long
def test_run_moves_before_the_end_of_reserved_time_although_no_controller_drains_the_node(on_ec2: Cli) -> None:
    cli = on_ec2
    run = Run.start(cli, cli.home / "ends", *WORDS, "--spares", "1", script=SAVES)
    run.wait_for_step(1)
    run.wait_for_spares(1)
    taken, end = run.nodes[1], int(time.time()) + 400

    cli.ok("inject", "agent-dead", taken)  # so the controller does not learn of the end
    file = cli.home / "clusters/one/etc" / CLOUD_FILE
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "ends": {taken: end}}))
    run.wait_for_step(2)

    assert taken not in run.nodes and find_notice(reason(cli, taken)) is None
    (noticed,) = run.journal("notice")
    assert (noticed["node"], noticed["kind"], noticed["deadline"]) == (taken, "capacity-block", end)
    assert_no_step_is_lost(run)
    assert run.finish() == 0
    file.write_text(before)
    cli.ok("inject", "--clear", taken)
    eventually(lambda: state(cli, taken) == "idle", PINGED_S)


def test_run_saves_and_waits_for_other_nodes_when_none_is_free(on_ec2: Cli) -> None:
    cli = on_ec2
    cli.ok("shell", "--", "scontrol", "update", "nodename=train-3", "state=drain", "reason=not for this test")
    run = Run.start(cli, cli.home / "waits", *WORDS, script=SAVES)
    run.wait_for_step(1)

    cli.ok("inject", "cloud-notice", "train-2", "--by", "30s")
    run.wait_for(lambda: len(list((cli.home / "waits").glob("steps.saved.*"))) == 2)
    run.wait_for(lambda: state(cli, "train-1") == "idle")  # the run has released its nodes
    assert run.generation == 1 and not run.status.over
    cli.ok("inject", "--clear", "train-2")
    run.wait_for_step(2)

    assert_no_step_is_lost(run)
    assert run.finish() == 0
