"""Tests that Slurm applies the partitions, QOS, users, reservations and controllers of the cluster file."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dalsegno.system.children import Process, descendants, end, start_ticks
from dalsegno.system.hosts import host_process
from tests.cluster.conftest import NOBODY, Answer, Cli, at_home, have_job_saved, taken_down
from tests.cluster.programs import programs
from tests.waiting import eventually

POLICY = """
name: one
target: local
login: {count: 1}
partitions:
  - {name: work, nodes: 2, spares: 1, cpus: 4, memory: 8G, gpus: 2, gpu_type: h100, features: [nvlink]}
  - {name: cheap, nodes: 1, cpus: 4, memory: 8G, features: [ib], weight: 10}
  - {name: class, nodes: 1, cpus: 4, memory: 8G, weight: 50}
  - {name: every, nodes_from: [work, cheap, class], default: true}
  - {name: short, nodes_from: [work, cheap], time_limit: 10m, default_time: 3m, max_nodes: 1}
  - {name: vision, nodes_from: [work], allow_accounts: [vision]}
  - {name: alone, nodes_from: [work], oversubscribe: exclusive}
  - {name: keen-only, nodes_from: [work], allow_qos: [keen]}
health: {mode: observe}  # what is broken here stays so
slurm:
  rest: true
  enforce: [associations, limits, qos]
  topology: {nodes_per_switch: 2}
  qos:
    - {name: low, priority: 10, preempt_mode: requeue}
    - {name: high, priority: 100, preempts: [low]}
    - {name: calm, priority: 20}
    - {name: keen, priority: 60}
    - {name: small, max_tres_per_user: {gres/gpu: 1}}
  extra: {KillWait: 3, SchedulerParameters: "batch_sched_delay=0,sched_interval=1,bf_interval=1", MaxArraySize: 77}
accounts:
  - {name: vision}
  - {name: speech}
users:
  - {name: ada, accounts: [vision]}
  - {name: bob, accounts: [speech]}
reservations:
  - {name: course, nodes: class-1, users: [ada], duration: 1h}
"""

TIERS = """
name: two
target: local
partitions:
  - {name: scavenge, nodes: 1, cpus: 4, memory: 8G, priority_tier: 1, preempt_mode: requeue}
  - {name: urgent, nodes_from: scavenge, priority_tier: 10, preempt_mode: off}
slurm: {accounting: false, preemption: {by: partition}, extra: {KillWait: 3}}
"""

PAIR = """
name: pair
target: local
partitions:
  - {name: train, nodes: 2, cpus: 2, memory: 2G}
slurm: {accounting: false, backup_controller: true}
"""


@dataclass(frozen=True)
class Site:
    """A cluster and the commands that users run on it."""

    cli: Cli
    name: str

    @property
    def folder(self) -> Path:
        return self.cli.home / "clusters" / self.name

    def run(self, *command: str, user: str = "") -> Answer:
        return self.cli.run("shell", "-M", self.name, *(["-u", user] if user else []), "--", *command, timeout_s=120)

    def ok(self, *command: str, user: str = "") -> str:
        answer = self.run(*command, user=user)
        assert answer.code == 0, f"{command} -> {answer.code}\n{answer.out}\n{answer.err}"
        return answer.out.strip()

    def ask(self, *command: str) -> str:
        """Run a Slurm command directly, as after `eval "$(dalsegno env)"`, which is fast enough for polling."""
        env = {**os.environ, "SLURM_CONF": str(self.folder / "etc/slurm.conf")}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout.strip()

    def submit(self, *args: str, user: str = "", script: str = "sleep 600") -> str:
        return self.ok("sbatch", "--parsable", "-o", "/dev/null", *args, "--wrap", script, user=user)

    def job(self, job: str, field: str) -> str:
        """Return one of squeue's fields: %T state, %r reason, %N nodes …"""
        return self.ask("squeue", "-h", "-j", job, "-o", field)

    def comes_to(self, job: str, state: str) -> None:
        eventually(lambda: self.job(job, "%T") == state, timeout_s=120)

    def setting(self, name: str) -> str:
        lines = self.ask("scontrol", "show", "config").splitlines()
        return next(line.partition("=")[2].strip() for line in lines if line.partition("=")[0].strip() == name)

    def clear(self) -> None:
        """Cancel all jobs, so that every test starts with an empty queue."""
        jobs = self.ask("squeue", "-h", "-o", "%A").split()
        if jobs:
            self.run("scancel", *jobs)  # a job may have ended already
            eventually(lambda: self.ask("squeue", "-h") == "")


