"""Tests of the desired state of a local cluster and of the plan that leads to it. No daemon is started."""

import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import TargetError, UsageError
from dalsegno.spec.facts import (
    Account,
    Cluster,
    Containers,
    Local,
    Monitoring,
    Node,
    Partition,
    Priority,
    Qos,
    Reservation,
    Slurm,
    Switch,
    User,
)
from dalsegno.spec.layout import UNSIZED_MIB
from dalsegno.system.cgroups import CgroupTree
from dalsegno.system.hosts import Service, ServiceFact
from dalsegno.system.machine import MachineFacts
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.local.apply import write_file
from dalsegno.targets.local.daemons import START
from dalsegno.targets.local.desired import Desired, desired, hosts_file, limits_sentence, slurm_layout
from dalsegno.targets.local.folder import ApplyStage, ClusterState, Folder
from dalsegno.targets.local.placement import Free, Placement, place
from dalsegno.targets.local.plan import LocalPlan, Observed, RunningJob, make_plan
from dalsegno.targets.local.shell import user_env
from dalsegno.targets.local.target import LocalTarget
from dalsegno.users.checks import People

V1 = CgroupTree(1, "/sys/fs/cgroup/freezer")
V2 = CgroupTree(2, "/sys/fs/cgroup", ("/sys/fs/cgroup",), frozenset({"cpuset", "memory"}))
ROOT = MachineFacts("Linux", "box", "root", True, "slurm-wlm 22.05.8", True, (), V1)
USER = replace(ROOT, user="ann", is_root=False, namespaces=False)
FOLDER = Folder(Path("/state/clusters/demo"))
PEOPLE = People("root:x:0:0::/root:/bin/sh\n", "root:x:0:\n")


def nodes(count: int, **shape: object) -> tuple[Node, ...]:
    facts: dict[str, object] = {"cpus": 4, "memory_mib": 8000, "gpus": 2, "gpu_type": "h100", **shape}
    return tuple(Node(f"train-{number}", **facts) for number in range(1, count + 1))  # type: ignore[arg-type]


def cluster(count: int = 2, *, shape: dict[str, object] | None = None, **more: object) -> Cluster:
    made = nodes(count, **(shape or {}))
    whole: dict[str, object] = {"partitions": (Partition("train", names(made), default=True),), **more}
    return Cluster("demo", "local", made, **whole)  # type: ignore[arg-type]


def names(some: Iterable[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in some)


def put(wanted: Cluster, machine: MachineFacts = ROOT, before: Placement | None = None) -> Placement:
    return place(wanted, machine, FOLDER.id, before, Free(people=PEOPLE), str(FOLDER.devices))


def want(wanted: Cluster, machine: MachineFacts = ROOT, before: Placement | None = None) -> Desired:
    return desired(wanted, FOLDER, put(wanted, machine, before), machine, PEOPLE)


def running(there: Cluster, machine: MachineFacts = ROOT) -> Observed:
    """Return the state of a running cluster that matches its file."""
    made = want(there, machine)
    return Observed(
        state=ClusterState(ApplyStage.UP, put(there, machine), machine.slurm_version, registered=True),
        applied=there,
        files={name: file.text for name, file in made.files.items()},
        alive=frozenset(made.hosts),
        services={
            host.name: {one.name: ServiceFact(one.name, True, one.revision) for one in host.services}
            for host in made.hosts.values()
        },
    )


def plan(wanted: Cluster, seen: Observed | None = None, machine: MachineFacts = ROOT) -> LocalPlan:
    seen = seen or Observed()
    placed = put(wanted, machine, seen.state.placement if seen.state else None)
    return make_plan(wanted, placed, desired(wanted, FOLDER, placed, machine, PEOPLE), seen)


def without_service(seen: Observed, host: str, service: str) -> Observed:
    dead = {**seen.services[host], service: ServiceFact(service, False, exit_code=-9)}
    return replace(seen, services={**seen.services, host: dead})


def without_host(seen: Observed, host: str) -> Observed:
    dead = {name: replace(fact, running=False) for name, fact in seen.services[host].items()}
    return replace(seen, alive=seen.alive - {host}, services={**seen.services, host: dead})


# A new cluster ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "machine", "sentence"),
    [
        (cluster(2), ROOT, "creates demo: 2 virtual nodes with 4 simulated GPUs in 1 partition, with accounting"),
        (cluster(2), USER, "creates demo: 2 loopback nodes with 4 simulated GPUs in 1 partition, with accounting"),
        (
            cluster(1, shape={"gpus": 0}, slurm=Slurm(accounting=False)),
            ROOT,
            "creates demo: 1 virtual node in 1 partition, without accounting",
        ),
        (
            cluster(1, shape={"gpus": 1}),
            replace(ROOT, gpu_files=("/dev/nvidia0",)),
            "creates demo: 1 virtual node with 1 GPU in 1 partition, with accounting",
        ),
    ],
)
def test_plan_of_a_new_cluster_is_one_sentence(wanted: Cluster, machine: MachineFacts, sentence: str):
    made = plan(wanted, machine=machine)
    assert (made.fresh, made.empty, made.sentences()) == (True, False, [sentence])


