"""A whole cluster on virtual hosts that are reached over ssh: created, used, changed, repaired and removed.

The tests share three hosts and run in order. The last one removes the cluster.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, build_opener, urlopen

import pytest

from tests.containers.images import Layout, folder, member
from tests.containers.registries import push, registry
from tests.ssh.cluster_operator import SOURCE, Done, Operator
from tests.ssh.hosts import make_key, reason_to_skip, running_hosts
from tests.ssh.test_ssh_refusals import changed_keys
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
LOGIN = "admin"  # this user may use sudo without a password
FOREIGN = "# written by hand\n"
STORAGE = "[{name: team, mount: /shared, type: existing, home: true}, {name: disk, mount: /scratch, type: scratch}]"
IMAGES = "/shared/images"
CONTAINERS = f"containers: {{enabled: true, folder: {IMAGES}}}\n"
SLURM = "slurm: {rest: true, enforce: [associations, limits, qos], qos: [{name: high}]}\naccounts: [{name: lab}]\n"
PARTS = f"storage: {STORAGE}\n{CONTAINERS}{SLURM}monitoring: {{interval: 5s}}\n"
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
    result = json.loads(lab.dalsegno("storage", "check", "team", "--quick", "--json").out)
    assert result["ok"] and result["user"] == "ada"
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
        result = json.loads(lab.dalsegno("monitor", "status", "--json", code=None).out or "{}")
        return {f"{each['job']} {each['host']}": each["state"] for each in result.get("targets", [])}

    hosts = {"dalsegno head", "node head", "node n1", "node n2"}
    eventually(lambda: states() == dict.fromkeys(hosts, "up"), timeout_s=60, every_s=4)
    users = lab.on_head("ps", "-o", "user:20=", "-C", "prometheus,prometheus-node-exporter").split()
    assert set(users) == {"prometheus"}
    assert "nothing to do" in lab.up().err
    lab.dalsegno("monitor", "down")
    assert "node-exporter" not in lab.dalsegno("status", "--json").out


def test_web_page_is_fetched_from_the_address_that_the_head_prints(lab):
    url = json.loads(lab.dalsegno("web", "--no-open", "--json").out)["url"]
    browser = build_opener(HTTPCookieProcessor())
    browser.open(url, timeout=60)
    page = browser.open(url.partition("/login")[0], timeout=60).read().decode()
    assert all(f"/node/{name}" in page for name in ("n1", "n2"))
    with pytest.raises(HTTPError, match="401"):
        urlopen(url.partition("/login")[0], timeout=60)


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


def ssh_as(lab: Operator, user: str, key: Path, *command: str, host: str = "head") -> Done:
    """Run a command on a host as the user, who logs in from this machine with the key."""
    argv = ["ssh", "-F", "none", "-i", str(key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
    argv += ["-o", f"UserKnownHostsFile={lab.rack.known_hosts}", f"{user}@{lab.rack[host].address}"]
    done = subprocess.run([*argv, shlex.join(command)], capture_output=True, text=True, timeout=60)
    return Done(done.returncode, done.stdout, done.stderr)


def ranks_of_a_run(lab: Operator, user: str, key: Path, nodes: int, host: str = "head") -> list[str]:
    """Let a user who has logged in run a script on nodes; return the lines that its ranks print."""
    script = "printf '#!/bin/sh\\necho rank $RANK of $WORLD_SIZE\\n' > hello.sh && chmod 755 hello.sh"
    words = f"dalsegno run --no-preload -N {nodes} ./hello.sh"
    done = ssh_as(lab, user, key, "sh", "-c", f"{script} && {words}", host=host)
    assert done.code == 0 and "rank" in done.out, f"{done.out}{done.err}"
    return sorted(re.findall(r"rank \d of \d", done.out))


@pytest.fixture(scope="module")
def bea(lab: Operator) -> Path:
    """The key of a user who was added by command."""
    key = lab.folder / "bea-key"
    make_key(key, comment="bea@desk")
    lab.dalsegno("group", "add", "vision")
    words = ["--full-name", "Bea Lind", "--group", "vision", "--ssh-key", f"{key}.pub"]
    lab.dalsegno("user", "add", "bea", *words, "--account", "lab", "--qos", "high", "--max-gpus", "2")
    return key


def associations(lab: Operator, user: str) -> list[str]:
    """Return the accounts of a user in Slurm's database, with their limits and QOS."""
    return lab.on_head("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=Account,GrpTRES,QOS").split()


