"""Tests of creating, changing and removing a cluster, with interruptions."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.cluster.conftest import Cli, leftovers
from tests.waiting import eventually

SMALL = """
name: one
target: local
partitions:
  - {{name: train, nodes: {nodes}, gpus: 2}}
slurm: {{accounting: {accounting}}}
health: {{mode: observe}}  # what is broken here stays so
"""


def small(nodes: int = 2, accounting: bool = False, name: str = "one") -> str:
    return SMALL.format(nodes=nodes, accounting=str(accounting).lower()).replace("name: one", f"name: {name}")


def idle_nodes(cli: Cli, name: str = "one") -> int:
    return cli.ok("shell", "-M", name, "--", "sinfo", "-h", "-N", "-t", "idle").count("\n")


def test_up_makes_all_nodes_idle_and_up_again_does_nothing(cli: Cli):
    cli.ok("up", cli.file(small(2)))
    assert idle_nodes(cli) == 2
    again = cli.run("up")
    assert (again.code, again.err.strip()) == (0, "nothing to do: the cluster is as the file says")
    assert cli.status("one")["phase"] == "up"


INTERRUPTED = {("booting", signal.SIGKILL), ("starting accounting", signal.SIGINT), ("slurmd", signal.SIGINT)}


@pytest.mark.parametrize(
    ("when", "how"),
    [
        pytest.param(when, how, marks=[pytest.mark.long] * ((when, how) not in INTERRUPTED))
        for when in ("booting", "starting accounting", "starting slurmctld", "slurmd", "waiting")
        for how in (signal.SIGKILL, signal.SIGINT)
    ],
)
def test_up_interrupted_at_any_step_is_finished_by_up(cli: Cli, when: str, how: signal.Signals):
    cli.file(small(2, accounting=True))
    interrupt(cli, when, how)
    assert cli.status("one")["phase"] == "half-made"
    cli.ok("up")
    assert idle_nodes(cli) == 2
    assert cli.ok("shell", "--", "srun", "-N2", "hostname").split().__len__() == 2


@pytest.mark.parametrize(
    "when", ["preparing", pytest.param("booting", marks=pytest.mark.long), "starting accounting", "slurmd"]
)
def test_down_removes_what_a_killed_up_left(cli: Cli, when: str):
    cli.file(small(2, accounting=True))
    interrupt(cli, when, signal.SIGKILL)
    cli.ok("down", "one")
    assert leftovers(cli.home) == []


def interrupt(cli: Cli, when: str, how: signal.Signals) -> None:
    """Start `up` and end it when it reports this step."""
    process = cli.start("up")
    assert process.stdout is not None
    for line in process.stdout:
        if when in line:
            process.send_signal(how)
            break
    else:
        raise AssertionError(f"up never said {when!r}")
    process.stdout.read()
    assert process.wait() in (-how, 130)


def test_down_of_a_removed_cluster_succeeds(cli: Cli):
    answer = cli.run("down", "one")
    assert (answer.code, answer.err.strip()) == (0, "there is no cluster one: nothing to remove")
    assert cli.run("down").code == 0


def test_down_finds_a_cluster_whose_folder_was_deleted(cli: Cli):
    cli.ok("up", cli.file(small(2)))
    shutil.rmtree(cli.home / "clusters/one", ignore_errors=True)
    while (cli.home / "clusters/one").exists():  # the daemons still write there
        shutil.rmtree(cli.home / "clusters/one", ignore_errors=True)
    cli.ok("down", "one")
    assert leftovers(cli.home) == []


def test_two_clusters_with_equal_node_names_do_not_conflict(cli: Cli):
    cli.ok("up", cli.file(small(2, name="one")))
    cli.ok("up", cli.file(small(2, name="two")))
    for name in ("one", "two"):
        cli.ok("shell", "-M", name, "--", "sbatch", "-N2", "-J", name, "-o", "/dev/null", "--wrap", "srun sleep 1000")
    for name in ("one", "two"):
        eventually(
            lambda name=name: (
                cli.ok("shell", "-M", name, "--", "squeue", "-h", "-o", "%j %T").strip() == f"{name} RUNNING"
            )
        )
    assert cli.run("status").code == 2  # there are two clusters, so a name is required
    # Both clusters have a job 1 of the same user, on nodes with the same names.
    cli.ok("shell", "-M", "one", "--", "scancel", "-n", "one")
    eventually(lambda: cli.ok("shell", "-M", "one", "--", "squeue", "-h") == "")
    cli.ok("down", "one")
    assert cli.ok("shell", "-M", "two", "--", "squeue", "-h", "-o", "%j %T").strip() == "two RUNNING"
    assert cli.ok(
        "shell", "-M", "two", "--", "srun", "--overlap", "--jobid=1", "-N2", "-n2", "pgrep", "-c", "sleep"
    ).split() == ["1", "1"]


def test_nodes_are_added_under_a_running_job(cli: Cli):
    cli.ok("up", cli.file(small(2)))
    cli.ok(
        "shell",
        "--",
        "sbatch",
        "-N2",
        "-o",
        str(cli.home / "job.out"),
        "--wrap",
        f"srun sh -c 'until [ -e {cli.home}/last ]; do sleep 0.1; done'; echo done $SLURM_RESTART_COUNT",
    )
    eventually(lambda: "RUNNING" in cli.ok("shell", "--", "squeue", "-h", "-o", "%T"))
    plan = cli.ok("plan", cli.file(small(4)))
    assert plan.splitlines() == [
        "adds 2 nodes (train-3, train-4)", "restarts slurmctld and 2 slurmd; running jobs continue", "ends no job",
    ]  # fmt: skip
    cli.ok("up")
    assert cli.ok("shell", "--", "srun", "-N2", "-w", "train-[3-4]", "hostname").split().__len__() == 2
    assert "train-4" in cli.ok("shell", "--node", "train-1", "--", "cat", "/etc/hosts")
    (cli.home / "last").touch()
    eventually(lambda: (cli.home / "job.out").read_text() == "done\n")


def test_a_busy_node_is_drained_before_it_is_removed(cli: Cli):
    cli.ok("up", cli.file(small(3)))
    script = f"until [ -e {cli.home}/last ]; do sleep 0.1; done; echo done"
    cli.ok("shell", "--", "sbatch", "-w", "train-3", "-o", str(cli.home / "job.out"), "--wrap", script)
    eventually(lambda: "RUNNING" in cli.ok("shell", "--", "squeue", "-h", "-o", "%T"))
    cli.file(small(2))
    assert "waits for 1 job (1) to end first; ends no job" in cli.ok("plan")
    up = cli.start("up")
    eventually(lambda: "drain" in cli.ok("shell", "--", "sinfo", "-h", "-n", "train-3", "-o", "%T"))
    (cli.home / "last").touch()
    said, _ = up.communicate(timeout=100)
    assert up.returncode == 0, said
    assert (cli.home / "job.out").read_text() == "done\n"
    assert idle_nodes(cli) == 2
    assert not (cli.home / "clusters/one/hosts/train-3").exists()


def test_a_changed_limit_restarts_nothing(cli: Cli):
    cli.ok("up", cli.file(small(2)))
    cli.file(small(2).replace("gpus: 2", "gpus: 2, time_limit: 30m"))
    assert cli.ok("plan").splitlines() == [
        "changes Slurm's settings in place (scontrol reconfigure)", "restarts nothing", "ends no job",
    ]  # fmt: skip
    cli.ok("up")
    assert cli.ok("shell", "--", "sinfo", "-h", "-o", "%l").split() == ["30:00"]


def test_daemon_that_dies_at_start_is_reported_with_its_log(cli: Cli):
    cli.file(small(1).replace("accounting: false", "accounting: false, extra: {SelectType: select/nonsense}"))
    answer = cli.run("up")
    assert answer.code == 1
    assert "slurmctld on head ended with code 1; the end of its log:" in answer.err
    assert "select/nonsense" in answer.err and "hint: " in answer.err and "Traceback" not in answer.err
    status = cli.status("one")
    assert status["phase"] == "half-made" and any("slurmctld on head" in str(line) for line in status["problems"])  # type: ignore[attr-defined]
    cli.ok("up", cli.file(small(1)))
    assert idle_nodes(cli) == 1


def test_change_refused_by_slurm_is_rolled_back(cli: Cli):
    cli.ok("up", cli.file(small(2)))
    cli.ok("shell", "--", "sbatch", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 1000")
    eventually(lambda: "RUNNING" in cli.ok("shell", "--", "squeue", "-h", "-o", "%T"))
    cli.file(small(3).replace("accounting: false", "accounting: false, extra: {SelectType: select/nonsense}"))
    answer = cli.run("up")
    assert answer.code == 1 and "select/nonsense" in answer.err and "The cluster was restored" in answer.err
    assert cli.status("one")["phase"] == "up"
    assert cli.ok("shell", "--", "squeue", "-h", "-o", "%T %D").split() == ["RUNNING", "2"]
    assert cli.ok("plan", cli.file(small(2))).strip() == "nothing to do: the cluster is as the file says"


def test_dead_host_is_reported_and_booted_by_up(cli: Cli):
    cli.ok("up", cli.file(small(2)))
    kill_host(cli, "train-2")
    assert any("train-2" in str(line) for line in cli.status("one")["problems"])  # type: ignore[attr-defined]
    cli.ok("up")
    assert idle_nodes(cli) == 2


def test_dead_head_is_booted_with_its_jobs(cli: Cli):
    cli.ok("up", cli.file(small(2, accounting=True)))
    cli.ok("shell", "--", "sbatch", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 1000")
    eventually(lambda: "RUNNING" in cli.ok("shell", "--", "squeue", "-h", "-o", "%T"))
    running_since, saved = time.time(), cli.home / "clusters/one/slurmctld/job_state"
    eventually(
        lambda: saved.exists() and saved.stat().st_mtime > running_since
    )  # Slurm saves its state every few seconds
    kill_host(cli, "head")
    assert cli.status("one")["phase"] == "degraded"
    cli.ok("up")
    assert "RUNNING" in cli.ok("shell", "--", "squeue", "-h", "-o", "%T")


def test_dead_bridge_is_replaced_and_hosts_reconnected(cli: Cli):
    cli.ok("up", cli.file(small(2)))
    kill_host(cli, "switch")
    cli.ok("up")
    assert cli.ok("shell", "--", "srun", "-N2", "hostname").split().__len__() == 2


def kill_host(cli: Cli, host: str) -> None:
    from dalsegno.system.children import end
    from dalsegno.system.hosts import host_process

    process = host_process(cli.home / "clusters/one/hosts" / host)
    assert process is not None
    assert end([process]) == []


def test_a_second_up_at_the_same_time_is_refused(cli: Cli):
    cli.file(small(2, accounting=True))
    first = cli.start("up")
    assert first.stdout is not None and any("booting" in line for line in iter(first.stdout.readline, ""))
    first.send_signal(signal.SIGSTOP)  # stopped, because the second `up` may take any time to start
    second = cli.run("up")
    first.send_signal(signal.SIGCONT)
    assert second.code == 1 and "another `dalsegno` is working on cluster one" in second.err
    first.stdout.read()
    assert first.wait() == 0


def test_full_disk_is_reported_and_leaves_nothing(cli: Cli):
    """The file system has 2 MB, too little for the database."""
    disk = cli.home / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=755", "none", str(disk)], check=True)
    full = Cli(disk, os.geteuid())
    try:
        answer = full.run("up", cli.file(small(1, accounting=True)), cwd=cli.home)
        assert answer.code == 1 and "space" in answer.err and "Traceback" not in answer.err
        full.ok("down", "one", cwd=cli.home)
        assert leftovers(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
