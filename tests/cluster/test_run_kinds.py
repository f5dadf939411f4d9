"""Tests of runs with and without our controller, and with and without root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunPhase, read_status, write_status
from dalsegno.system.children import arguments, environment, find, owner
from tests.cluster.conftest import SOURCE, Cli, make_home, taken_down
from tests.cluster.programs import programs
from tests.cluster.runs import LONG_S, Run, footprint, kill, node_of
from tests.cluster.test_rootless import NOBODY, Rootless, copy_program
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

QUICK = ("--framework", "jax", "--preload", "json")
# Waits for its stop file, which contains the exit code.
WAITS = """
import os, sys, time
print("pid", os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
sys.exit(int(open(sys.argv[1]).read() or 0))
"""


@dataclass(frozen=True)
class Person(Cli):
    """The `dalsegno` command of an ordinary user on a host of the cluster, with or without our controller."""

    user: str = "ada"
    controller: bool = True

    def argv(self, *args: str) -> list[str]:
        hide = [] if self.controller else ["-u", "DALSEGNO_CONTROLLER"]
        env = ["env", *hide, f"PYTHONPATH={SOURCE}", f"DALSEGNO_RUNS={self.home}/runs"]
        return super().argv("shell", "-u", self.user, "--", *env, sys.executable, "-m", "dalsegno", *args)

    def begin(self, work: Path, script: str, *options: str) -> Run:
        """Start a run whose workers wait for the stop file; return when all of them do. Root inspects it."""
        root = Cli(self.home, self.uid)
        before = footprint(root)
        (work / "train.py").write_text(script)
        name = self.ok("run", "--detach", *QUICK, *options, "train.py", str(work / "stop"), cwd=work).strip()
        run = Run(root, work, RunFolder(self.home / "runs" / name), before)
        run.wait_for(lambda: run.status.phase is RunPhase.RUNNING and all(map(run.log, range(run.status.world_size))))
        return run


@pytest.fixture(scope="module")
def ada(cluster_for_runs: Cli) -> Person:
    (cluster_for_runs.home / "runs").mkdir(mode=0o1777)
    (cluster_for_runs.home / "runs").chmod(0o1777)
    return Person(cluster_for_runs.home, cluster_for_runs.uid)


@pytest.fixture
def stranger(ada: Person) -> Person:
    """Return the user on a Slurm without Dal Segno."""
    return replace(ada, controller=False)


@pytest.fixture
def work(ada: Person, request: pytest.FixtureRequest) -> Path:
    folder: Path = ada.home / f"work-{request.node.name[5:45]}-{os.urandom(2).hex()}"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def end_with(run: Run, code: int) -> int:
    (run.work / "stop.new").write_text(str(code))
    (run.work / "stop.new").rename(run.work / "stop")
    return run.wait_for_end()


# An ordinary user of our cluster


def test_run_belongs_to_its_user_and_its_secret_is_private(ada: Person, work: Path):
    run = ada.begin(work, WAITS, "-N", "2", "--env", "TOKEN=hers")
    her = run.folder.root.stat().st_uid
    assert her not in (0, NOBODY)
    assert {owner(pid) for pid in run.processes()} == {her}
    assert {owner(pid) for pid in (*run.workers().values(), *run.agents().values(), run.coordinator() or 0)} == {her}
    assert "SLURMD_NODENAME" not in node_of(run.coordinator() or 0), "it runs on the head"
    for path in (run.folder.environment, run.folder.connect, run.folder.state):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (her, 0o600)
        assert "Permission denied" in as_nobody("cat", str(path))
    secret = json.loads(run.folder.connect.read_text())["secret"]
    assert len(secret) == 64
    assert find(lambda pid: pid != os.getpid() and any(secret in each for each in arguments(pid))) == []
    assert find(lambda pid: any(secret.encode() in each for each in environment(pid))) == []
    assert end_with(run, 0) == 0
    assert [(each["run"], each["user"]) for each in json.loads(ada.ok("runs", "--json"))] == [(run.id, "ada")]
    run.no_trace()


def as_nobody(*argv: str) -> str:
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return subprocess.run([*become, *argv], capture_output=True, text=True, check=False).stderr


def test_other_users_cannot_cancel_a_run(ada: Person, work: Path):
    run = ada.begin(work, WAITS)
    env = {**ada.env, "DALSEGNO_RUNS": str(ada.home / "runs")}
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    words = [*become, sys.executable, "-m", "dalsegno", "cancel", run.id]
    done = subprocess.run(words, env=env, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"belongs to uid {owner(run.coordinator() or 0)}" in done.stderr, done.stderr
    assert "is cancelled" in ada.run("cancel", run.id).err
    assert (run.status.exit_code, run.status.message) == (143, "cancelled")
    run.no_trace()


# A Slurm without Dal Segno


def test_batch_step_restarts_the_coordinator_without_controller(stranger: Person, work: Path):
    run = stranger.begin(work, WAITS, "-N", "3", "--max-restarts", "1")
    job = run.journal("submitted")[0]["job"]
    keeper, coordinator = coordinators(run)
    assert node_of(coordinator) == run.nodes[0], "it runs in the job"

    kill(run.workers()[2])
    run.wait_for_generation(2)
    run.wait_for(lambda: len(run.workers()) == 3)

    workers = run.workers()
    kill(coordinator)
    run.wait_for(lambda: len(run.journal("came back")) == 1 and len(run.journal("ready")) == 6)
    assert coordinators(run)[0] == keeper and coordinators(run)[1] != coordinator
    assert (run.workers(), run.generation) == (workers, 2), "workers and generation are unchanged"

    assert end_with(run, 5) == 5
    eventually(lambda: "ExitCode=5:0" in run.cli.ok("shell", "--", "scontrol", "show", "job", str(job)))
    run.no_trace()


def coordinators(run: Run) -> list[int]:
    """Return the supervising process and the coordinator itself."""
    found = programs(run.processes(), lambda words: "run-coordinator" in words)
    return sorted(found, key=lambda pid: "--kept" in arguments(pid))


def test_inject_on_real_nodes_needs_consent_and_affects_own_workers(stranger: Person, work: Path):
    run = stranger.begin(work, WAITS, "-N", "2", "--max-restarts", "1")
    node, worker = run.nodes[1], run.workers()[1]
    real = ("inject", "--allow-real-nodes")
    for words, why in (
        (("inject", "worker-kill", node), "`--allow-real-nodes` allows the faults that affect only your own runs"),
        ((*real, "power-off", node), "allowed: slow-gpu, worker-kill, worker-hang"),
        ((*real, "worker-kill", node, "--rank", "7"), "there is no worker of rank 7"),
        ((*real, "worker-kill", node, "--run", "another"), "run another has no job"),
        ((*real, "worker-kill", "train-66"), "there is no node train-66"),
    ):
        refused = stranger.run(*words)
        assert refused.code in (1, 2) and why in refused.err, refused.err
    assert run.workers()[1] == worker

    stranger.ok(*real, "worker-hang", node)
    eventually(lambda: is_still(worker))
    assert f"worker-hang on {node} is undone" in stranger.run(*real, "--clear", node).err
    eventually(lambda: not is_still(worker))
    stranger.ok(*real, "worker-hang", node, "--for", "1s")
    eventually(lambda: not is_still(worker))
    stranger.ok(*real, "slow-gpu", node)
    eventually(lambda: is_still(worker), every_s=0.01)
    eventually(lambda: not is_still(worker), every_s=0.01)
    assert f"slow-gpu on {node} is undone" in stranger.run(*real, "--clear").err, "also without a name"
    assert "nothing to undo" in stranger.run(*real, "--clear", node).err and not is_still(worker)

    assert f"killed rank 1 on {node}" in stranger.run(*real, "worker-kill", node).err
    run.wait_for_generation(2)
    assert end_with(run, 0) == 0
    run.no_trace()


def is_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("how", ["cancel", pytest.param("scancel", marks=pytest.mark.long)])
def test_cancelled_run_without_controller_leaves_nothing(stranger: Person, work: Path, how: str):
    runs_away = "import subprocess\nsubprocess.Popen(['env', '-i', 'setsid', 'sleep', '1234'])\n"
    run = stranger.begin(work, runs_away + WAITS, "-N", "2")
    if how == "cancel":
        stranger.ok("cancel", run.id)
    else:
        run.cli.ok("shell", "-u", "ada", "--", "scancel", str(run.status.jobs[0]))
    assert run.wait_for_end() == 143
    run.no_trace()
    (answer,) = (each for each in json.loads(stranger.ok("runs", "--json")) if each["run"] == run.id)
    assert (answer["state"], answer["exit_code"]) == ("cancelled", 143)


def test_run_whose_coordinator_host_died_is_reported(stranger: Person, work: Path):
    run = stranger.begin(work, WAITS, "-N", "2")
    follower = stranger.start("logs", "-f", run.id)
    try:
        stranger_root = Cli(stranger.home, stranger.uid)
        stranger_root.ok("inject", "power-off", run.nodes[0])
        status = read_status(run.folder.status)
        assert status is not None
        owner = run.folder.status.stat()
        write_status(run.folder.status, replace(status, updated=status.updated - 600))  # as if ten minutes had passed
        os.chown(run.folder.status, owner.st_uid, owner.st_gid)
        said, _ = follower.communicate(timeout=100)
        assert follower.returncode == 1 and "has been silent for" in said, said
        assert "dalsegno cancel" in said
        table = stranger.ok("runs")
        assert "running, silent for 10m" in table, table
    finally:
        follower.kill()
        follower.communicate()
        stranger_root.ok("up")
    stranger.run("cancel", run.id)
    run.wait_for(lambda: run.status.over or stranger.run("cancel", run.id).code == 0, LONG_S)
    run.no_trace()


@pytest.mark.long  # test_run_ends.py resumes in a requeued job
def test_run_resumes_in_its_requeued_job_after_losing_the_coordinator_host(stranger: Person, work: Path):
    run = stranger.begin(work, WAITS, "-N", "3", "--env", "DALSEGNO_COORDINATOR_TIMEOUT=3")
    root = Cli(stranger.home, stranger.uid)
    (job,) = run.status.jobs
    root.ok("inject", "power-off", run.nodes[0])
    state = ("shell", "--", "squeue", "-h", "-j", str(job), "-o", "%T")
    run.wait_for(lambda: "RUNNING" not in root.ok(*state), LONG_S)  # the remaining agents have ended
    root.ok("up")
    run.wait_for(lambda: "PENDING" in root.ok(*state), LONG_S)
    # Slurm would delay the job by two minutes.
    root.ok("shell", "--", "scontrol", "update", f"jobid={job}", "starttime=now")
    run.wait_for_generation(2, LONG_S)
    assert run.status.jobs == (job,)
    assert run.finish() == 0
    run.no_trace()


# Without root


@pytest.fixture(scope="module")
def user(cache_of_nobody: Path) -> Iterator[Rootless]:
    home = make_home("ds-")
    (home / "cache").symlink_to(cache_of_nobody)
    copy_program(home / "lib")
    (home / "tmp").mkdir()
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    for path in (home, home / "tmp"):
        os.chown(path, uid, uid)
    with taken_down(Rootless(home, uid)) as cli:
        cli.ok("up", cli.file(ROOTLESS))
        yield cli


ROOTLESS = """
name: one
target: local
partitions:
  - {name: train, nodes: 2, cpus: 4, memory: 2G}
slurm: {accounting: false}
health: {mode: observe}  # what is broken here stays so
"""
RUNS_AWAY = (
    """
import os, subprocess, sys, time
seconds = sys.argv[2]
subprocess.Popen(["setsid", "sh", "-c", f"sleep {seconds} & sleep {seconds}"])
subprocess.run(["sh", "-c", f"env -i setsid sh -c 'env -i setsid sleep {seconds} &'"])
"""
    + WAITS
)


@pytest.mark.parametrize("how", ["cancel", pytest.param("scancel", marks=pytest.mark.long), "worker-kill"])
def test_no_process_escapes_without_root(user: Rootless, how: str):
    """proctrack/linuxproc does not track processes in a new session; the agents do."""
    seconds = str(70_000 + os.getpid() + len(how))
    work = user.home / f"work-{how}"
    work.mkdir()
    (work / "train.py").write_text(RUNS_AWAY)
    words = ("--detach", *QUICK, "-N", "2", "train.py", str(work / "stop"), seconds)
    folder = RunFolder(user.home / "runs" / user.ok("run", *words, cwd=work).strip())

    def sleepers() -> list[int]:
        return [process.pid for process in find(lambda pid: arguments(pid) == ["sleep", seconds])]

    eventually(lambda: len(sleepers()) == 6)
    before = set(sleepers())
    if how == "cancel":
        user.ok("cancel", folder.run)
    elif how == "scancel":
        user.ok("shell", "--", "scancel", "--name", folder.run)
    else:
        user.ok("inject", "worker-kill", "train-2")
        eventually(lambda: len(sleepers()) == 6 and not before & set(sleepers()))
        (work / "stop").write_text("0")
    eventually(lambda: (status := read_status(folder.status)) is not None and status.over)
    status = read_status(folder.status)
    assert status is not None and status.exit_code == (0 if how == "worker-kill" else 143)
    eventually(lambda: sleepers() == [])
