"""Tests of automatic recovery: broken hosts return to service by themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.client import ask
from dalsegno.system.children import arguments, descendants, find
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.hosts import host_process
from dalsegno.targets.local.network import port_name
from dalsegno.wire.frames import Message
from tests.cluster.conftest import NO_LOAD_TESTS, PINGED_S, Cli, at_home, have_job_saved, have_state_saved, taken_down
from tests.cluster.programs import programs
from tests.cluster.test_containers import make_image
from tests.cluster.test_repair import daemon_pid
from tests.waiting import eventually

REPAIR_S = 100 * slowness()  # timeout for a repair that takes seconds on an idle machine

FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 3, spares: 1, gpus: 2, gpu_type: h100, cpus: 4, memory: 1G, default: true}
slurm: {accounting: false, extra: {Prolog: PROLOG}}
containers: {enabled: true}
health: {per_hour: 100, max_out: 50%, checks: CHECKS}
"""
SPARE = "train-4"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cli]:
    """Return a cluster whose validations run no load tests, except in the test that asks for them."""
    with taken_down(at_home(cache)) as cli:
        prolog = cli.home / "prolog"
        prolog.write_text(f"#!/bin/sh\ntest ! -e {cli.home}/bad-$SLURMD_NODENAME\n")
        prolog.chmod(0o755)
        cli.ok("up", cli.file(file(cli, NO_LOAD_TESTS)))
        eventually(lambda: phase(cli, SPARE) == "spare", REPAIR_S)
        yield cli


def file(cli: Cli, checks: str) -> str:
    return FILE.replace("PROLOG", str(cli.home / "prolog")).replace("CHECKS", checks)


def request(cli: Cli, message: Message) -> Message:
    return ask(cli.home / "clusters/one/run/controller.sock", message, 100)


def phase(cli: Cli, node: str) -> str:
    return str(request(cli, {"node": node}).get("node", {}).get("phase", ""))


def events(cli: Cli, node: str, since: int = 0) -> list[Message]:
    """Return the controller's events about a node, without the faults that the tests injected."""
    found = request(cli, {"events": since})["events"]
    return [each for each in found if each["node"] == node and each["kind"] != "request"]


def last_event(cli: Cli) -> int:
    return max((each["id"] for each in request(cli, {"events": -1})["events"]), default=0)


def wait_for_event(cli: Cli, node: str, text: str, since: int) -> None:
    def texts() -> list[str]:
        return [each["text"] for each in events(cli, node, since)]

    try:
        eventually(lambda: text in texts(), REPAIR_S)
    except AssertionError:
        raise AssertionError(f"no event {text!r}; {node} is {state(cli, node)}, its events: {texts()}") from None


def state(cli: Cli, node: str) -> str:
    return cli.ok("shell", "--", "sinfo", "-h", "-n", node, "-o", "%T").split()[0]


def heals(cli: Cli, node: str, breaking: Callable[[], object]) -> dict[str, float]:
    """Inject a fault into a node and wait until the node is back in service.

    Return when each kind of event was first reported.
    """
    before, began = last_event(cli), time.time()
    breaking()
    eventually(lambda: any(each["kind"] == "return" for each in events(cli, node, before)), REPAIR_S)
    eventually(lambda: state(cli, node) == "idle", PINGED_S)  # `idle*` for a moment, until the node has answered Slurm
    found = events(cli, node, before)
    return {each["kind"]: each["at"] - began for each in reversed(found) if each["stage"] != "begun"}


def controller_pid(cli: Cli) -> int:
    head = host_process(cli.home / "clusters/one/hosts/head")
    assert head is not None
    (pid,) = programs(descendants(head.pid), lambda words: "controller" in words)
    return pid