def test_new_user_logs_in_to_the_head_and_a_node_and_runs_jobs(lab, bea):
    assert ssh_as(lab, "bea", bea, "ssh", "-o", "BatchMode=yes", "n2", "hostname; pwd").out == "n2\n/shared/bea\n"
    assert associations(lab, "bea") == ["lab|gres/gpu=2|high"]
    assert sorted(ssh_as(lab, "bea", bea, "srun", "-N2", "hostname").out.split()) == ["n1", "n2"]
    assert ranks_of_a_run(lab, "bea", bea, 2) == ["rank 0 of 2", "rank 1 of 2"]
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


def test_home_is_deleted_where_it_is_served_and_nothing_that_it_links_to(lab):
    lab.dalsegno("user", "add", "cem")
    lab.on_head("runuser", "-u", "cem", "--", "ln", "-s", "/shared/ada", "/shared/cem/to-ada")
    lab.on_head("sh", "-c", "touch /shared/ada/kept; chown root: /shared/cem")
    refused = lab.dalsegno("user", "rm", "cem", "--remove-home", code=1)
    assert "head: /shared/cem belongs to uid 0" in refused.err
    lab.on_head("chown", "cem:", "/shared/cem")
    assert "deleted /shared/cem" in lab.dalsegno("user", "rm", "cem", "--remove-home").err
    assert lab.on_head("ls", "/shared/ada/kept", "/shared").split() == ["/shared/ada/kept", "/shared:", "ada", "bea"]


def test_removed_user_cannot_log_in_and_the_home_is_kept(lab, bea):
    uid = lab.on_head("id", "-u", "bea")
    left = f"setpriv --reuid={uid.strip()} --regid={uid.strip()} --clear-groups sleep 300 >/dev/null 2>&1 & :"
    lab.on_head("sh", "-c", left)
    assert "kept /shared/bea" in lab.dalsegno("user", "rm", "bea").err
    assert associations(lab, "bea") == [] and associations(lab, "ada"), "only of the removed user"
    assert ssh_as(lab, "bea", bea, "true").code == 255
    assert lab.rack["n1"].run("sh", "-c", "getent passwd bea vision || true") == ""
    assert lab.on_head("stat", "-c", "%u", "/shared/bea") == uid
    assert lab.on_head("sh", "-c", f"pgrep -U {uid.strip()} || true") == ""


def test_status_of_the_operator_shows_all_daemons(lab):
    status = json.loads(lab.dalsegno("status", "--json").out)
    assert status["phase"] == "up", status["problems"]
    assert status["verdict"]["code"], "the head's own"
    running = {(each["host"], each["name"]) for each in status["daemons"] if each["running"]}
    assert {("head", "slurmctld"), ("head", "slurmdbd"), ("n1", "slurmd"), ("n2", "node-agent")} <= running
    assert {node["name"]: node["state"] for node in status["nodes"]} == {"n1": "idle", "n2": "idle"}


def test_user_on_the_head_measures_storage_on_all_nodes(lab):
    words = "dalsegno bench storage /shared/ada --nodes 2 --size 1M --seconds 0.2 --json"
    found = json.loads(lab.on_head("runuser", "-l", "ada", "-c", words))
    assert {each["host"] for each in found} >= {"n1", "n2"}
    assert all(each["write_mb_per_s"] > 0 and not each["error"] for each in found)


def test_rest_api_answers_on_the_head(lab):
    socket = "/var/lib/dalsegno/clusters/lab/run/rest/slurmrestd.sock"
    result = lab.on_head("curl", "--silent", "--unix-socket", socket, "http://localhost/openapi/v3")
    assert any(path.startswith("/slurm/") for path in json.loads(result)["paths"])


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
    assert " controller: " in lab.dalsegno("logs", "--daemon", "controller").out
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

    found = eventually(lambda: result if all((result := checks()).values()) else {})
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


def test_images_of_the_file_are_imported_on_the_head_and_used_by_all_hosts(lab, tmp_path):
    """Of an existing and a missing image, the first is imported and the second reported; the cluster is up."""
    layout = Layout(tmp_path / "oci")
    busybox = Path(shutil.which("busybox") or "").read_bytes()
    layout.image("v1", [([folder("bin"), member("bin/sh", busybox, mode=0o755)], "gzip")], config={"Env": ["FROM=v1"]})
    text, on_head = lab.file.read_text(), ("nsenter", f"--net=/proc/{lab.rack['head'].pid}/ns/net")
    with registry(tmp_path, prefix=on_head) as address:
        push(layout.path, "v1", address, "team/app:v1", prefix=on_head)
        there, missing = f"{address}#team/app:v1", f"{address}#team/none:v1"
        lab.file.write_text(text.replace(f"folder: {IMAGES}", f"folder: {IMAGES}, images: ['{missing}', '{there}']"))
        done = lab.up(code=1)
    assert "lab is up, but images were not imported" in done.err and f"{missing}: " in done.err
    as_ada = ["runuser", "-l", "ada", "-c"]
    assert "team/app:v1" in lab.on_head(*as_ada, "dalsegno image ls")
    # All hosts find the file of root. These hosts have no loop devices to mount it, so a copy is run instead.
    found = lab.on_head(*as_ada, f"srun -N2 --container-image={there} true 2>&1 || true")
    assert all(f"{node}: container[125]: /dev/loop-control" in found for node in ("n1", "n2"))
    lab.on_head(*as_ada, f"cp {IMAGES}/images/*.sqsh app.sqsh")
    assert lab.on_head(*as_ada, "srun -N2 --container-image=./app.sqsh sh -c 'echo $FROM'") == "v1\nv1\n"
    lab.file.write_text(text)  # the next `up` has other things to do, too


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