@pytest.fixture(scope="module")
def home(cache: Path) -> Iterator[Cli]:
    """Return a home for all clusters of this file."""
    with taken_down(at_home(cache)) as cli:
        yield cli


@pytest.fixture(scope="module")
def policy(home: Cli) -> Site:
    home.ok("up", home.file(POLICY, "one.yaml"))
    return Site(home, "one")


@pytest.fixture
def site(policy: Site) -> Iterator[Site]:
    yield policy
    policy.clear()


@pytest.fixture(scope="module")
def tiers(home: Cli) -> Site:
    home.ok("up", home.file(TIERS, "two.yaml"))
    return Site(home, "two")


# Partitions


def test_job_without_partition_uses_the_default(site: Site):
    assert site.ok("srun", "sh", "-c", "echo $SLURM_JOB_PARTITION", user="ada") == "every"
    assert "every*" in site.ask("sinfo", "-h", "-o", "%P").split()


def test_a_job_over_the_partitions_time_limit_is_refused(site: Site):
    answer = site.run("sbatch", "-p", "short", "-t", "11", "--wrap", "true", user="ada")
    assert answer.code == 1 and "time limit" in answer.err
    job = site.submit("-p", "short", "-t", "10", user="ada")
    assert site.job(job, "%l") == "10:00"
    assert site.job(site.submit("-p", "short", user="ada"), "%l") == "3:00"  # the partition's default_time


def test_a_job_over_the_partitions_node_limit_is_refused(site: Site):
    answer = site.run("sbatch", "-p", "short", "-N2", "--wrap", "true", user="ada")
    assert answer.code == 1 and "Node count specification invalid" in answer.err
    assert len(site.ok("srun", "-p", "every", "-N2", "hostname", user="ada").split()) == 2


def test_only_allowed_accounts_may_use_a_partition(site: Site):
    assert site.ok("srun", "-p", "vision", "hostname", user="ada").startswith("work-")
    for claim in ((), ("-A", "vision")):  # bob's own account, and an account that he is not in
        answer = site.run("srun", "-p", "vision", *claim, "hostname", user="bob")
        assert answer.code == 1 and "Invalid account" in answer.err


def test_only_allowed_qos_may_use_a_partition(site: Site):
    assert site.ok("srun", "-p", "keen-only", "-q", "keen", "hostname", user="ada").startswith("work-")
    answer = site.run("srun", "-p", "keen-only", "-q", "calm", "hostname", user="ada")
    assert answer.code == 1 and "Invalid qos" in answer.err


def test_partitions_with_shared_nodes_share_their_resources(site: Site):
    job = site.submit("-p", "work", "-w", "work-1", "--exclusive", user="ada")
    site.comes_to(job, "RUNNING")
    assert site.run("srun", "-p", "short", "-w", "work-1", "--immediate=1", "true", user="bob").code == 1
    assert site.ok("srun", "-p", "short", "-w", "work-2", "hostname", user="bob") == "work-2"


def test_nodes_are_chosen_by_feature(site: Site):
    assert site.ok("srun", "-C", "ib", "hostname", user="ada") == "cheap-1"
    assert site.ok("srun", "-C", "nvlink", "hostname", user="ada") in ("work-1", "work-2")
    answer = site.run("srun", "-C", "nothing", "hostname", user="ada")
    assert answer.code == 1 and "Invalid feature specification" in answer.err


def test_node_with_lowest_weight_is_allocated_first(site: Site):
    """Without weights cheap-1 would be allocated, because it is alone on its switch."""
    assert site.ok("srun", "hostname", user="ada") == "work-1"