def test_plan_counts_gpus_without_spares():
    first, second = cluster(2).nodes
    made = plan(replace(cluster(2), nodes=(first, replace(second, spare=True))))
    assert "1 virtual node with 2 simulated GPUs and 1 spare in 1 partition" in made.sentences()[0]


def test_a_new_cluster_boots_every_host_and_writes_every_file():
    made = plan(cluster(2, logins=("login-1",)))
    assert made.boot == ("switch", "head", "machine-room", "login-1", "train-1", "train-2")
    assert set(made.write) == set(made.desired.files)
    assert (made.start, made.restart, made.reconfigure) == ((), (), False)  # nothing runs yet that could be notified
    assert made.accounting


def test_missing_images_are_imported_without_a_restart():
    wanted = cluster(1, containers=Containers(enabled=True, images=("ubuntu:24.04", "alpine:3")))
    assert plan(wanted).sentences()[1:] == ["imports 2 images (ubuntu:24.04, alpine:3)"]
    assert str(FOLDER.root.parents[1] / "images") in plan(wanted).desired.files["etc/plugstack.conf"].text
    there = replace(running(wanted), images=frozenset({"ubuntu:24.04"}))
    made = plan(wanted, there)
    assert (made.changes, made.empty) == (False, False)
    assert made.sentences() == ["imports 1 image (alpine:3)", "restarts nothing", "ends no job"]
    assert plan(wanted, replace(there, images=frozenset(wanted.containers.images))).empty


def test_plan_reports_missing_container_support_and_changes_of_it():
    on, off = (cluster(1, containers=Containers(enabled=each)) for each in (True, False))
    assert "leaves out containers: gcc is missing" in replace(plan(off), no_containers="gcc is missing").sentences()
    made = replace(plan(off, running(off)), no_containers="gcc is missing")
    assert made.empty and made.sentences()[1:] == ["leaves out containers: gcc is missing"]
    assert "switches containers on (`srun --container-image`)" in plan(on, running(off)).sentences()
    assert "switches containers off" in plan(off, running(on)).sentences()


# Nothing to do, and interrupted changes ---------------------------------------------------------------------


@pytest.mark.parametrize("machine", [ROOT, USER])
def test_unchanged_cluster_has_an_empty_plan(machine: MachineFacts):
    there = cluster(3)
    made = plan(there, running(there, machine), machine)
    assert (made.empty, made.sentences()) == (True, ["nothing to do: the cluster is as the file says"])


def test_interrupted_up_is_repeated_even_if_nothing_is_missing():
    there = cluster(2)
    seen = running(there)
    assert seen.state is not None
    half = replace(seen, applied=None, state=replace(seen.state, phase=ApplyStage.MAKING))
    made = plan(there, half)
    assert not made.empty and made.accounting and made.reconfigure
    assert "finishes what an earlier `up` began" in made.sentences()


# Nodes and partitions --------------------------------------------------------------------------------------


def test_adding_nodes_does_not_affect_others():
    made = plan(cluster(4), running(cluster(2)))
    assert made.sentences() == [
        "adds 2 nodes (train-3, train-4)", "restarts slurmctld and 2 slurmd; running jobs continue", "ends no job",
    ]  # fmt: skip
    assert made.boot == ("train-3", "train-4") and made.remove_hosts == ()
    assert not [name for name in made.write if name.startswith("hosts/train-1/")]
    assert {"etc/slurm.conf", "etc/hosts", "hosts/train-3/telemetry.json"} <= set(made.write)
    assert not made.reconfigure  # slurmctld is restarted and reads all settings anyway


def test_removed_nodes_are_drained_and_only_their_jobs_awaited():
    jobs = (
        RunningJob("7", "train", frozenset({"train-2", "train-3"})),
        RunningJob("8", "train", frozenset({"train-1"})),
        RunningJob("9", "train", frozenset()),
    )
    made = plan(cluster(2), replace(running(cluster(3)), jobs=jobs))
    assert made.sentences() == [
        "drains and removes 1 node (train-3)",
        "restarts slurmctld and 2 slurmd; running jobs continue",
        "waits for 1 job (7) to end first; ends no job",
    ]
    assert (made.remove_nodes, made.remove_hosts, made.boot) == (("train-3",), ("train-3",), ())


def test_removed_node_without_a_host_is_cleaned_up():
    seen = running(cluster(3))
    gone = {name: facts for name, facts in seen.services.items() if name != "train-3"}
    made = plan(cluster(2), replace(seen, alive=seen.alive - {"train-3"}, services=gone))
    assert made.remove_hosts == ("train-3",)


def test_jobs_are_unknown_while_slurmctld_does_not_answer():
    silent = replace(running(cluster(3)), jobs=None)
    assert plan(cluster(2), silent).sentences()[-1] == "slurmctld does not answer, so the affected jobs are unknown"
    assert plan(cluster(4), silent).sentences()[-1] == "ends no job"  # adding a node ends no job