def test_host_without_power_is_replaced_validated_and_returned(cluster: Cli):
    passport = eventually(lambda: request(cluster, {"node": "train-2"})["gpus"])
    cluster.ok("up", cluster.file(file(cluster, "{}")))
    took = heals(cluster, "train-2", lambda: cluster.ok("inject", "power-off", "train-2"))
    assert list(sorted(took, key=lambda kind: took[kind]))[-5:] == [
        "setdown", "evidence", "replace", "validate", "return",
    ]  # fmt: skip
    (returned,) = [each["text"] for each in events(cluster, "train-2") if each["text"].startswith("validated, ")]
    if importlib.util.find_spec("torch"):
        right = "(pair-collective passed: all-reduce of 16 MiB by 2 ranks with gloo: right, "
        # A validation without this result does not fail.
        late = "(pair-collective unknown: torch was not loaded in time"
        assert right in returned or (slowness() > 4 and late in returned)
    else:
        assert f"(pair-collective unknown: {sys.executable} has no torch: data was exchanged, " in returned
    (bundle,) = (cluster.home / "clusters/one/controller/evidence/train-2").iterdir()
    assert "NodeName=train-2" in (bundle / "slurm.txt").read_text()
    assert "slurmd" in (bundle / "slurmd.log").read_text() and "gpus" in (bundle / "telemetry.json").read_text()
    assert (bundle / "jobs.txt").exists() and "findings" in (bundle / "report.json").read_text()
    eventually(lambda: len(request(cluster, {"node": "train-2"})["gpus"]) == 4)
    old = [gpu for gpu in request(cluster, {"node": "train-2"})["gpus"] if gpu["sent_away_at"]]
    assert {gpu["uuid"] for gpu in old} == {gpu["uuid"] for gpu in passport}, "new GPUs, and the old ones are recorded"
    cluster.ok("up", cluster.file(file(cluster, NO_LOAD_TESTS)))


def test_xid_79_drains_the_node_and_a_killed_controller_continues(cluster: Cli):
    words = ("sbatch", "--parsable", "--requeue", "-w", "train-3", "-o", "/dev/null", "--wrap", "sleep 1000")
    job = cluster.ok("shell", "--", *words).strip()
    eventually(lambda: state(cluster, "train-3") != "idle")

    def break_and_kill() -> None:
        before = last_event(cluster)
        cluster.ok("inject", "xid", "79", "train-3")
        eventually(lambda: any(each["kind"] == "drain" for each in events(cluster, "train-3", before)), every_s=0.02)
        os.kill(controller_pid(cluster), 9)
        eventually(lambda: answers(cluster))
        eventually(lambda: any(each["kind"] == "requeue" for each in events(cluster, "train-3", before)))
        cluster.ok("shell", "--", "scancel", job)

    heals(cluster, "train-3", break_and_kill)
    actions = [each["kind"] for each in events(cluster, "train-3") if each["stage"] != "begun"]
    assert (actions.count("drain"), actions.count("reboot"), actions.count("return")) == (1, 1, 1)
    (bundle,) = (cluster.home / "clusters/one/controller/evidence/train-3").iterdir()
    assert "Xid" in (bundle / "telemetry.json").read_text() and (bundle / "dmesg.txt").read_text()
    assert "slurmd" in (bundle / "slurmd.log").read_text()
    assert [line.split()[0] for line in (bundle / "jobs.txt").read_text().splitlines()] == [job]
    assert "check       xid failed: Xid 79" in cluster.ok("why", "train-3")
    eventually(
        lambda: "check       xid passed" in cluster.ok("why", "train-3")
    )  # wait, because the agent's next regular check may come after the validation


def answers(cli: Cli) -> bool:
    try:
        return bool(request(cli, {"nodes": True}).get("nodes"))
    except DalsegnoError:  # the host is still booting
        return False


def test_other_drains_are_kept_and_paused_automation_does_nothing(cluster: Cli):
    job = cluster.ok("shell", "--", "sbatch", "--parsable", "-w", "train-1", "-o", "/dev/null", "--wrap", "sleep 1000")
    eventually(lambda: state(cluster, "train-1") != "idle")
    cluster.ok("shell", "--", "scontrol", "update", "node=train-1", "state=drain", "reason=mine")
    before = last_event(cluster)
    cluster.ok("inject", "xid", "79", "train-1")
    eventually(lambda: any("an administrator keeps it" in each["text"] for each in events(cluster, "train-1", before)))
    assert "check       train-1: xid failed: Xid 79" in cluster.ok("why", job.strip()), (
        "the history of a job includes its node"
    )
    cluster.ok("shell", "--", "scancel", job.strip())
    request(cluster, {"automation": "pause"})
    cluster.ok("shell", "--", "scontrol", "update", "node=train-1", "state=resume")
    cluster.ok("inject", "--clear", "train-1")
    eventually(lambda: any("accepted faults are over" in each["text"] for each in events(cluster, "train-1", before)))
    assert not [each for each in events(cluster, "train-1", before) if "would" in each["text"]], (
        "it was left to the administrator"
    )
    cluster.ok("inject", "xid", "79", "train-1")
    eventually(lambda: any("paused; would drain it" in each["text"] for each in events(cluster, "train-1", before)))
    eventually(lambda: state(cluster, "train-1") == "idle")
    said = cluster.run("status").err
    assert "automation is paused" in said and "train-1 is suspected: " in said
    cluster.ok("inject", "--clear", "train-1")
    eventually(lambda: phase(cluster, "train-1") == "in service")
    request(cluster, {"automation": "resume"})
    assert {each["kind"] for each in events(cluster, "train-1", before)} <= {"note", "turn"}