def test_an_exclusive_partition_gives_whole_nodes(site: Site):
    job = site.submit("-p", "alone", "-n1", "-w", "work-1", user="ada")
    site.comes_to(job, "RUNNING")
    assert site.job(job, "%C") == "4"
    assert site.run("srun", "-p", "work", "-w", "work-1", "--immediate=1", "true", user="bob").code == 1


def test_spares_are_drained_with_our_reason_and_get_no_jobs(site: Site):
    assert site.ask("sinfo", "-h", "-p", "work", "-t", "drain", "-o", "%n %T %E") == "work-3 drained dalsegno:spare"
    assert site.run("srun", "-p", "work", "-w", "work-3", "--immediate=1", "true", user="ada").code == 1
    assert site.run("srun", "-p", "work", "-N3", "--immediate=1", "true", user="ada").code == 1
    site.ask("scontrol", "reconfigure")
    assert site.ask("sinfo", "-h", "-n", "work-3", "-p", "work", "-o", "%T") == "drained"
    spare = next(node for node in site.cli.status("one")["nodes"] if node["name"] == "work-3")  # type: ignore[attr-defined]
    assert spare["spare"] is True and spare["reason"].startswith("dalsegno:spare")


# Priority and preemption


def test_job_of_higher_qos_starts_first(site: Site):
    only = ("-p", "cheap", "--exclusive")
    site.comes_to(blocker := site.submit(*only, user="ada"), "RUNNING")
    calm = site.submit(*only, "-q", "calm", user="ada")
    keen = site.submit(*only, "-q", "keen", user="bob")
    site.ask("scancel", blocker)
    site.comes_to(keen, "RUNNING")
    assert site.job(calm, "%T %r") in ("PENDING Priority", "PENDING Resources")


def test_preempted_job_is_requeued_and_runs_later(site: Site):
    mark = site.folder / "home/ada/starts"
    both = ("-p", "work", "-N2", "--exclusive")
    low = site.submit(*both, "-q", "low", user="ada", script=f"echo $SLURM_RESTART_COUNT >> {mark}; sleep 600")
    eventually(lambda: mark.exists() and mark.read_text() == "\n")
    normal = site.submit("-p", "work", "-N1", "--exclusive", user="bob")
    high = site.submit(*both, "-q", "high", user="bob")
    site.comes_to(high, "RUNNING")
    assert site.job(normal, "%T") == "PENDING"  # only the preempting QOS preempted
    site.comes_to(low, "PENDING")
    site.ask("scancel", normal, high)
    eventually(lambda: started_now(site, low))
    eventually(lambda: mark.read_text() == "\n1\n")


def started_now(site: Site, job: str) -> bool:
    """Return whether a requeued job runs. If it is pending, move its start time to now.

    Slurm delays the job until its old credential expires. It may set that start time after it shows the job as pending,
    so call this repeatedly.
    """
    state = site.job(job, "%T")
    if state == "PENDING":
        # Refused if the job has started in the meantime.
        site.run("scontrol", "update", f"jobid={job}", "StartTime=now")
    return state == "RUNNING"


def test_short_job_is_backfilled(site: Site):
    site.comes_to(site.submit("-p", "work", "-N1", "--exclusive", "-t", "10", user="ada"), "RUNNING")
    large = site.submit("-p", "work", "-q", "keen", "-N2", "--exclusive", "-t", "30", user="bob")
    long = site.submit("-p", "work", "-N1", "--exclusive", "-t", "60", user="ada")
    short = site.submit("-p", "work", "-N1", "--exclusive", "-t", "1", user="ada")
    site.comes_to(short, "RUNNING")
    assert int(site.job(large, "%Q")) > int(site.job(short, "%Q"))
    assert (site.job(large, "%T"), site.job(long, "%T")) == (
        "PENDING",
        "PENDING",
    )  # the long job would delay the large job


def test_job_over_the_user_limit_of_a_qos_waits(site: Site):
    first = site.submit("-p", "work", "-q", "small", "--gpus=1", user="ada")
    second = site.submit("-p", "work", "-q", "small", "--gpus=1", user="ada")
    others = site.submit("-p", "work", "-q", "small", "--gpus=1", user="bob")
    site.comes_to(first, "RUNNING")
    site.comes_to(others, "RUNNING")
    eventually(lambda: site.job(second, "%T %r") == "PENDING QOSMaxGRESPerUser")
    site.ask("scancel", first)
    site.comes_to(second, "RUNNING")