def test_long_name_lists_are_shortened():
    assert plan(cluster(9), running(cluster(2))).sentences()[0] == "adds 7 nodes (train-3, train-4, train-5, train-6 …)"


def test_removing_a_shared_partition_needs_no_restart_and_waits_for_jobs():
    both = (Partition("train", ("train-1", "train-2"), default=True), Partition("debug", ("train-1",)))
    jobs = (RunningJob("5", "debug", frozenset({"train-1"})), RunningJob("6", "train", frozenset({"train-1"})))
    made = plan(cluster(2), replace(running(cluster(2, partitions=both)), jobs=jobs))
    assert made.sentences() == [
        "removes 1 partition (debug)",
        "changes Slurm's settings in place (scontrol reconfigure)",
        "restarts nothing",
        "waits for 1 job (5) to end first; ends no job",
    ]
    assert (made.remove_nodes, made.remove_hosts) == ((), ())


# What is restarted, and what is not ---------------------------------------------------------------------------

BASE = cluster(2, slurm=Slurm(preempt_by="qos", preempt_mode="REQUEUE"))


def with_slurm(**change: object) -> Cluster:
    return replace(BASE, slurm=replace(BASE.slurm, **change))  # type: ignore[arg-type]


def with_partition(**change: object) -> Cluster:
    return replace(BASE, partitions=(replace(BASE.partitions[0], **change),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wanted",
    [
        with_partition(time_limit_min=30),
        with_partition(max_nodes=1),
        with_partition(allow_accounts=("lab",)),
        with_partition(oversubscribe="EXCLUSIVE"),
        replace(BASE, partitions=(*BASE.partitions, Partition("debug", ("train-1",)))),
        with_slurm(priority=Priority(age=5)),
        with_slurm(preempt_mode="CANCEL"),
        with_slurm(slurmd_timeout_s=10),
        with_slurm(extra={"SchedulerParameters": "bf_interval=9"}),
        with_slurm(extra={"KillWait": "5"}),
    ],
)
def test_reconfigurable_change_restarts_nothing(wanted: Cluster):
    made = plan(wanted, running(BASE))
    assert (made.restart, made.start, made.boot, made.reconfigure) == ((), (), (), True)
    assert made.write == ("etc/slurm.conf",)
    assert made.sentences() == [
        "changes Slurm's settings in place (scontrol reconfigure)", "restarts nothing", "ends no job",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "wanted",
    [
        replace(BASE, nodes=nodes(2, cpus=8)),
        replace(BASE, nodes=nodes(2, gpus=4)),
        replace(BASE, nodes=nodes(2, features=("nvlink",))),
        replace(BASE, nodes=nodes(2, weight=7)),
        with_slurm(topology=(Switch("leaf", ("train-1", "train-2")),)),
        with_slurm(preempt_by="partition"),
        with_slurm(preempt_by=""),
        with_slurm(extra={"SelectType": "select/linear"}),
        with_slurm(extra={"MaxArraySize": "77"}),
        with_slurm(extra={"SchedulerType": "sched/builtin"}),
    ],
)
def test_change_read_at_start_restarts_only_slurm_daemons(wanted: Cluster):
    made = plan(wanted, running(BASE))
    assert set(made.restart) == {("head", "slurmctld"), ("train-1", "slurmd"), ("train-2", "slurmd")}
    assert made.sentences()[-2:] == ["restarts slurmctld and 2 slurmd; running jobs continue", "ends no job"]
    assert not made.reconfigure


def test_new_slurm_version_restarts_its_daemons():
    newer = replace(ROOT, slurm_version="slurm 24.11.1")
    assert ("head", "slurmctld") in plan(BASE, running(BASE), newer).restart


def test_backup_controller_gets_a_host_and_daemons_restart():
    made = plan(with_slurm(backup_controller=True), running(BASE))
    assert made.boot == ("head-backup",) and "boots 1 host (head-backup)" in made.sentences()
    assert len(made.restart) == 3


@pytest.mark.parametrize(
    ("slurm", "restarts"),
    [
        ("24.11.5", "restarts nothing"),
        # slurmctld 22.05.8 cannot reach an srun on a host that has no line in slurm.conf.
        ("22.05.8", "restarts slurmctld and 2 slurmd; running jobs continue"),
    ],
)
def test_login_node_changes_without_slurm_restart(slurm: str, restarts: str):
    there, machine = replace(BASE, logins=("login-1",)), replace(ROOT, slurm_version=f"slurm-wlm {slurm}")
    came = plan(there, running(BASE, machine), machine).sentences()
    gone = plan(BASE, running(there, machine), machine).sentences()
    assert (came, gone) == (
        ["boots 1 host (login-1)", restarts, "ends no job"],
        ["removes 1 host (login-1)", restarts, "ends no job"],
    )


def test_slurmrestd_is_added_without_a_restart():
    made = plan(with_slurm(rest=True), running(BASE))
    booted = [(host, one.name) for host in made.boot for one in made.desired.hosts[host].services]
    assert [name for _, name in (*made.start, *booted)] == ["slurmrestd"]
    assert made.sentences()[-2:] == ["restarts nothing", "ends no job"]


def test_health_policy_change_is_reported_and_restarts_nothing():
    made = plan(replace(BASE, health=replace(BASE.health, mode="observe")), running(BASE))
    assert made.sentences() == ["changes the recovery of nodes (`health:`)", "restarts nothing", "ends no job"]


def test_users_change_without_a_restart():
    with_users = replace(BASE, accounts=(Account("lab"),), users=(User("ada", ("lab",), "lab"),))
    made = plan(with_users, running(BASE))
    assert made.sentences() == [
        "adds user ada (uid 20001)", "updates accounts, users and QOS", "restarts nothing", "ends no job",
    ]  # fmt: skip
    assert set(made.write) == {"etc/passwd", "etc/group"}
    assert plan(with_slurm(qos=(Qos("high", 10),)), running(BASE)).accounting


def test_reservations_are_recreated_and_removals_reported():
    course = replace(BASE, reservations=(Reservation("course", ("train-1",), users=("ada",)),))
    made = plan(course, running(BASE))
    assert made.sentences() == ["updates reservations", "restarts nothing", "ends no job"]
    # An interrupted `up` may have created it already.
    assert made.old_reservations == ("course",)
    gone = plan(BASE, running(course))
    assert (gone.reservations, gone.old_reservations) == (True, ("course",))
    assert gone.sentences() == ["updates reservations", "restarts nothing", "ends no job"]


@pytest.mark.parametrize(("before", "after", "word"), [(True, False, "off"), (False, True, "on")])
def test_accounting_cannot_change_while_the_cluster_is_up(before: bool, after: bool, word: str):
    seen = running(cluster(slurm=Slurm(accounting=before)))
    with pytest.raises(TargetError, match=f"accounting cannot be switched {word}") as caught:
        plan(cluster(slurm=Slurm(accounting=after)), seen)
    assert "dalsegno down demo" in caught.value.hint


def test_the_head_cannot_be_renamed_while_the_cluster_is_up():
    with pytest.raises(TargetError, match="renamed from `head` to `chief`"):
        plan(cluster(head="chief"), running(cluster()))


# Dead hosts and services --------------------------------------------------------------------------------------


def test_dead_service_is_started_and_nothing_else():
    made = plan(BASE, without_service(running(BASE), "head", "slurmctld"))
    assert (made.start, made.restart, made.boot, made.write) == ((("head", "slurmctld"),), (), (), ())
    assert made.sentences() == ["starts slurmctld on head", "restarts nothing", "ends no job"]


def test_unknown_service_is_started():
    seen = running(BASE)
    assert plan(BASE, replace(seen, services={**seen.services, "train-1": {}})).start == (
        ("train-1", "slurmd"),
        ("train-1", "node-agent"),
    )


def test_dead_host_is_booted_with_its_services():
    made = plan(BASE, without_host(running(BASE), "train-2"))
    assert made.sentences() == ["boots 1 host (train-2)", "restarts nothing", "ends no job"]
    assert (made.boot, made.start, made.add_nodes) == (("train-2",), (), ())


def test_injected_faults_are_cleared():
    made = plan(BASE, replace(running(BASE), faulty=("train-2", "removed-long-ago")))
    assert made.clear_faults == ("train-2",) and not made.empty
    assert made.sentences() == ["undoes the faults injected into 1 host (train-2)", "restarts nothing", "ends no job"]


def test_changed_file_is_restored():
    seen = running(BASE)
    made = plan(BASE, replace(seen, files={**seen.files, "etc/slurm.conf": "# mine"}))
    assert (made.write, made.reconfigure, made.restart) == (("etc/slurm.conf",), True, ())


# Files -----------------------------------------------------------------------------------------------------


def test_cluster_has_the_expected_files():
    plainest = want(cluster(1, shape={"gpus": 0}, slurm=Slurm(accounting=False)), USER).files
    assert set(plainest) == {
        "etc/slurm.conf", "etc/gres.conf", "etc/cgroup.conf", "etc/plugstack.conf", "etc/health.json",
        "hosts/train-1/telemetry.json", "bin/dalsegno",
    }  # fmt: skip
    full = want(cluster(1, slurm=Slurm(topology=(Switch("leaf", ("train-1",)),)))).files
    assert set(full) - set(plainest) == {
        "etc/slurmdbd.conf", "etc/database.sql", "etc/topology.conf", "etc/hosts", "etc/passwd", "etc/group",
        "bin/nvidia-smi",
    }  # fmt: skip
    assert (full["etc/slurmdbd.conf"].mode, full["bin/nvidia-smi"].mode) == (0o600, 0o755)


def test_mounted_files_are_listed():
    files = want(cluster(1)).files
    assert {name for name, file in files.items() if file.mounted} == {"etc/hosts", "etc/passwd", "etc/group"}


def test_hosts_file_has_all_hosts():
    there = cluster(2, logins=("login-1",), slurm=Slurm(backup_controller=True))
    placed = put(there)
    lines = hosts_file(there, placed, ROOT).splitlines()
    at = [("127.0.0.1", "localhost")]
    at += [(placed.addresses[name], name) for name in ("head", "head-backup", "login-1", "train-1", "train-2")]
    outside = str(ipaddress.IPv4Network(placed.subnet)[1])
    at += [(outside, name) for name in ("shell", ROOT.hostname)]
    assert lines[0::2] == [f"{address} {name}" for address, name in at]
    assert lines[1::2] == [f"::ffff:{address} {name}.ipv4" for address, name in at], "as a two-protocol listener asks"


@pytest.mark.parametrize("machine", [ROOT, USER])
def test_no_paths_of_the_system_slurm_are_used(machine: MachineFacts):
    files = want(cluster(2), machine).files
    text = files["etc/slurm.conf"].text + files["etc/slurmdbd.conf"].text + files["etc/gres.conf"].text
    paths = re.findall(r"(?<![\w/])/[\w./%-]+", re.sub(r"\w+Type=\S+", "", text))
    assert paths and [path for path in paths if not path.startswith(f"{FOLDER.root}/")] == []


def test_cluster_users_exist_on_virtual_hosts_only():
    with_users = cluster(1, users=(User("ada", ("lab",), "lab"),), accounts=(Account("lab"),))
    passwd = want(with_users).files["etc/passwd"].text
    uid = put(with_users).uids["ada"]
    assert passwd == PEOPLE.passwd + f"ada:x:{uid}:{uid}::{FOLDER.homes}/ada:/bin/bash\n"
    assert "etc/passwd" not in want(with_users, USER).files


# Telemetry is written once; afterwards, only fault injection changes it ---------------------------------------

TELEMETRY = "hosts/train-1/telemetry.json"


def telemetry_after(first: Cluster, then: Cluster, machine: MachineFacts = ROOT) -> bool:
    """Return whether the plan of the second cluster overwrites telemetry that fault injection has changed."""
    seen = running(first, machine)
    edited = json.loads(seen.files[TELEMETRY])
    for gpu in edited["gpus"]:
        gpu["temperature_c"] = 99
    made = plan(then, replace(seen, files={**seen.files, TELEMETRY: json.dumps(edited)}), machine)
    return TELEMETRY in made.write


def test_telemetry_lists_each_simulated_gpu():
    result = json.loads(want(cluster(2, shape={"gpu_memory_mib": 81920})).files[TELEMETRY].text)
    assert result["node"] == "train-1"
    assert [(gpu["index"], gpu["name"], gpu["memory_total_mib"]) for gpu in result["gpus"]] == [
        (0, "H100 (simulated)", 81920), (1, "H100 (simulated)", 81920),
    ]  # fmt: skip
    other = json.loads(want(cluster(2)).files["hosts/train-2/telemetry.json"].text)
    assert len({gpu["uuid"] for gpu in (*result["gpus"], *other["gpus"])}) == 4


def test_real_gpus_need_no_telemetry_file():
    real = replace(ROOT, gpu_files=("/dev/nvidia0", "/dev/nvidia1"))
    files = want(cluster(1), real).files
    assert json.loads(files[TELEMETRY].text)["gpus"] == [] and "bin/nvidia-smi" not in files


def test_injected_telemetry_is_kept():
    assert not telemetry_after(cluster(2), cluster(2))
    assert not telemetry_after(cluster(2), cluster(4))
    assert plan(cluster(2), running(cluster(2))).empty


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"gpus": 2}, {"gpus": 4}),
        ({"gpu_type": "h100"}, {"gpu_type": "h200"}),
        ({"gpu_type": "a100"}, {"gpu_type": "a10"}),  # one name is the beginning of the other
        ({"gpu_type": "l4"}, {"gpu_type": "l40s"}),
        ({"gpu_type": "l40s"}, {"gpu_type": "l4"}),
        ({"gpu_memory_mib": 40960}, {"gpu_memory_mib": 81920}),  # p4d and p4de are both a100 in Slurm
    ],
)
def test_changed_gpus_get_new_telemetry(first: dict[str, object], then: dict[str, object]):
    assert telemetry_after(cluster(1, shape=first), cluster(1, shape=then))


