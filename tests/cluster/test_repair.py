"""Tests of repairing a running cluster with `up`."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from dalsegno.system.children import descendants, find
from dalsegno.system.hosts import host_process
from dalsegno.targets.local.network import port_name
from tests.cluster.conftest import Cli
from tests.cluster.test_up_down import idle_nodes, interrupt, kill_host, small
from tests.waiting import eventually


def daemon_pid(cli: Cli, host: str, name: str) -> int:
    """Return the PID of a daemon in the PID namespace of the machine, not of its host."""
    process = host_process(cli.home / "clusters/one/hosts" / host)
    assert process is not None
    return next(pid for pid in descendants(process.pid) if _name(pid).strip() == name.encode())


def test_up_restarts_a_dead_daemon(cli: Cli):
    cli.ok("up", cli.file(small(2, accounting=True)))
    for host, name in (("head", "slurmctld"), ("train-1", "slurmd"), ("head", "slurmdbd"), ("head", "munged")):
        os.kill(daemon_pid(cli, host, name), signal.SIGKILL)
        eventually(lambda host=host, name=name: f"{name} on {host}" in str(cli.status("one")["problems"]))
        cli.ok("up")
        assert cli.status("one")["phase"] == "up"
    assert idle_nodes(cli) == 2


def test_queue_is_unknown_without_slurmctld(cli: Cli):
    cli.ok("up", cli.file(small(1)))
    os.kill(daemon_pid(cli, "head", "slurmctld"), signal.SIGKILL)
    eventually(lambda: cli.status("one")["phase"] == "degraded")
    assert cli.status("one")["jobs"] is None
    assert "jobs: unknown, slurmctld does not answer" in cli.ok("status") and "?/2" in cli.ok("status")


def test_job_of_a_new_cluster_survives_a_killed_slurmctld(cli: Cli):
    """Slurm does not save jobs started by backfill at once, so the main scheduler must start them."""
    cli.ok("up", cli.file(small(1)))
    script = f"until [ -e {cli.home}/last ]; do sleep 0.1; done; echo done $SLURM_RESTART_COUNT"
    cli.ok("shell", "--", "sbatch", "-o", str(cli.home / "out"), "--wrap", script)
    eventually(lambda: "RUNNING" in cli.ok("shell", "--", "squeue", "-h", "-o", "%T"))
    running_since, saved = time.time(), cli.home / "clusters/one/slurmctld/job_state"
    eventually(lambda: saved.stat().st_mtime > running_since)
    os.kill(daemon_pid(cli, "head", "slurmctld"), signal.SIGKILL)
    eventually(lambda: cli.status("one")["phase"] == "degraded")
    cli.ok("up")
    assert "RUNNING" in cli.ok("shell", "--", "squeue", "-h", "-o", "%T")
    (cli.home / "last").touch()
    eventually(lambda: (cli.home / "out").read_text() == "done\n")


def test_backup_controller_takes_over_after_a_node_was_removed(cli: Cli):
    with_backup = small(3).replace("accounting: false", "accounting: false, backup_controller: true")
    cli.ok("up", cli.file(with_backup))
    cli.ok("up", cli.file(with_backup.replace("nodes: 3", "nodes: 2")))
    os.kill(daemon_pid(cli, "head", "slurmctld"), signal.SIGKILL)
    eventually(lambda: cli.run("shell", "--", "sinfo", "-h", "-o", "%D").out.strip() == "2", 120)


def test_up_finishes_an_up_that_was_interrupted_at_its_end(cli: Cli):
    cli.file(small(2))
    interrupt(cli, "waiting", signal.SIGKILL)
    assert "finishes what an earlier `up` began" in cli.ok("plan")
    cli.ok("up")
    assert cli.status("one")["phase"] == "up"


def test_up_connects_a_host_without_a_link(cli: Cli):
    """This is the state after a kill -9 between the boot of a host and its connection."""
    cli.ok("up", cli.file(small(2)))
    state_file = cli.home / "clusters/one/state.json"
    state = json.loads(state_file.read_text())
    switch = host_process(cli.home / "clusters/one/hosts/switch")
    assert switch is not None
    port = port_name(state["placement"]["addresses"]["train-2"])
    subprocess.run(["nsenter", "-t", str(switch.pid), "-n", "ip", "link", "del", port], check=True)
    state_file.write_text(json.dumps({**state, "phase": "making"}))
    cli.ok("up")
    assert sorted(cli.ok("shell", "--", "srun", "-N2", "hostname").split()) == ["train-1", "train-2"]


def test_running_job_continues_when_a_lost_host_is_rebooted(cli: Cli):
    cli.ok("up", cli.file(small(2)))
    out = cli.home / "out"
    work = (
        f"until [ -e {cli.home}/last ]; do echo $(hostname) >> {out}; sleep 0.1; done; echo $(hostname) ends >> {out}"
    )
    script = f"srun --no-kill -N2 sh -c '{work}'"
    cli.ok("shell", "--", "salloc", "--no-shell", "--no-kill", "-N2", "-J", "tough")
    holder = cli.start("shell", "--", "sh", "-c", script.replace("srun", "srun --jobid=1"))
    eventually(lambda: out.exists() and "train-1" in out.read_text() and "train-2" in out.read_text())
    kill_host(cli, "train-2")
    cli.ok("up")
    assert idle_nodes(cli) == 1  # train-2 is back, and the job still runs on train-1
    (cli.home / "last").touch()
    eventually(lambda: "train-1 ends" in out.read_text())
    cli.ok("down", "one")
    holder.wait(100)


def test_plan_names_jobs_pending_in_a_removed_partition(cli: Cli):
    two = small(1) + "# second\n"
    two = two.replace("slurm:", "  - {name: extra, nodes: 1}\nslurm:")
    cli.ok("up", cli.file(two))
    cli.ok("shell", "--", "sbatch", "-p", "extra", "-H", "-o", "/dev/null", "--wrap", "true")
    assert "cannot: 1 job (1) is pending in a partition that will be removed" in cli.ok("plan", cli.file(small(1)))
    answer = cli.run("up")
    assert answer.code == 1 and "job 1 is pending in a partition that will be removed" in answer.err
    assert "scancel 1" in answer.err
    assert cli.status("one")["phase"] == "up"
    assert cli.ok("shell", "--", "sinfo", "-h", "-p", "extra", "-o", "%a").strip() == "up"
    cli.ok("shell", "--", "scancel", "1")
    eventually(lambda: cli.ok("shell", "--", "squeue", "-h") == "")
    cli.ok("up")
    assert cli.ok("shell", "--", "sinfo", "-h", "-o", "%P").split() == ["train*"]


def test_dalsegno_inside_a_host_reports_the_host(cli: Cli):
    cli.ok("up", cli.file(small(1)))
    answer = cli.run("shell", "--", *cli.argv("status"))
    assert answer.code == 2 and "this shell runs inside a host" in answer.err


def test_strict_umask_does_not_exclude_plain_users(cli: Cli):
    argv = ["sh", "-c", 'umask 077; exec "$@"', "sh", *cli.argv("up", cli.file(small(1)))]
    subprocess.run(argv, env=cli.env, cwd=cli.home, check=True, capture_output=True)
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *cli.argv("shell", "--", "srun", "id", "-un")],
        env=cli.env, cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "nobody"), done.stderr


def test_down_works_with_unusual_process_names(cli: Cli):
    cli.ok("up", cli.file(small(1)))
    script = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\xff\\xfe', 0, 0, 0); time.sleep(1000)"
    cli.ok("shell", "--", "sbatch", "-o", "/dev/null", "--wrap", f'python3 -c "{script}"')
    eventually(lambda: find(lambda pid: _name(pid) == b"\xff\xfe\n"))
    cli.ok("down", "one")


def _name(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return b""
