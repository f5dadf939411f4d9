"""A whole cluster on virtual hosts that are reached over ssh: created, used, changed, repaired and removed.

The tests share three hosts and run in order. The last one removes the cluster.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ssh.cluster_operator import SOURCE, Done, Operator
from tests.ssh.hosts import make_key, reason_to_skip, running_hosts
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
LOGIN = "admin"  # this user may use sudo without a password
FOREIGN = "# written by hand\n"
STORAGE = "[{name: team, mount: /shared, type: existing, home: true}, {name: disk, mount: /scratch, type: scratch}]"
PARTS = f"storage: {STORAGE}\ncontainers: {{enabled: true}}\nslurm: {{rest: true}}\nmonitoring: {{interval: 5s}}\n"
MORE = f"users: [{{name: ada}}]\nhealth: {{mode: observe}}\n{PARTS}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Three hosts with a cluster, created through the command line."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("lab")
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with running_hosts(3, folder / "hosts", names=["head", "n1", "n2"], shared=shared) as rack:
        operator = Operator(folder, rack)
        operator.clear_hosts()
        rack["n1"].run("sh", "-c", f"mkdir -p /etc/slurm; printf '{FOREIGN}' > /etc/slurm/gres.conf")
        operator.write(more=MORE, user=LOGIN)
        operator.up()
        yield operator


def pids(lab: Operator, *daemons: str) -> dict[str, str]:
    return {host.name: host.run("sh", "-c", f"pidof {' '.join(daemons)} || true") for host in lab.rack.hosts}


def test_jobs_run_on_all_nodes_as_a_user_of_the_file(lab):
    as_ada = ["runuser", "-u", "ada", "--"]
    assert sorted(lab.on_head(*as_ada, "srun", "-N2", "hostname").split()) == ["n1", "n2"]
    uids = {host.run("id", "-u", "ada") for host in lab.rack.hosts}
    assert len(uids) == 1
    ran = eventually(lambda: lab.on_head("sacct", "-aXno", "user,state").split())
    assert ran == ["ada", "COMPLETED"]


def test_job_has_a_scratch_folder_on_each_node(lab):
    script = "stat -c %U:%a $TMPDIR; echo $TMPDIR"
    job, *others = lab.on_head("runuser", "-u", "ada", "--", "srun", "-N1", "sh", "-c", script).split()
    assert job == "ada:700" and others[0].startswith("/scratch/job-")
    eventually(lambda: lab.rack["n1"].run("ls", "/scratch") + lab.rack["n2"].run("ls", "/scratch") == "")


def test_storage_is_checked_from_every_node(lab):
    told = json.loads(lab.dalsegno("storage", "check", "team", "--quick", "--json").out)
    assert told["ok"] and told["user"] == "ada"
    assert {"team", "disk"} == {each["name"] for each in json.loads(lab.dalsegno("storage", "ls", "--json").out)}


def test_container_runs_on_all_nodes(lab, tmp_path):
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    (root / "inside").touch()
    image = lab.folder / "shared/ada/tiny.sqsh"
    subprocess.run(["mksquashfs", root, image, "-all-root", "-quiet", "-no-progress"], check=True, timeout=60)
    lab.on_head("chown", "ada:", "/shared/ada/tiny.sqsh")  # the hosts have no loop devices for an image of root
    script = "busybox ls /inside && busybox hostname"
    asked = ["srun", "-N2", "--container-image=/shared/ada/tiny.sqsh", "/bin/sh", "-c", script]
    printed = lab.on_head("runuser", "-l", "ada", "-c", shlex.join(asked))
    assert sorted(printed.split()) == ["/inside", "/inside", "n1", "n2"]


def test_prometheus_reads_every_host(lab):
    assert "Prometheus is at" in lab.dalsegno("monitor", "up").err

    def states() -> dict[str, str]:
        told = json.loads(lab.dalsegno("monitor", "status", "--json", code=None).out or "{}")
        return {f"{each['job']} {each['host']}": each["state"] for each in told.get("targets", [])}

    hosts = {"dalsegno head", "node head", "node n1", "node n2"}
    eventually(lambda: states() == dict.fromkeys(hosts, "up"), timeout_s=60, every_s=4)
    users = lab.on_head("ps", "-o", "user:20=", "-C", "prometheus,prometheus-node-exporter").split()
    assert set(users) == {"prometheus"}
    assert "nothing to do" in lab.up().err
    lab.dalsegno("monitor", "down")
    assert "node-exporter" not in lab.dalsegno("status", "--json").out


def test_web_page_is_opened_through_the_head(lab):
    assert "http" in json.loads(lab.dalsegno("web", "--no-open", "--json").out)["url"]


ORDER = """
import sys
from pathlib import Path
sys.path[:0] = ["/opt/dalsegno/current"]
from dalsegno.targets.ssh.head import HeadTarget
HeadTarget(Path("/var/lib/dalsegno/clusters/lab")).reboot("n2")
"""


def test_head_reboots_a_node_over_ssh_and_can_do_nothing_else_there(lab):
    node = lab.rack["n2"]
    node.run("sh", "-c", "printf '#!/bin/sh\\ntouch /run/rebooted\\nkill $PPID\\n' > /usr/local/sbin/reboot")
    node.run("chmod", "755", "/usr/local/sbin/reboot")
    lab.on_head("/usr/bin/python3", "-c", ORDER)
    eventually(lambda: node.run("sh", "-c", "ls /run/rebooted 2>/dev/null || true"))
    key = "/var/lib/dalsegno/clusters/lab/secret/repair-key"
    argv = f"ssh -F none -i {key} -o BatchMode=yes -l root {node.address} cat /etc/shadow 2>&1 || true"
    assert "only reboot and reset are allowed" in lab.on_head("sh", "-c", argv)
    assert lab.on_head("stat", "-c", "%U %a", key) == "root 600\n"
    node.run("rm", "/usr/local/sbin/reboot")


def ssh_as(lab: Operator, user: str, key: Path, *command: str) -> Done:
    """Log in to the head with a key of the user, who is on this machine."""
    argv = ["ssh", "-F", "none", "-i", str(key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
    argv += ["-o", f"UserKnownHostsFile={lab.rack.known_hosts}", f"{user}@{lab.rack['head'].address}"]
    done = subprocess.run([*argv, shlex.join(command)], capture_output=True, text=True, timeout=60)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def bea(lab: Operator) -> Path:
    """The key of a user who was added by command."""
    key = lab.folder / "bea-key"
    make_key(key, comment="bea@desk")
    lab.dalsegno("group", "add", "vision")
    lab.dalsegno("user", "add", "bea", "--full-name", "Bea Lind", "--group", "vision", "--ssh-key", f"{key}.pub")
    return key


def test_new_user_logs_in_to_the_head_and_a_node_and_runs_jobs(lab, bea):
    assert ssh_as(lab, "bea", bea, "ssh", "-o", "BatchMode=yes", "n2", "hostname; pwd").out == "n2\n/shared/bea\n"
    assert sorted(ssh_as(lab, "bea", bea, "srun", "-N2", "hostname").out.split()) == ["n1", "n2"]
    assert len({host.run("id", "bea") for host in lab.rack.hosts}) == 1
    assert "(vision)" in lab.rack["n1"].run("id", "bea")
    listed = {user["name"]: user for user in json.loads(lab.dalsegno("user", "ls", "--json").out)}
    assert listed["bea"]["groups"] == ["vision"] and listed["bea"]["home"] == "/shared/bea"
    assert "nothing to do" in lab.up().err


def test_user_neither_reads_files_of_others_nor_cancels_their_jobs(lab, bea):
    lab.on_head("sh", "-c", "umask 022; echo secret > /shared/ada/notes; chown ada: /shared/ada/notes")
    denied = ssh_as(lab, "bea", bea, "cat", "/shared/ada/notes")
    assert denied.code == 1 and "Permission denied" in denied.err
    job = lab.on_head("runuser", "-u", "ada", "--", "sbatch", "--parsable", "-D", "/tmp", "--wrap", "sleep 60").strip()
    assert ssh_as(lab, "bea", bea, "scancel", job).code != 0
    assert lab.on_head("squeue", "-hj", job, "-o", "%u").strip() == "ada"
    lab.on_head("scancel", job)


def test_removed_user_cannot_log_in_and_the_home_is_kept(lab, bea):
    uid = lab.on_head("id", "-u", "bea")
    left = f"setpriv --reuid={uid.strip()} --regid={uid.strip()} --clear-groups sleep 300 >/dev/null 2>&1 & :"
    lab.on_head("sh", "-c", left)
    refused = lab.dalsegno("user", "rm", "bea", "--remove-home", code=2)
    assert "/shared/bea is not on this machine" in refused.err
    assert "kept /shared/bea" in lab.dalsegno("user", "rm", "bea").err
    assert ssh_as(lab, "bea", bea, "true").code == 255
    assert lab.rack["n1"].run("sh", "-c", "getent passwd bea vision || true") == ""
    assert lab.on_head("stat", "-c", "%u", "/shared/bea") == uid
    assert lab.on_head("sh", "-c", f"pgrep -U {uid.strip()} || true") == ""


def test_status_of_the_operator_shows_all_daemons(lab):
    status = json.loads(lab.dalsegno("status", "--json").out)
    assert status["phase"] == "up", status["problems"]
    running = {(each["host"], each["name"]) for each in status["daemons"] if each["running"]}
    assert {("head", "slurmctld"), ("head", "slurmdbd"), ("n1", "slurmd"), ("n2", "node-agent")} <= running
    assert {node["name"]: node["state"] for node in status["nodes"]} == {"n1": "idle", "n2": "idle"}


def test_rest_api_answers_on_the_head(lab):
    socket = "/var/lib/dalsegno/clusters/lab/run/rest/slurmrestd.sock"
    told = lab.on_head("curl", "--silent", "--unix-socket", socket, "http://localhost/openapi/v3")
    assert any(path.startswith("/slurm/") for path in json.loads(told)["paths"])


def test_second_up_changes_nothing(lab):
    before = pids(lab, "slurmctld", "slurmd", "munged")
    assert "nothing to do" in lab.up().err
    assert pids(lab, "slurmctld", "slurmd", "munged") == before


def test_other_commands_run_on_the_head(lab):
    def phases() -> dict[str, str]:
        return {node["node"]: node["phase"] for node in json.loads(lab.dalsegno("nodes", "--json").out)}

    # On a busy machine an agent falls silent at times. Its node is suspected until the agent has been steady.
    eventually(lambda: phases() == {"n1": "in service", "n2": "in service"}, timeout_s=60, every_s=1)
    assert lab.dalsegno("run", "--no-such-option", code=None).code == 2
    assert lab.dalsegno("shell", "--", "hostname").out == "head\n"
    assert lab.dalsegno("ssh", "n2", "--", "hostname").out == "n2\n"
    assert lab.dalsegno("ssh", "n2", "--", "sh", "-c", "exit 7", code=None).code == 7


ASK_AGENTS = """
import json, sys
from pathlib import Path
sys.path[:0] = ["/opt/dalsegno/current"]
from dalsegno.recovery.client import ask
print(json.dumps(ask(Path("/var/lib/dalsegno/clusters/lab/run/controller.sock"), {"agents": True}, 5.0)))
"""


def test_node_agents_report_their_checks_to_the_controller(lab):
    def checks() -> dict[str, int]:
        answer = json.loads(lab.on_head("/usr/bin/python3", "-c", ASK_AGENTS))
        return {agent["node"]: agent["checks"] for agent in answer["agents"]}

    found = eventually(lambda: told if all((told := checks()).values()) else {})
    assert set(found) == {"n1", "n2"}


SCRIPT = "#!/bin/sh\nwhile :; do echo rank $RANK generation $DALSEGNO_GENERATION; sleep 0.1; done\n"


def test_run_continues_after_a_worker_was_killed(lab):
    lab.on_head("sh", "-c", "cat > /shared/ada/train.sh; chmod 755 /shared/ada/train.sh", stdin=SCRIPT)
    as_ada = ["runuser", "-l", "ada", "-c"]
    run = lab.on_head(*as_ada, "dalsegno run --no-preload --detach -N 2 ./train.sh").strip()
    assert eventually(lambda: "rank 1 generation 1" in lab.on_head(*as_ada, f"dalsegno logs {run}"), every_s=0.5)
    lab.rack["n2"].run("pkill", "-9", "-u", "ada", "-f", "train.sh")
    assert eventually(lambda: "rank 0 generation 2" in lab.on_head(*as_ada, f"dalsegno logs {run}"), every_s=0.5)
    lab.on_head(*as_ada, f"dalsegno cancel {run}")
    assert eventually(lambda: lab.on_head("squeue", "-h") == "", every_s=0.5)


def test_changed_file_applies_only_the_difference(lab):
    before = pids(lab, "slurmctld", "slurmd", "munged")
    text = lab.file.read_text()
    lab.file.write_text(text.replace("nodes: 'n[1-2]'", "nodes: 'n[1-2]', time_limit: 2h"))
    shown = lab.dalsegno("plan", str(lab.file)).out
    assert "changes Slurm's settings in place" in shown
    assert "restarts" not in shown
    lab.up()
    assert pids(lab, "slurmctld", "slurmd", "munged") == before
    assert "2:00:00" in lab.on_head("sinfo", "-ho", "%l")


def test_unreachable_host_is_reported_and_repaired_by_the_next_up(lab):
    lab.rack.kill_sshd("n2")
    text = lab.file.read_text()
    lab.file.write_text(text.replace("time_limit: 2h", "time_limit: 3h"))
    done = lab.up(code=1)
    assert "n2" in done.err
    assert "All other hosts were set up" in done.err
    assert "3:00:00" in lab.on_head("sinfo", "-ho", "%l")
    lab.rack.start_sshd("n2")
    assert "nothing to do" not in lab.up().err
    assert "3:00:00" in lab.rack["n2"].run("sh", "-c", "grep -o MaxTime=[0-9]* /etc/slurm/slurm.conf; sinfo -ho %l")
    assert "nothing to do" in lab.up().err


def test_killed_daemon_is_started_again(lab):
    lab.rack["n1"].run("sh", "-c", "kill -9 $(pidof slurmd)")
    assert eventually(lambda: "starts slurmd" in lab.dalsegno("plan", str(lab.file)).out)
    lab.up()
    assert lab.on_head("srun", "-w", "n1", "hostname") == "n1\n"


def test_node_that_leaves_the_file_is_cleaned(lab):
    lab.write(nodes="n1", more=MORE, user=LOGIN)
    lab.up()
    assert lab.on_head("sinfo", "-hNo", "%N").split() == ["n1"]
    assert lab.rack["n2"].run("sh", "-c", "ls /etc/slurm; pidof slurmd munged || true") == ""


def test_connection_that_is_cut_half_way_is_continued_by_the_next_up(lab):
    lab.write(more=MORE, user=LOGIN)
    with lab.start_up() as up:
        assert up.stderr
        for line in up.stderr:
            if "n2: installing Dal Segno" in line:
                lab.rack.kill_sshd("n2")
        assert up.wait() == 1
    assert lab.on_head("srun", "-w", "n1", "hostname") == "n1\n"
    lab.rack.start_sshd("n2")
    lab.up()
    assert sorted(lab.on_head("srun", "-N2", "hostname").split()) == ["n1", "n2"]


def test_upgrade_updates_host_by_host_and_runs_continue(lab, tmp_path):
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    with (tmp_path / "src/dalsegno/__init__.py").open("a") as file:
        file.write("# a later version\n")
    newer = replace(lab, source=tmp_path / "src")
    as_ada = ["runuser", "-l", "ada", "-c"]
    run = lab.on_head(*as_ada, "dalsegno run --no-preload --detach -N 2 ./train.sh").strip()
    assert eventually(lambda: "rank 1 generation 1" in lab.on_head(*as_ada, f"dalsegno logs {run}"), every_s=0.5)
    refused = newer.up(code=1)
    assert "another version of Dal Segno is on 3 hosts (head, n1, n2)" in refused.err and "--upgrade" in refused.err
    before = pids(lab, "slurmctld", "slurmd")
    done = newer.dalsegno("up", "--upgrade", str(lab.file))
    steps = [line.partition(":")[0].split()[-1] for line in done.err.splitlines() if "installing Dal Segno" in line]
    assert steps == ["n1", "n2", "head"]
    assert pids(lab, "slurmctld", "slurmd") == before
    lines = lab.on_head(*as_ada, f"dalsegno logs {run}").count("\n")
    assert eventually(lambda: lab.on_head(*as_ada, f"dalsegno logs {run}").count("\n") > lines + 20, every_s=0.5)
    assert "generation 2" not in lab.on_head(*as_ada, f"dalsegno logs {run}")
    lab.on_head(*as_ada, f"dalsegno cancel {run}")
    assert eventually(lambda: lab.on_head("squeue", "-h") == "", every_s=0.5)
    assert "nothing to do" in newer.up().err


def test_down_restores_every_host(lab):
    assert lab.dalsegno("down", "--yes").err.rstrip().endswith("nothing of it is left")
    assert lab.rack["n1"].run("cat", "/etc/slurm/gres.conf") == FOREIGN
    for host in lab.rack.hosts:
        left = "ls -d /opt/* /var/lib/dalsegno/clusters/* 2>/dev/null; pidof slurmctld slurmd munged mariadbd || true"
        assert host.run("sh", "-c", left) == ""
        assert "Dal Segno" not in host.run("cat", "/etc/hosts")
        assert host.run("id", "-u", "ada") and host.run("stat", "-c", "%U", "/shared/ada") == "ada\n"
    assert not Path(lab.state).exists()