# Hosts and services ----------------------------------------------------------------------------------------


def test_virtual_hosts_have_address_host_file_and_users():
    there = cluster(1, logins=("login-1",), slurm=Slurm(backup_controller=True))
    hosts, placed = want(there).hosts, put(there)
    assert list(hosts) == ["switch", "head", "head-backup", "machine-room", "login-1", "train-1"]
    assert [host.name for host in hosts.values() if not host.isolate] == ["machine-room"]
    for name in ("head", "head-backup", "login-1", "train-1"):
        assert hosts[name].address == f"{placed.addresses[name]}/{placed.subnet.partition('/')[2]}"
        assert {target for _, target in hosts[name].binds} >= {"/etc/hosts", "/etc/passwd", "/etc/group"}
    assert (hosts["switch"].address, hosts["switch"].binds) == ("", ())


def test_only_virtual_hosts_of_a_simulated_cloud_have_a_metadata_service():
    on_ec2 = cluster(1, local=Local(cloud="ec2"))
    there, plain = want(on_ec2), want(cluster(1))
    names = [service.name for service in there.hosts["train-1"].services]
    assert names == ["slurmd", "metadata-service", "node-agent"]
    agent = next(each for each in there.hosts["train-1"].services if each.name == "node-agent")
    assert agent.argv[-2:] == ("--cloud", "/state/clusters/demo/etc/dalsegno-cloud.json")
    site = json.loads(there.files["etc/dalsegno-cloud.json"].text)
    assert site == {"cloud": "ec2", "ends": {}, "reservation_s": 600.0}
    assert "metadata-service" not in [service.name for service in plain.hosts["train-1"].services]
    on_ports = [service.name for host in want(on_ec2, USER).hosts.values() for service in host.services]
    assert "node-agent:train-1" in on_ports and "metadata-service" not in on_ports