def test_host_with_a_changed_key_is_left_out_until_the_operator_accepts_it(lab):
    known, text = lab.rack.known_hosts.read_text(), lab.file.read_text()
    changed = changed_keys(lab, "n2")
    lab.rack.known_hosts.write_text(changed)
    lab.file.write_text(text.replace("time_limit: 3h", "time_limit: 4h"))
    done = lab.up(code=1)
    assert "n2: " in done.err and "ssh-keygen" in done.err and "All other hosts were set up" in done.err
    assert lab.rack.known_hosts.read_text() == changed, "the key is not accepted by itself"
    assert "4:00:00" in lab.on_head("sinfo", "-ho", "%l")
    assert any("n2" in each for each in json.loads(lab.dalsegno("status", "--json", code=None).out)["problems"])
    lab.rack.known_hosts.write_text(known)
    lab.file.write_text(text)
    assert "nothing to do" not in lab.up().err


def test_killed_daemon_is_started_again(lab):
    lab.rack["n1"].run("sh", "-c", "kill -9 $(pidof slurmd)")
    assert eventually(lambda: "starts slurmd" in lab.dalsegno("plan", str(lab.file)).out)
    lab.up()
    assert lab.on_head("srun", "-w", "n1", "hostname") == "n1\n"


HEAL = "health: {reboots: {per_fault: 0}, checks: {pair-collective: off, load-product: off, load-memory: off}}"

HANG_S = 180.0  # a validation on a busy machine takes more than a minute

# A machine that was replaced has another boot id. Its agent is restarted, and reads it.
NEW_MACHINE = """
cat /proc/sys/kernel/random/uuid > /run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
pkill -f '[p]rograms.py node-agent'
"""


def test_spare_replaces_a_node_and_the_event_names_the_machine_to_replace(lab):
    text = lab.file.read_text()
    lab.file.write_text(text.replace("'n[1-2]'", "n1, spares: n2").replace("health: {mode: observe}", HEAL))
    lab.up()

    def phases() -> dict[str, str]:
        """Return the phases of the nodes. On a busy machine, a node in service is also suspected at times."""
        result = {node["node"]: node["phase"] for node in json.loads(lab.dalsegno("nodes", "--json").out)}
        return {name: "in service" if phase == "suspected" else phase for name, phase in result.items()}

    eventually(lambda: phases() == {"n1": "in service", "n2": "spare"}, timeout_s=HANG_S, every_s=1)
    lab.rack["n1"].run("sh", "-c", "kill -9 $(pidof slurmd)")
    machine = f"a person must replace the machine of n1 at {lab.rack['n1'].address}"
    # The phases alone do not show the promotion: a spare that is suspected looks as if it were in service.
    promoted = f"in service in place of n1: {machine}"
    eventually(lambda: promoted in lab.dalsegno("events", "--node", "n2").out, timeout_s=HANG_S, every_s=1)
    eventually(lambda: phases() == {"n1": "needs admin", "n2": "in service"}, timeout_s=HANG_S, every_s=1)
    assert machine in lab.dalsegno("why", "n1").out
    assert lab.on_head("srun", "-N1", "hostname") == "n2\n"
    lab.up()
    lab.rack["n1"].run("sh", "-c", NEW_MACHINE)
    eventually(lambda: phases() == {"n1": "in service", "n2": "spare"}, timeout_s=HANG_S, every_s=1)


ADOPT = Path("/lib/security/pam_slurm_adopt.so")


def test_node_that_leaves_the_file_is_cleaned(lab):
    lab.write(nodes="n1", more=MORE, user=LOGIN)
    if ADOPT.exists():  # for the next test
        lab.file.write_text(lab.file.read_text().replace("ssh:\n", "ssh:\n  logins_need_job: true\n"))
    known = lab.rack["n2"].run("sha256sum", "/etc/munge/munge.key")
    assert "replaces the key of munge" in lab.up().err
    assert known not in {host.run("sha256sum", "/etc/munge/munge.key") for host in lab.rack.hosts}
    assert lab.on_head("sinfo", "-hNo", "%N").split() == ["n1"]
    assert lab.rack["n2"].run("sh", "-c", "ls /etc/slurm; pidof slurmd munged || true") == ""