def test_a_node_that_slurm_drains_for_its_prolog_is_validated_and_returned(cluster: Cli):
    words = ("sbatch", "--parsable", "-w", "train-1", "-o", "/dev/null", "--wrap", "true")

    def let_a_prolog_fail() -> None:
        (cluster.home / "bad-train-1").touch()
        job = cluster.ok("shell", "--", *words).strip()
        eventually(lambda: "drained" in state(cluster, "train-1") or phase(cluster, "train-1") != "in service")
        (cluster.home / "bad-train-1").unlink()
        cluster.ok("shell", "--", "scancel", job)

    before = last_event(cluster)
    heals(cluster, "train-1", let_a_prolog_fail)
    texts = [each["text"] for each in events(cluster, "train-1", before)]
    assert any("(pair-collective unknown: it is off in the cluster file: data was exchanged" in text for text in texts)
    assert "drained: slurm[prolog]: Prolog error" in texts


def test_a_node_with_quick_job_failures_is_drained_and_validated(cluster: Cli):
    def let_jobs_fail() -> None:
        for node in ("train-1", "train-2", "train-2", "train-2"):
            words = (
                "sbatch",
                "-w",
                node,
                "-J",
                "fails",
                "-o",
                "/dev/null",
                "--wrap",
                '[ "$SLURMD_NODENAME" != train-2 ]',
            )
            cluster.ok("shell", "--", *words)

    before = last_event(cluster)
    heals(cluster, "train-2", let_jobs_fail)
    texts = [each["text"] for each in events(cluster, "train-2", before)]
    assert "drained: black-hole: 3 jobs failed here right after they started" in texts


def test_no_action_while_slurmctld_does_not_answer(cluster: Cli):
    log, before = cluster.home / "clusters/one/hosts/head/controller.log", last_event(cluster)
    seen = len(log.read_text())  # the event is reported only once
    have_state_saved(cluster, "one")  # a job that has just ended would otherwise hold its node
    os.kill(daemon_pid(cluster, "head", "slurmctld"), 9)
    cluster.ok("inject", "xid", "79", "train-2")
    eventually(lambda: "Slurm does not answer; no action on nodes" in log.read_text()[seen:], REPAIR_S)
    eventually(lambda: any(each["verdict"] == "failed" for each in told_of_agent(cluster, "train-2")), REPAIR_S)
    assert {each["kind"] for each in events(cluster, "train-2", before)} <= {"turn", "note"}
    cluster.ok("up")  # `up` also clears injected faults
    eventually(lambda: phase(cluster, "train-2") == "in service" and state(cluster, "train-2") == "idle", PINGED_S)


def view(cli: Cli, node: str) -> Message:
    (found,) = [each for each in request(cli, {"agents": True})["agents"] if each["node"] == node]
    return dict(found)


def told_of_agent(cli: Cli, node: str) -> list[Message]:
    return [{"check": each[0], "verdict": each[1]} for each in view(cli, node)["findings"]]


def test_replaced_gpus_are_refused_until_forgiven(cluster: Cli):
    before = last_event(cluster)
    cluster.ok("inject", "bad-replacement", "train-2", "--same-gpus")
    heals(cluster, "train-2", lambda: cluster.ok("inject", "xid", "54", "train-2"))
    texts = [each["text"] for each in events(cluster, "train-2", before)]
    assert any("was replaced before and has come back" in text for text in texts), texts
    assert [text for text in texts if text.startswith("replaced")] == ["replaced"] * 2
    assert "may be used again" in cluster.run("nodes", "forgive", "train-2").err
    assert cluster.run("nodes", "forgive", "train-2").code == 1, "no replaced GPU is left"