def test_each_controller_has_its_own_pid_files():
    """slurm.conf has one PID-file path for all controllers. With a shared folder, the backup would end the primary."""
    hosts = want(cluster(1, slurm=Slurm(backup_controller=True))).hosts
    mounted = {name: dict((target, source) for source, target in hosts[name].binds) for name in hosts}
    assert mounted["head"][str(FOLDER.pids)] != mounted["head-backup"][str(FOLDER.pids)]


def test_compute_host_has_its_own_cgroup_if_available():
    hosts = want(cluster(2)).hosts
    assert hosts["train-1"].cgroups != hosts["train-2"].cgroups
    assert hosts["train-1"].cgroups == {
        "/sys/fs/cgroup/freezer": f"/sys/fs/cgroup/freezer/dalsegno-{FOLDER.id}/train-1"
    }
    assert hosts["head"].cgroups == {}
    assert want(cluster(1), replace(ROOT, cgroups=CgroupTree())).hosts["train-1"].cgroups == {}


def test_every_host_has_a_cgroup_v2_folder():
    hosts = want(cluster(1), replace(ROOT, cgroups=V2)).hosts
    base = f"/sys/fs/cgroup/system.slice/dalsegno-{FOLDER.id}.scope"
    assert {name: dict(host.cgroups) for name, host in hosts.items()} == {
        name: {"/sys/fs/cgroup": f"{base}/{name}"} for name in ("switch", "head", "machine-room", "train-1")
    }
    assert {(host.unified, host.unit, host.unit_folders) for host in hosts.values()} == {
        (True, f"dalsegno-{FOLDER.id}.scope", (base,))
    }


