"""Tests of the cluster's Slurm commands for root, for a plain user of the machine, and in any folder."""

import json
import os
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.conftest import Cli, make_home
from tests.waiting import eventually

NOBODY = 65534


@pytest.fixture
def nobody(shared: Cli) -> Cli:
    return replace(shared, uid=NOBODY)


@pytest.mark.parametrize(
    "command", ["sinfo", "squeue", "sacct", "scontrol ping", "sacctmgr show qos", "srun hostname", "sdiag"]
)
def test_slurm_commands_work_in_the_shell(shared: Cli, command: str):
    assert shared.ok("shell", "--", *command.split()).strip()


def test_exit_codes_pass_through(shared: Cli):
    assert shared.run("shell", "--", "sh", "-c", "exit 7").code == 7
    assert shared.run("shell", "--", "srun", "sh", "-c", "exit 3").code == 3
    assert shared.run("shell", "--", "no-such-command").code == 127


def test_a_job_sees_distinct_hosts_with_their_own_names_and_addresses(shared: Cli):
    out = shared.ok(
        "shell", "--", "srun", "-N3", "sh", "-c", "echo $(hostname) $(hostname -I) $(cat /etc/hosts | wc -l)"
    )
    rows = sorted(line.split() for line in out.splitlines())
    assert [row[0] for row in rows] == ["train-1", "train-2", "train-3"]
    assert len({row[1] for row in rows}) == 3


def test_dalsegno_command_works_for_users_and_in_steps(shared: Cli):
    own = str(shared.home / "clusters/shared/bin/dalsegno")
    assert shared.ok("shell", "--", "which", "dalsegno").strip() == own
    assert shared.ok("shell", "-u", "ada", "--", "srun", "-N2", "dalsegno", "--version").count("dalsegno") == 2
    exported = subprocess.run(["bash", "-c", f"{shared.ok('env')}\ntype -P dalsegno"], capture_output=True, text=True)
    assert exported.stdout.strip() == own


def test_host_names_resolve_also_from_mapped_ipv6_addresses(shared: Cli):
    """torch's store listens on IPv4 and IPv6, and warns about every peer without a name."""
    words = shared.ok("shell", "--", "getent", "hosts", "train-2").split()
    assert words[1:] == ["train-2"] and words[0].count(".") == 3
    named = shared.ok("shell", "--", "getent", "hosts", f"::ffff:{words[0]}").split()[1:]
    assert named in (["train-2.ipv4"], ["train-2"])  # newer glibc finds the line of the IPv4 form


def test_slurm_assigns_simulated_gpus(shared: Cli):
    out = shared.ok("shell", "--", "srun", "-N1", "-n4", "--gpus-per-task=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert sorted(out.split()) == ["0,1", "2,3", "4,5", "6,7"]


def test_simulated_nvidia_smi_lists_the_gpus(shared: Cli):
    out = shared.ok("shell", "--", "srun", "-p", "lab", "--gpus=4", "nvidia-smi")
    assert "SIMULATED" in out and out.count("H100 (simulated)") == 4
    listed = shared.ok("shell", "--", "srun", "nvidia-smi", "-L").splitlines()
    assert len(listed) == 8 and len(set(listed)) == 8
    query = shared.ok(
        "shell", "--", "srun", "nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"
    )
    assert query.splitlines()[7].split(", ")[0] == "7"


def test_jobs_start_in_the_folder_they_were_submitted_from(shared: Cli):
    folder = make_home("with space ")
    try:
        assert shared.ok("shell", "--", "srun", "pwd", cwd=folder).strip() == str(folder)
        shared.ok("shell", "--", "sbatch", "--wait", "-o", "out.txt", "--wrap", "pwd", cwd=folder)
        assert (folder / "out.txt").read_text().strip() == str(folder)
    finally:
        (folder / "out.txt").unlink(missing_ok=True)
        folder.rmdir()


def test_a_plain_user_of_the_machine_uses_the_cluster(nobody: Cli):
    assert nobody.ok("shell", "--", "srun", "-N2", "id", "-u").split() == [str(NOBODY)] * 2
    assert "lab-1" in nobody.ok("status")
    job = nobody.ok("shell", "--", "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 60").strip()
    eventually(
        lambda: nobody.ok("shell", "--", "squeue", "-h", "-j", job, "-o", "%T %u").split() == ["RUNNING", "nobody"]
    )
    nobody.ok("shell", "--", "scancel", job)
    assert nobody.run("shell", "--", "scontrol", "update", "nodename=lab-1", "state=down", "reason=x").code == 1


def test_plain_user_can_read_but_not_remove_the_cluster(nobody: Cli):
    answer = nobody.run("down", "shared")
    assert answer.code == 1 and "belongs to root" in answer.err and "sudo" in answer.err


def test_plain_user_cannot_read_secrets(shared: Cli):
    folder = shared.home / "clusters/shared"
    for path in ("secret/munge.key", "secret/db", "etc/slurmdbd.conf"):
        done = subprocess.run(
            ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "cat", str(folder / path)],
            capture_output=True,
        )
        assert b"Permission denied" in done.stderr