def test_user_without_association_is_refused(site: Site):
    stranger = replace(site, cli=replace(site.cli, uid=NOBODY))
    answer = stranger.run("srun", "hostname")
    assert answer.code == 1 and "Invalid account" in answer.err


def test_job_of_higher_tier_requeues_jobs_of_lower_tier(tiers: Site):
    low = tiers.submit("-p", "scavenge", "--exclusive")
    tiers.comes_to(low, "RUNNING")
    urgent = tiers.submit("-p", "urgent", "--exclusive")
    tiers.comes_to(urgent, "RUNNING")
    tiers.comes_to(low, "PENDING")
    assert "Restarts=1" in tiers.ask("scontrol", "show", "job", low)
    second = tiers.submit("-p", "urgent", "--exclusive")
    eventually(lambda: tiers.job(second, "%T %r") == "PENDING Resources")  # jobs of the same tier are not preempted
    tiers.clear()


# Reservations, topology, raw settings


def test_reservation_excludes_other_users(site: Site):
    assert "ReservationName=course" in site.ask("scontrol", "show", "reservation", "course")
    assert site.ok("srun", "-p", "class", "--reservation=course", "hostname", user="ada") == "class-1"
    assert "Access denied" in site.run("srun", "-p", "class", "--reservation=course", "hostname", user="bob").err
    assert site.run("srun", "-p", "class", "--immediate=1", "hostname", user="bob").code == 1


def test_slurm_has_the_topology(site: Site):
    switches = dict(line.split(" ", 1) for line in site.ask("scontrol", "show", "topology").splitlines())
    assert "Nodes=work-[1-2]" in switches["SwitchName=leaf-1"].split()
    assert {"Level=1", "Switches=leaf-[1-4]"} <= set(switches["SwitchName=spine"].split())


def test_raw_settings_override_ours(site: Site):
    assert site.setting("MaxArraySize") == "77"
    assert site.setting("KillWait") == "3 sec"
    assert site.setting("SchedulerParameters") == "batch_sched_delay=0,sched_interval=1,bf_interval=1"


# Users, login nodes and slurmrestd


def test_job_runs_as_a_user_who_exists_only_on_the_cluster(site: Site):
    uid = site.ok("id", "-u", "ada", user="ada")
    assert "ada:" not in Path("/etc/passwd").read_text() and int(uid) > 1000
    out = site.ok("srun", "-N2", "sh", "-c", 'echo "$(id -u) $(id -un) $(id -gn) $HOME"', user="ada")
    assert set(out.splitlines()) == {f"{uid} ada ada {site.folder}/home/ada"} and len(out.splitlines()) == 2
    site.ok("srun", "sh", "-c", "echo mine > ~/note", user="ada")
    assert (site.folder / "home/ada/note").stat().st_uid == int(uid)
    assert site.run("srun", "sh", "-c", "echo mine > ~ada/other", user="bob").code != 0


def test_root_can_become_a_machine_user_with_another_group_name(site: Site):
    """The user `nobody` is in the group `nogroup`, and its home belongs to the machine, not to the cluster."""
    said = site.ok("sh", "-c", "id -un; id -gn; echo $HOME", user="nobody")
    assert said.split() == ["nobody", "nogroup", "/nonexistent"]


def test_login_node_is_a_separate_host_and_not_a_slurm_node(site: Site):
    assert site.cli.ok("shell", "-M", "one", "-w", "login-1", "-u", "ada", "--", "hostname").strip() == "login-1"
    assert "login-1" not in site.ask("sinfo", "-h", "-N", "-o", "%N").split()
    inside = site.cli.ok("shell", "-M", "one", "-w", "login-1", "--", "srun", "hostname").strip()
    assert inside == "work-1"