def test_proctrack_follows_available_cgroups():
    def settings(machine: MachineFacts, **more: object) -> tuple[str, str, bool]:
        there = cluster(1, **more)
        layout = slurm_layout(there, FOLDER, put(there, machine), machine)
        return layout.proctrack, layout.cgroups.plugin, layout.cgroups.ignore_systemd

    assert settings(ROOT) == ("cgroup", "cgroup/v1", False)
    assert settings(replace(ROOT, cgroups=V2)) == ("cgroup", "cgroup/v2", True)
    assert settings(replace(ROOT, cgroups=CgroupTree())) == ("linuxproc", "none", False)


BIG = replace(ROOT, cgroups=V2, cores=16, gpu_files=("/dev/nvidia0", "/dev/nvidia1"))


def told_limits(there: Cluster, machine: MachineFacts) -> str:
    return limits_sentence(there, put(there, machine), machine)


def test_jobs_are_constrained_as_far_as_the_kernel_allows():
    one = cluster(1)
    layout = slurm_layout(one, FOLDER, put(one, BIG), BIG)
    assert layout.cgroups.constrain == ("cores", "memory", "devices")
    assert layout.task_plugin == "task/cgroup"
    assert told_limits(one, BIG) == "jobs are limited to their cores, to their memory, to their devices"


@pytest.mark.parametrize(
    ("there", "machine", "sentence"),
    [
        (cluster(1), ROOT, "jobs are not limited to cores, memory or devices: this needs virtual hosts and cgroup v2"),
        (cluster(1), USER, "jobs are not limited to cores, memory or devices: this needs virtual hosts and cgroup v2"),
        (
            cluster(2, shape={"gpus": 1}),
            BIG,
            "jobs are limited to their memory, to their devices, not to cores (the nodes share this machine's cores)",
        ),
        (
            cluster(1, shape={"cpus": 192}),
            replace(BIG, gpu_files=()),
            "jobs are limited to their memory, not to cores (the nodes have 192 CPUs together, this machine has 16), "
            "not to devices (there are no real GPUs)",
        ),
        (
            cluster(1, shape={"memory_mib": UNSIZED_MIB}),
            BIG,
            "jobs are limited to their devices, not to cores (the file does not name the nodes' `memory`), "
            "not to memory (the file does not name the nodes' `memory`)",
        ),
        (
            cluster(1),
            replace(BIG, cgroups=replace(V2, controllers=frozenset({"cpuset"}))),
            "jobs are limited to their cores, to their devices, "
            "not to memory (cgroups on this machine have no controller `memory`)",
        ),
    ],
)
def test_plan_reports_missing_constraints(there: Cluster, machine: MachineFacts, sentence: str):
    assert told_limits(there, machine) == sentence