def test_disconnected_controller_changes_no_node(cluster: Cli):
    nodes = ("train-1", "train-2", "train-3", SPARE)
    eventually(lambda: all(heard_in(cluster, node) for node in nodes))  # a silent node would already be missing
    before, folder = last_event(cluster), cluster.home / "clusters/one"
    switch = host_process(folder / "hosts/switch")
    assert switch is not None
    port = port_name(json.loads((folder / "state.json").read_text())["placement"]["addresses"]["head"])
    cable = ("nsenter", "-n", "-t", str(switch.pid), "ip", "link", "set", port)

    def reported(text: str) -> bool:
        return any(text in each["text"] for each in request(cluster, {"events": before})["events"])

    subprocess.run([*cable, "down"], check=True)
    try:
        eventually(lambda: reported("most likely the controller's own network"))
    finally:
        subprocess.run([*cable, "up"], check=True)
    eventually(lambda: reported("nodes are heard again"))
    eventually(lambda: all(heard_in(cluster, node) for node in nodes))
    found = [each for node in nodes for each in events(cluster, node, before)]
    assert [each["text"] for each in found if each["kind"] not in ("turn", "note")] == []
    eventually(lambda: [state(cluster, node) for node in nodes] == [*["idle"] * 3, "drained"], PINGED_S)


def heard_in(cli: Cli, node: str) -> bool:
    """Return whether the node's agent is connected to the controller, which does not suspect the node."""
    return view(cli, node)["presence"] == "connected" and phase(cli, node) in ("in service", "spare")


def test_job_that_loses_a_node_restarts_without_the_requeue_delay(cluster: Cli):
    words = ("sbatch", "--parsable", "--requeue", "-N3", "-w", "train-2", "-o", "/dev/null", "--wrap", "sleep 1000")
    job = cluster.ok("shell", "--", *words).strip()

    def where() -> str:
        return cluster.ok("shell", "--", "squeue", "-h", "-j", job, "-t", "R", "-o", "%N").strip()

    nodes, before = eventually(where), last_event(cluster)
    cluster.ok("inject", "power-off", "train-2")
    for text in ("was requeued by Slurm; its start delay is removed", "runs again on train-1"):
        eventually(lambda text=text: any(text in each["text"] for each in events(cluster, "train-2", before)), REPAIR_S)
    assert where() == nodes
    cluster.ok("shell", "--", "scancel", job)


# srun --auto-resume=1


def stepping(cluster: Cli, name: str) -> tuple[Path, str]:
    """Return a file in which the tasks of a step write lines, and a command that ends when a second file exists."""
    signed = cluster.home / "tmp" / name
    task = f"echo $SLURMD_NODENAME >> {signed}; until test -e {signed}.last; do sleep 0.05; done"
    return signed, f"sh -c '{task}'"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def submit(cluster: Cli, name: str, script: str, *options: str) -> tuple[str, Path]:
    """Submit a job; return its id and its output file."""
    path, out = cluster.home / "tmp" / f"{name}.sh", cluster.home / "tmp" / f"{name}.out"
    path.write_text(f"#!/bin/bash\n#SBATCH --open-mode=append\n#SBATCH -o {out}\n{script}\n")
    return cluster.ok("shell", "--", "sbatch", "--parsable", *options, str(path)).strip(), out


def image(cluster: Cli) -> str:
    found = cluster.home / "tiny.sqsh"
    return (
        f"--container-image={found if found.exists() else make_image(cluster.home)} --container-mounts={cluster.home}"
    )


def test_auto_resume_restarts_the_step_of_a_batch_script(cluster: Cli):
    signed, step = stepping(cluster, "batch")
    job, out = submit(cluster, "batch", f"srun --auto-resume=1 {image(cluster)} {step}\necho ends with $?", "-N2")
    eventually(lambda: len(lines(signed)) == 2)
    lost = next(name for name in lines(signed) if name != batch_host(cluster, job))
    set_weight(cluster, lost, 1000)  # if the node returns before the job restarts, Slurm prefers the other nodes
    heals(cluster, lost, lambda: cluster.ok("inject", "power-off", lost))
    (cluster.home / "tmp/batch.last").touch()
    eventually(lambda: "ends with 0" in lines(out), 60)
    set_weight(cluster, lost, 1)
    assert len(lines(signed)) == 4 and lost not in lines(signed)[2:]
    assert f"dalsegno: auto-resume: job {job} was restarted on" in out.read_text()