ASK = """
import http.client, socket, sys

class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(sys.argv[1])

connection = Unix("localhost")
connection.request("GET", sys.argv[2])
answer = connection.getresponse()
sys.stderr.write(str(answer.status))
sys.stdout.write(answer.read().decode())
"""


def ask_rest(site: Site, path: str, *enter: str, uid: int = NOBODY) -> tuple[str, str]:
    """Return (HTTP status, body) for a user of the machine; `enter` is the prefix that enters a host."""
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    argv = [*enter, *become, "/usr/bin/python3", "-I", "-c", ASK, str(site.folder / "run/rest/slurmrestd.sock"), path]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    return done.stderr, done.stdout


@pytest.mark.parametrize("uid", [NOBODY, 0])
@pytest.mark.parametrize("where", ["machine", "login-1", "head"])
def test_slurmrestd_answers_on_its_socket(site: Site, where: str, uid: int):
    process = host_process(site.folder / "hosts" / where)
    enter = ["nsenter", "-t", str(process.pid), "--mount", "--uts", "--pid", "--"] if process else []
    _, pages = ask_rest(site, "/openapi/v3", *enter, uid=uid)
    newest = max(re.findall(r"/slurm\\?/(v0\.0\.\d+)\\?/", pages))  # the version differs between releases of Slurm
    status, body = ask_rest(site, f"/slurm/{newest}/nodes/", *enter, uid=uid)
    assert status == "200", (status, body)
    names = {node["name"] for node in json.loads(body)["nodes"]}
    assert names == {"work-1", "work-2", "work-3", "cheap-1", "class-1"}


# Changes of the file


def service_pids(site: Site) -> dict[str, object]:
    """Return every daemon's PID on its host, which shows whether anything was restarted."""
    found = {}
    for path in sorted((site.folder / "hosts").glob("*/services.json")):
        facts = json.loads(path.read_text())
        found.update({f"{name}@{path.parent.name}": fact["pid"] for name, fact in facts.items()})
    return found


def test_users_qos_and_reservations_change_without_a_restart(site: Site):
    job = site.submit("-p", "work", user="ada")
    site.comes_to(job, "RUNNING")
    before, changed = service_pids(site), change(POLICY)
    assert site.cli.ok("plan", site.cli.file(changed, "one.yaml")).splitlines() == [
        "adds user cem (uid 20003)", "updates accounts, users and QOS", "updates reservations", "restarts nothing",
        "ends no job",
    ]  # fmt: skip
    site.cli.ok("up", "one.yaml")
    try:
        assert service_pids(site) == before
        assert site.job(job, "%T") == "RUNNING"
        qos = site.ask("sacctmgr", "-nP", "show", "qos", "calm,fresh", "format=name,priority")
        assert qos.split() == ["calm|30", "fresh|5"]
        # The new user exists in accounting and on every node, has a home, and may use the new QOS at once.
        home = site.ok("srun", "-q", "fresh", "-A", "sound", "sh", "-c", "cd && pwd", user="cem")
        assert home == f"{site.folder}/home/cem"
        assert site.ok("srun", "-p", "class", "--reservation=course", "hostname", user="bob") == "class-1"
        assert site.ask("scontrol", "-o", "show", "reservation").count("ReservationName=") == 2
        assert site.cli.run("up", "one.yaml").err.strip() == "nothing to do: the cluster is as the file says"
    finally:
        site.cli.ok("up", site.cli.file(POLICY, "one.yaml"))
    assert site.ask("scontrol", "-o", "show", "reservation").count("ReservationName=") == 1
    assert service_pids(site) == before


def change(text: str) -> str:
    text = text.replace("{name: calm, priority: 20}", "{name: calm, priority: 30}\n    - {name: fresh, priority: 5}")
    text = text.replace("  - {name: speech}\n", "  - {name: speech}\n  - {name: sound, parent: speech}\n")
    text = text.replace("accounts: [speech]}", "accounts: [speech]}\n  - {name: cem, accounts: [sound]}")
    text = text.replace("users: [ada], duration: 1h}", "users: [ada, bob], duration: 2h}")
    return text + "  - {name: later, nodes: cheap-1, users: [bob], start: now+2days, duration: 1h}\n"