@pytest.mark.parametrize("uid", [os.geteuid(), NOBODY])
def test_env_puts_commands_on_path(shared: Cli, uid: int):
    cli = replace(shared, uid=uid)
    exports = cli.ok("env")
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    done = subprocess.run(
        [*become, "bash", "-c", 'eval "$1"; srun -w train-1 hostname', "bash", exports],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert (done.returncode, done.stdout.strip()) == (0, "train-1"), done.stderr


def test_shell_opens_on_login_node_and_root_can_choose_host_and_user(shared: Cli):
    assert shared.ok("shell", "--", "hostname").strip() == "shell"
    assert shared.ok("shell", "--node", "train-2", "--", "hostname").strip() == "train-2"
    assert shared.ok("shell", "--user", "ada", "--", "id", "-un").strip() == "ada"
    answer = shared.run("shell", "--node", "train-99", "--", "true")
    assert answer.code == 2 and "train-1" in answer.err


def test_ssh_enters_a_node_and_keeps_the_exit_code(shared: Cli):
    assert shared.ok("ssh", "train-2", "hostname").strip() == "train-2"
    assert shared.run("ssh", "train-2", "--", "sh", "-c", "exit 7").code == 7
    answer = shared.run("ssh", "train-99", "true")
    assert answer.code == 2 and "train-99" in answer.err


def test_salloc_creates_and_releases_an_allocation(shared: Cli):
    out = shared.ok("shell", "--", "salloc", "-J", "salloc", "-w", "train-[1-2]", "srun", "hostname")
    assert sorted(out.split()) == ["train-1", "train-2"]
    eventually(lambda: "salloc" not in shared.ok("shell", "--", "squeue", "-h", "-o", "%j"))


STEPS = "srun sh -c 'sleep 1; date +%s.%N' & sleep 0.5; srun date +%s.%N; wait"


@pytest.mark.parametrize("where", ["shell", "user's shell", "login node", "machine"])
def test_pending_step_starts_when_the_previous_one_ends(shared: Cli, where: str):
    """slurmctld must reach the waiting srun on any host. Otherwise srun retries only after two minutes."""
    salloc = ["salloc", "-Q", "-J", "waits", "-p", "lab", "sh", "-c", STEPS]
    if where == "machine":
        words = ["bash", "-c", 'eval "$1"; shift; exec "$@"', "bash", shared.ok("env"), *salloc]
        said = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=300, check=True).stdout
    else:
        how = {"user's shell": ["--user", "ada"], "login node": ["--node", "login-1"]}.get(where, [])
        said = shared.ok("shell", *how, "--", *salloc, timeout_s=300)
    first, second = sorted(map(float, said.split()))
    assert second - first < 60


def test_cancelled_job_leaves_no_process(shared: Cli):
    mark = f"86{os.getpid()}"
    script = f"setsid sh -c 'sleep {mark} & sleep {mark}' & sleep {mark}"
    job = shared.ok(
        "shell", "--", "sbatch", "--parsable", "-o", "/dev/null", "--wrap", f"srun -n1 sh -c {json.dumps(script)}"
    ).strip()
    alive = ["pgrep", "-f", f"^sleep {mark}"]
    eventually(lambda: subprocess.run(alive, capture_output=True).stdout.count(b"\n") >= 3)
    shared.ok("shell", "--", "scancel", job)
    eventually(lambda: subprocess.run(alive, capture_output=True).stdout == b"")


def test_status_shows_nodes_daemons_and_queue(shared: Cli):
    job = shared.ok(
        "shell",
        "--",
        "sbatch",
        "--parsable",
        "-p",
        "lab",
        "--gpus=3",
        "-J",
        "look",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 60",
    ).strip()
    eventually(lambda: "RUNNING" in shared.ok("shell", "--", "squeue", "-h", "-j", job, "-o", "%T"))
    status = shared.status("shared")
    lab = next(node for node in status["nodes"] if node["name"] == "lab-1")  # type: ignore[attr-defined]
    assert (lab["state"], lab["gpus"], lab["gpus_used"], lab["gpu_type"], lab["partitions"]) == (
        "mixed",
        4,
        3,
        "h100",
        ["lab"],
    )
    daemons = {daemon["name"] for daemon in status["daemons"]}  # type: ignore[attr-defined]
    assert daemons == {
        "munged", "mariadbd", "slurmdbd", "slurmctld", "controller", "machine-room", "slurmd", "node-agent",
    }  # fmt: skip
    assert [(row["name"], row["gpus"], row["nodes"]) for row in status["jobs"] if row["id"] == job] == [
        ("look", 3, "lab-1")
    ]  # type: ignore[attr-defined]
    table = shared.ok("status")
    assert "3/4 h100" in table and "look" in table
    shared.ok("shell", "--", "scancel", job)


def test_reading_commands_start_quickly(shared: Cli):
    """Limit the CPU time, to notice heavy imports. benchmarks/up.py measures it exactly."""
    for words in (["--help"], ["status"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shared.ok(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0, words


def test_ls_shows_the_cluster(shared: Cli):
    rows = json.loads(shared.ok("ls", "--json"))
    assert [(row["name"], row["phase"], row["nodes"]) for row in rows] == [("shared", "up", 4)]
    assert Path(rows[0]["folder"]) == shared.home / "clusters/shared"