def set_weight(cluster: Cli, node: str, weight: int) -> None:
    cluster.ok("shell", "--", "scontrol", "update", f"node={node}", f"weight={weight}")


def batch_host(cluster: Cli, job: str) -> str:
    return cluster.ok("shell", "--", "squeue", "-h", "-j", job, "-o", "%B").strip()


def test_auto_resume_restarts_the_step_on_remaining_nodes(cluster: Cli):
    signed, step = stepping(cluster, "tough")
    words = f"srun --auto-resume=1 -N2 {image(cluster)} {step}"
    held = cluster.start("shell", "--", "salloc", "--no-kill", "-N3", "sh", "-c", words)
    eventually(lambda: len(lines(signed)) == 2)
    lost = lines(signed)[0]
    heals(cluster, lost, lambda: cluster.ok("inject", "power-off", lost))
    eventually(lambda: len(lines(signed)) == 4)
    (cluster.home / "tmp/tough.last").touch()
    out, _ = held.communicate(timeout=60)
    assert held.returncode == 0, out
    assert f"dalsegno: auto-resume: {lost} has failed" in out and "restarting the step in job" in out
    assert lost not in lines(signed)[2:]


def test_auto_resume_requests_a_new_allocation_but_not_after_a_failure(cluster: Cli):
    """Both jobs run at the same time, because each is observed for a while."""
    fails = f"srun --auto-resume=1 sh -c 'echo once >> {cluster.home}/tmp/fails; exit 7'"
    own, _ = submit(cluster, "fails", fails, "-w", "train-3")
    signed, step = stepping(cluster, "plain")
    held = cluster.start("shell", "--", "salloc", "-w", "train-[1-2]", "sh", "-c", f"srun --auto-resume=1 {step}")
    eventually(lambda: len(lines(signed)) == 2)
    before = last_event(cluster)
    cluster.ok("inject", "power-off", "train-2")
    eventually(lambda: any(each["kind"] == "return" for each in events(cluster, "train-2", before)), REPAIR_S)
    eventually(lambda: len(lines(signed)) == 4, 60)  # the new job may have the repaired node
    (cluster.home / "tmp/plain.last").touch()
    out, _ = held.communicate(timeout=60)
    assert held.returncode == 0 and "restarting the step in a new job" in out, out
    eventually(lambda: " ExitCode=7:0" in cluster.ok("shell", "--", "scontrol", "show", "job", own))
    assert lines(cluster.home / "tmp/fails") == ["once"]
    eventually(lambda: state(cluster, "train-2") == "idle", PINGED_S)


def test_auto_resume_requeues_after_a_drained_node_but_not_after_cancel(cluster: Cli):
    signed, step = stepping(cluster, "dies")
    dies = f"test $SLURM_RESTART_COUNT || srun --auto-resume=1 {step[:-1]}; exit 3' && echo ends well"
    job, out = submit(cluster, "dies", dies, "-N2")
    eventually(lambda: len(lines(signed)) == 2)
    bad = lines(signed)[0]
    reason = "reason=dalsegno:drain:gpu a test says so"
    cluster.ok("shell", "--", "scontrol", "update", f"node={bad}", "state=drain", reason)
    (cluster.home / "tmp/dies.last").touch()
    cancel_one_that_stays_ended(cluster)

    def ends_well() -> bool:
        """Wait for the job, setting its start time repeatedly: Slurm delays a requeued job by half a minute."""
        cluster.run("shell", "--", "scontrol", "update", f"jobid={job}", "StartTime=now")
        return "ends well" in lines(out)

    eventually(ends_well, 90, 1)
    assert f"{bad} has failed (drain:gpu a test says so): job {job} has 1 of the 2" in out.read_text()
    eventually(lambda: state(cluster, bad) == "idle", PINGED_S)