def test_removed_reservation_is_reported_and_deleted(site: Site):
    kept = POLICY[: POLICY.index("reservations:")]
    assert "updates reservations" in site.cli.ok("plan", site.cli.file(kept, "one.yaml"))
    site.cli.ok("up", "one.yaml")
    assert "No reservations" in site.ask("scontrol", "show", "reservation")
    site.cli.ok("up", site.cli.file(POLICY, "one.yaml"))
    assert "ReservationName=course" in site.ask("scontrol", "show", "reservation")


def test_manual_reservation_is_kept(site: Site):
    site.ask("scontrol", "create", "reservation", "ReservationName=mine", "Users=root", "Nodes=work-3", "StartTime=now",
            "Duration=60", "Flags=MAINT")  # fmt: skip
    try:
        longer = POLICY.replace("users: [ada], duration: 1h", "users: [ada], duration: 2h")
        site.cli.ok("up", site.cli.file(longer, "one.yaml"))
        found = site.ask("scontrol", "-o", "show", "reservation")
        assert "ReservationName=mine" in found and "ReservationName=course" in found
    finally:
        site.run("scontrol", "delete", "ReservationName=mine")
        site.cli.ok("up", site.cli.file(POLICY, "one.yaml"))


def test_accounting_can_be_turned_off(tiers: Site):
    answer = tiers.run("sacct")
    assert answer.code != 0 and "accounting storage is disabled" in answer.err
    daemons = {daemon["name"] for daemon in tiers.cli.status("two")["daemons"]}  # type: ignore[attr-defined]
    assert daemons == {"munged", "slurmctld", "slurmd", "controller", "machine-room", "node-agent"}
    switched = tiers.cli.run("up", tiers.cli.file(TIERS.replace("accounting: false, ", ""), "two.yaml"))
    assert switched.code == 1 and "accounting cannot be switched on while the cluster is up" in switched.err
    assert tiers.ok("srun", "hostname") == "scavenge-1"


# Backup controller


def daemon(host: Path, program: str) -> Process:
    """Return a daemon of a host as a process of the machine."""
    first = host_process(host)
    assert first is not None
    found = programs(descendants(first.pid), lambda words: any(word.endswith(f"/{program}") for word in words[:1]))
    assert len(found) == 1, found
    start = start_ticks(found[0])
    assert start is not None
    return Process(found[0], start)


@pytest.mark.waits
def test_the_backup_controller_takes_over_and_up_brings_the_primary_back(home: Cli):
    home.ok("up", home.file(PAIR, "pair.yaml"))
    pair, out = Site(home, "pair"), home.home / "pair.out"
    last = home.home / "last"
    script = f"srun sh -c 'until [ -e {last} ]; do sleep 0.1; done'; echo done $SLURM_RESTART_COUNT"
    job = pair.ok("sbatch", "--parsable", "-N2", "-o", str(out), "--wrap", script)
    pair.comes_to(job, "RUNNING")
    have_job_saved(home, "pair", job)
    assert end([daemon(pair.folder / "hosts/head", "slurmctld")]) == []
    eventually(lambda: "slurmctld on head (ended with code -9)" in str(home.status("pair")["problems"]))
    assert pair.ok("sinfo", "-h", "-o", "%D") == "2"  # waits about 6 s for the backup
    assert "Slurmctld(primary) at head is DOWN" in pair.run("scontrol", "ping").out
    assert pair.job(job, "%T") == "RUNNING"
    status = home.status("pair")
    assert (status["phase"], len(status["jobs"])) == ("degraded", 1)  # type: ignore[arg-type]
    assert home.ok("plan", "pair.yaml").splitlines() == ["starts slurmctld on head", "restarts nothing", "ends no job"]
    home.ok("up", "pair.yaml")
    both = ["Slurmctld(primary) at head is UP", "Slurmctld(backup) at head-backup is UP"]
    eventually(lambda: pair.run("scontrol", "ping").out.splitlines() == both)  # the backup must return control first
    assert home.status("pair")["phase"] == "up"
    last.touch()
    eventually(lambda: out.exists() and out.read_text() == "done\n")  # the job ran only once
    home.ok("down", "pair")