def test_user_logs_in_to_a_node_only_with_a_job_there_and_the_session_is_part_of_the_job(lab):
    if not ADOPT.exists():
        pytest.skip("needs the package libpam-slurm-adopt")
    as_ada, ssh = ["runuser", "-l", "ada", "-c"], "ssh -o BatchMode=yes n1"
    assert "you have no active jobs on this node" in lab.on_head(*as_ada, f"{ssh} hostname 2>&1 || true")
    job = lab.on_head(*as_ada, "sbatch --parsable -D /tmp -w n1 --wrap 'sleep 300'").strip()
    # slurmctld calls the job RUNNING before slurmd has created its step `extern`, which adopts the session
    eventually(lambda: f"/job_{job}/step_extern" in lab.on_head(*as_ada, f"{ssh} cat /proc/self/cgroup 2>&1 || true"))
    lab.on_head(*as_ada, f"{ssh} 'sleep 300 >/dev/null 2>&1 &'")
    lab.on_head("scancel", job)
    eventually(lambda: lab.rack["n1"].run("sh", "-c", "pgrep -u ada -x sleep || true") == "")
    assert lab.dalsegno("ssh", "n1", "--", "hostname").out == "n1\n", "the operator gets in without a job"


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
    assert "slurm_adopt" not in lab.rack["n1"].run("cat", "/etc/pam.d/sshd"), "the file no longer asks for it"


def test_plan_names_the_jobs_that_the_removal_of_a_node_waits_for(lab):
    job = lab.on_head("sbatch", "--parsable", "-w", "n2", "-D", "/tmp", "--wrap", "sleep 300").strip()
    eventually(lambda: lab.on_head("squeue", "-hj", job, "-o", "%T").strip() == "RUNNING")
    text = lab.file.read_text()
    lab.write(nodes="n1", more=MORE, user=LOGIN)
    shown = lab.dalsegno("plan", str(lab.file)).out
    assert "drains and removes 1 host (n2)" in shown and f"waits for 1 job ({job}) to end first" in shown
    lab.file.write_text(text)
    lab.on_head("scancel", job)


def updated(done: Done) -> list[str]:
    """Return the hosts that `up` updated, in this order."""
    return [line.partition(":")[0].split()[-1] for line in done.err.splitlines() if "installing Dal Segno" in line]


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
    lab.rack["n1"].run("mount", "--bind", "-o", "ro", "/opt/dalsegno", "/opt/dalsegno")
    stopped = newer.dalsegno("up", "--upgrade", str(lab.file), code=1)
    assert updated(stopped)[-1] == "n2" and "Not changed because of this: head" in stopped.err
    lab.rack["n1"].run("umount", "/opt/dalsegno")
    assert "another version of Dal Segno is on 1 host (head)" in newer.up(code=1).err
    assert updated(newer.dalsegno("up", "--upgrade", str(lab.file))) == ["n1", "head"]
    assert pids(lab, "slurmctld", "slurmd") == before
    lines = lab.on_head(*as_ada, f"dalsegno logs {run}").count("\n")
    assert eventually(lambda: lab.on_head(*as_ada, f"dalsegno logs {run}").count("\n") > lines + 20, every_s=0.5)
    assert "generation 2" not in lab.on_head(*as_ada, f"dalsegno logs {run}")
    lab.on_head(*as_ada, f"dalsegno cancel {run}")
    assert eventually(lambda: lab.on_head("squeue", "-h") == "", every_s=0.5)
    assert "nothing to do" in newer.up().err
    versions = lab.on_head("sh", "-c", "ls -d /opt/dalsegno/*/ | wc -l")
    assert versions == "3\n", "the present code, the code before it, and the link `current`"


def test_down_restores_every_host(lab):
    assert lab.dalsegno("down", "--yes").err.rstrip().endswith("nothing of it is left")
    assert lab.rack["n1"].run("cat", "/etc/slurm/gres.conf") == FOREIGN
    for host in lab.rack.hosts:
        left = "ls -d /opt/* /var/lib/dalsegno/clusters/* 2>/dev/null; pidof slurmctld slurmd munged mariadbd || true"
        assert host.run("sh", "-c", left) == ""
        assert "Dal Segno" not in host.run("cat", "/etc/hosts")
        assert host.run("id", "-u", "ada") and host.run("stat", "-c", "%U", "/shared/ada") == "ada\n"
    assert not Path(lab.state).exists()