def cancel_one_that_stays_ended(cluster: Cli) -> None:
    signed, step = stepping(cluster, "cancelled")
    job, out = submit(cluster, "cancelled", f"srun --auto-resume=1 {step}\necho goes on", "-N2")
    eventually(lambda: len(lines(signed)) == 2)
    cluster.ok("shell", "--", "scancel", job)
    eventually(lambda: "CANCELLED" in cluster.ok("shell", "--", "scontrol", "show", "job", job))
    eventually(lambda: not find(lambda pid: any(str(signed) in word for word in arguments(pid))))
    assert "auto-resume" not in out.read_text() and len(lines(signed)) == 2


# Runs of srun's own tasks


def test_run_of_srun_tasks_keeps_a_suspected_node_until_it_ends(cluster: Cli):
    """A run of srun tasks ends with its first lost node, and reports no nodes that it could leave."""
    program, go = cluster.home / "waits.py", cluster.home / "go"
    program.write_text(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.1)\n")

    def break_under_it() -> None:
        run = cluster.start("run", "--framework", "plain", "-N", "3", "--nproc-per-node", "1", str(program))
        try:
            eventually(lambda: all(state(cluster, f"train-{n}") in ("mixed", "allocated") for n in (1, 2, 3)), REPAIR_S)
            cluster.ok("inject", "xid", "48", "train-1")
            eventually(lambda: phase(cluster, "train-1") != "in service")
            until = time.monotonic() + 3  # several rounds of the controller pass in this time
            while time.monotonic() < until:
                assert phase(cluster, "train-1") == "drained" and run.poll() is None
            go.touch()
            said, _ = run.communicate(timeout=100)
            assert run.returncode == 0, said
        finally:
            run.kill()
            run.communicate()

    heals(cluster, "train-1", break_under_it)


# Spares


def test_spare_is_lent_to_a_run_and_returned(cluster: Cli):
    def ask_for_a_node(comment: str, name: str = "plain") -> str:
        words = ("sbatch", "--parsable", "-N1", "--exclusive", f"--comment={comment}", "-J", name, "-o", "/dev/null")
        return cluster.ok("shell", "--", *words, "--wrap", "sleep 1000").strip()

    run, go_on = run_that_loses_a_node(cluster)
    full = [ask_for_a_node("plain") for _ in range(3)]  # the third job stays pending
    eventually(lambda: state(cluster, "train-2") == "allocated" and state(cluster, "train-3") == "allocated")
    assert phase(cluster, SPARE) == "spare"
    joins = ask_for_a_node("dalsegno:join", run)

    def node() -> str:
        return cluster.ok("shell", "--", "squeue", "-h", "-j", joins, "-o", "%T %N").strip()

    eventually(lambda: node() == f"RUNNING {SPARE}")
    given_back = f"given back to job {joins}: Slurm had drained it again"
    for read_again in (("shell", "--", "scontrol", "reconfigure"), ("up",)):  # slurm.conf declares the node as a spare
        before = last_event(cluster)
        if read_again == ("up",):
            have_job_saved(cluster, "one", joins)
            os.kill(daemon_pid(cluster, "head", "slurmctld"), 9)
        cluster.ok(*read_again)
        wait_for_event(cluster, SPARE, given_back, before)
        eventually(lambda: state(cluster, SPARE) == "allocated", REPAIR_S)
        assert node() == f"RUNNING {SPARE}"
    cluster.ok("shell", "--", "scancel", *full, joins)
    eventually(lambda: phase(cluster, SPARE) == "spare")
    eventually(lambda: state(cluster, SPARE) == "drained")  # `draining` until Slurm has ended the job there
    go_on.touch()
    eventually(lambda: state(cluster, "train-1") == "idle", PINGED_S)


def run_that_loses_a_node(cluster: Cli) -> tuple[str, Path]:
    """Start a run that keeps its drained node until a file exists, and that requests no other node."""
    program, go_on = cluster.home / "keeps.py", cluster.home / "go-on"
    program.write_text(f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.1)\n")
    words = ("--framework", "plain", "--sbatch-arg=--nodelist=train-1", "--nproc-per-node", "1")
    run = cluster.ok("run", "--detach", *words, str(program)).strip()
    eventually(lambda: state(cluster, "train-1") in ("mixed", "allocated"), REPAIR_S)
    cluster.ok("inject", "xid", "48", "train-1")
    eventually(lambda: phase(cluster, "train-1") == "drained")
    return run, go_on