@pytest.mark.parametrize("version", [0, 2])
def test_loopback_nodes_do_not_use_cgroups(version: int):
    """Slurm's plugin for cgroup v2 needs folders that an ordinary user cannot create."""
    there = cluster(1)
    machine = replace(USER, cgroups=replace(V2, version=version))
    layout = slurm_layout(there, FOLDER, put(there, machine), machine)
    assert (layout.proctrack, layout.cgroups.plugin) == ("linuxproc", "none")
    assert {host.unit or dict(host.cgroups) or "" for host in want(there, machine).hosts.values()} == {""}


def test_services_are_on_their_hosts_in_start_order():
    hosts = want(cluster(2, slurm=Slurm(backup_controller=True))).hosts
    assert {name: [service.name for service in host.services] for name, host in hosts.items()} == {
        "switch": [],
        "head": ["munged", "mariadbd", "slurmdbd", "slurmctld", "controller", "observer"],
        "head-backup": ["slurmctld"],
        "machine-room": ["machine-room"],
        "train-1": ["slurmd", "node-agent"],
        "train-2": ["slurmd", "node-agent"],
    }


def test_loopback_cluster_has_one_host():
    hosts = want(cluster(2, slurm=Slurm(accounting=False)), USER).hosts
    assert list(hosts) == ["head", "machine-room"] and not hosts["head"].isolate and hosts["head"].address == ""
    services = {service.name: service for service in hosts["head"].services}
    assert list(services)[:4] == ["munged", "slurmctld", "controller", "observer"]
    assert list(services)[4:6] == ["slurmd:train-1", "node-agent:train-1"] and len(services) == 8
    assert services["slurmd:train-2"].argv[1:4] == ("-D", "-N", "train-2")
    assert services["slurmd:train-2"].log == str(FOLDER.log("train-2", "slurmd"))


def test_every_daemon_has_the_cluster_mark_and_slurm_conf():
    for host in want(cluster(1)).hosts.values():
        for service in host.services:
            assert service.env["DALSEGNO_MARK"] == str(FOLDER.root), service.name
            assert service.env["SLURM_CONF"] == str(FOLDER.slurm_conf)
            assert service.log.startswith(f"{FOLDER.root}/hosts/")


def test_log_level_is_given_to_our_own_daemons_and_restarts_them():
    """Slurm's daemons have their own settings. The default level is not put into the environment."""

    def services(level: str) -> dict[str, Service]:
        made = desired(cluster(1), FOLDER, put(cluster(1)), ROOT, PEOPLE, level)
        return {service.name: service for host in made.hosts.values() for service in host.services}

    plain, debug = services(""), services("debug")
    given = {name for name, service in debug.items() if service.env.get("DALSEGNO_LOG_LEVEL") == "debug"}
    assert given == {"controller", "machine-room", "node-agent", "observer"}
    assert {name for name in plain if plain[name].revision != debug[name].revision} == given
    assert services("info") == plain


def test_unknown_log_level_is_refused_before_anything_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DALSEGNO_LOG_LEVEL", "verbose")
    with pytest.raises(UsageError, match="is not a log level"):
        LocalTarget(tmp_path, tmp_path).plan(cluster(1))


@pytest.mark.parametrize("machine", [ROOT, USER])
def test_our_own_services_are_restarted_if_they_die(machine: MachineFacts):
    """The death of a Slurm daemon is only reported, because it may have a cause that a restart hides."""
    services = [one for host in want(cluster(1), machine).hosts.values() for one in host.services]
    kept = {one.name.partition(":")[0] for one in services if one.keep}
    assert kept == {"controller", "machine-room", "node-agent", "observer"}
    controller = next(one for one in services if one.keep)
    address = put(cluster(1), machine).addresses["head"]
    assert controller.argv[-4:-1] == ("controller", str(FOLDER.root), "--agents")
    assert controller.argv[-1].rpartition(":")[0] == address
    assert want(cluster(3), machine).hosts["head"].services[-8 if machine is USER else -2] == controller


def test_node_services_get_telemetry_boot_id_and_controller_address():
    there = cluster(2)
    slurmd, agent = want(there).hosts["train-2"].services
    files = {"DALSEGNO_TELEMETRY": "telemetry.json", "DALSEGNO_BOOT_ID": "boot-id"}
    for service in (slurmd, agent):
        assert {name: service.env[name] for name in files} == {
            name: str(FOLDER.host("train-2") / file) for name, file in files.items()
        }
    said = dict(zip(agent.argv[-10::2], agent.argv[-9::2], strict=True))
    assert said == {
        "--node": "train-2",
        "--controller": f"{put(there).addresses['head']}:6816",
        "--secret": str(FOLDER.agent_secret("train-2")),
        "--boot-id": str(FOLDER.boot_id("train-2")),
        "--metrics": str(FOLDER.node_metrics("train-2")),
    }


def test_without_monitoring_the_agents_write_no_metrics():
    _, agent = want(cluster(1, monitoring=Monitoring(enabled=False))).hosts["train-1"].services
    assert "--metrics" not in agent.argv


def test_shell_environment_has_the_controller_socket():
    env = user_env(FOLDER, {"PATH": "/bin"})
    assert env["DALSEGNO_CONTROLLER"] == str(FOLDER.controller_socket)


def test_database_listens_only_on_its_socket():
    services = {service.name: service for service in want(cluster(1)).hosts["head"].services}
    alone = {"--skip-networking", "--no-defaults", f"--socket={FOLDER.database_socket}"}
    assert alone <= set(services["mariadbd"].argv)
    assert services["slurmdbd"].env["MYSQL_UNIX_PORT"] == str(FOLDER.database_socket)
    assert FOLDER.secret in FOLDER.database_socket.parents


def test_slurmrestd_does_not_run_as_root():
    def argv(machine: MachineFacts) -> tuple[str, ...]:
        hosts = want(cluster(1, slurm=Slurm(rest=True)), machine).hosts.values()
        return next(one.argv for host in hosts for one in host.services if one.name == "slurmrestd")

    assert argv(ROOT)[1:3] == ("-u", "nobody") and "-u" not in argv(USER)


def test_revisions_depend_on_cluster_and_folder():
    def revisions(folder: Folder) -> dict[str, str]:
        made = desired(BASE, folder, put(BASE), ROOT, PEOPLE)
        return {f"{host.name}/{one.name}": one.revision for host in made.hosts.values() for one in host.services}

    first, again, other = revisions(FOLDER), revisions(FOLDER), revisions(Folder(Path("/state/clusters/other")))
    assert first == again
    assert all(first[name] != other[name] for name in first)


# Slurm's view ----------------------------------------------------------------------------------------------


def test_virtual_nodes_have_their_own_addresses():
    there = cluster(2, slurm=Slurm(backup_controller=True))
    placed = put(there)
    layout = slurm_layout(there, FOLDER, placed, ROOT)
    assert [(host.name, host.address) for host in layout.controllers] == [
        ("head", placed.addresses["head"]), ("head-backup", placed.addresses["head-backup"]),
    ]  # fmt: skip
    assert {name: (node.address, node.hostname, node.port) for name, node in layout.places.items()} == {
        name: (placed.addresses[name], "", 0) for name in ("train-1", "train-2")
    }
    assert layout.proctrack == "cgroup"
    assert layout.dbd is not None and layout.dbd.host.name == "head"


def test_loopback_nodes_have_their_own_ports():
    there = cluster(2, slurm=Slurm(accounting=False))
    placed = put(there, USER)
    layout = slurm_layout(there, FOLDER, placed, USER)
    assert [host.name for host in layout.controllers] == ["box"]
    assert {node.hostname for node in layout.places.values()} == {"box"}
    assert layout.places["train-1"].port != layout.places["train-2"].port == placed.ports["train-2"]
    assert (layout.slurmctld_port, layout.slurm_user) == (placed.ports["slurmctld"], "ann")
    assert (layout.proctrack, layout.dbd) == ("linuxproc", None)


def test_loopback_hosts_of_root_do_not_use_cgroups():
    """The freezer is mounted, but these hosts get no folder in it."""
    there = cluster(1, local=Local(hosts="loopback"))
    assert slurm_layout(there, FOLDER, put(there), ROOT).proctrack == "linuxproc"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "-D"),
        (("clustername",), "-D -i"),
        (("clustername", "assoc_usage"), "-D"),
    ],
)
def test_slurmctld_starts_after_a_kill_before_its_first_save(tmp_path: Path, files: tuple[str, ...], words: str):
    for name in files:
        (tmp_path / name).touch()
    done = LocalRunner().run(["/bin/sh", "-c", START, str(tmp_path), "echo", "-D"])
    assert done.stdout.strip() == words


@pytest.mark.parametrize(("slurm", "wrapped"), [("22.05.8", False), ("24.11.5", False), ("26.05.5", True)])
def test_missing_assoc_usage_matters_only_to_releases_that_need_it(slurm: str, wrapped: bool):
    head = want(cluster(1), replace(ROOT, slurm_version=f"slurm-wlm {slurm}")).hosts["head"]
    (service,) = [each for each in head.services if each.name == "slurmctld"]
    assert ("/bin/sh" in service.argv) is wrapped and service.argv[-1] == "-D"


def test_host_files_are_replaced_as_a_whole(tmp_path: Path):
    made = desired(cluster(1), FOLDER, put(cluster(1)), ROOT, PEOPLE)
    name = next(name for name in made.files if name.endswith("hosts"))
    folder = Folder(tmp_path)
    write_file(folder, name, made.files[name])
    with (tmp_path / name).open() as reader:
        write_file(folder, name, replace(made.files[name], text="127.0.0.1 other\n"))
        assert reader.read() == made.files[name].text  # a reader of the old file still has all of it
    assert (tmp_path / name).read_text() == "127.0.0.1 other\n"
