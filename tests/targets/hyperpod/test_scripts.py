"""The lifecycle scripts, run with bash, and the partitions service with its repairs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.setup.bootstrap import BootstrapCode, CodeSource, render_bootstrap
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeInfo, NodeState
from dalsegno.system.processes import FakeRunner
from dalsegno.targets.cloud.agent_secrets import DERIVE
from dalsegno.targets.cloud.monitoring import prometheus_files
from dalsegno.targets.folder import ClusterFolder, write_applied
from dalsegno.targets.hyperpod.answers import SharedFileSystem, SlurmRole
from dalsegno.targets.hyperpod.lifecycle import lifecycle_files
from dalsegno.targets.hyperpod.node_plans import role_plan
from dalsegno.targets.hyperpod.partitions import (
    PROLOG,
    PartitionGuard,
    ReservationChange,
    plan_repair,
    plan_reservations,
    read_groups,
    real_cluster,
)
from tests.targets.hyperpod.conftest import CPU, GPU, cluster_of

LUSTRE = SharedFileSystem("fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com", "/fsx", "abcdefgh")
WRITE = "monitoring: {remote_write: {url: 'https://aps-workspaces.us-east-1.amazonaws.com/workspaces/ws-1/api/v1/remote_write', region: us-east-1}}\n"  # noqa: E501


def own_address() -> str:
    return subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()[0]


def resources(**groups: tuple[str, ...]) -> str:
    found = [{"Name": name, "Instances": [{"CustomerIpAddress": each} for each in ips]} for name, ips in groups.items()]
    return json.dumps({"ClusterConfig": {"ClusterName": "demo"}, "InstanceGroups": found})


def write_folder(folder: Path, **groups: tuple[str, ...]) -> dict[str, str]:
    """Write the lifecycle folder with bootstrap scripts that only record their role; return the environment."""
    scripts = {role: f"echo {role.value} head=$DALSEGNO_HEAD > {folder}/ran\n" for role in SlurmRole}
    for name, content in lifecycle_files(cluster_of(), [], scripts, b"code").items():
        (folder / name).write_bytes(content)
    (folder / "resources.json").write_text(resources(**groups))
    return {
        **os.environ,
        "SAGEMAKER_RESOURCE_CONFIG_PATH": str(folder / "resources.json"),
        "DALSEGNO_PROVISION_LOG": str(folder / "log"),
    }


@pytest.mark.parametrize(("group", "role"), [("controller", "Controller"), ("login", "Login"), ("cpu", "Compute")])
def test_lifecycle_script_finds_its_role_and_the_controller_by_its_address(tmp_path, group, role):
    addresses = {"controller": ("203.0.113.1",), "login": ("203.0.113.2",), "cpu": ("203.0.113.3", "203.0.113.4")}
    addresses[group] = (own_address(),)
    env = write_folder(tmp_path, **addresses)
    for _ in range(2):  # HyperPod may start the script again
        subprocess.run(["bash", tmp_path / "on_create.sh"], env=env, check=True, capture_output=True)
    assert (tmp_path / "ran").read_text() == f"{role} head={addresses['controller'][0]}\n"


def test_lifecycle_script_says_why_it_fails(tmp_path):
    env = write_folder(tmp_path, controller=("203.0.113.1",))
    done = subprocess.run(["bash", tmp_path / "on_create.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no instance group in" in done.stdout
    assert "no instance group in" in (tmp_path / "log").read_text(), "CloudWatch gets this file"
    env = write_folder(tmp_path, stranger=(own_address(),))
    done = subprocess.run(["bash", tmp_path / "on_create.sh"], env=env, capture_output=True, text=True)
    assert "instance group stranger is not in roles.json" in done.stdout


@pytest.mark.parametrize("configuration", ["api", "provisioning"])
def test_scripts_are_clean_for_shellcheck(tmp_path, configuration, golden):
    containers = "containers: {enabled: true, folder: /fsx/images}\n" if configuration == "api" else ""
    cluster = cluster_of(CPU + GPU, f"  configuration: {configuration}\n", WRITE + containers)
    plans = {role: role_plan(cluster, role, "0.1-abc", "ssh-ed25519 AAAA", monitored=True) for role in SlurmRole}
    code = BootstrapCode(CodeSource.BESIDE)
    scripts = {
        role: render_bootstrap(plan, code, head="printf '%s' \"${DALSEGNO_HEAD:-}\"") for role, plan in plans.items()
    }
    files = lifecycle_files(cluster, [LUSTRE], scripts, b"")
    for name in (name for name in files if name.endswith(".sh")):
        (tmp_path / name).write_bytes(files[name])
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, "--severity=style", *tmp_path.glob("*.sh")], capture_output=True, text=True)
    assert done.stdout == ""
    golden(f"hyperpod/on_create-{configuration}.sh", files["on_create.sh"].decode())


def test_only_the_controller_watches_partitions_and_every_role_exports_metrics():
    cluster = cluster_of(CPU, "", WRITE)
    names = {role: [each.name for each in role_plan(cluster, role, "k", monitored=True).services] for role in SlurmRole}
    assert names[SlurmRole.CONTROLLER] == [
        "controller", "observer", "hyperpod-partitions", "node-exporter", "slurm-exporter", "prometheus",
    ]  # fmt: skip
    assert names[SlurmRole.COMPUTE] == ["node-agent", "node-exporter"]
    assert names[SlurmRole.LOGIN] == ["node-exporter"]
    assert "node-exporter" not in [each.name for each in role_plan(cluster, SlurmRole.COMPUTE, "k").services]


def test_prometheus_writes_to_the_workspace_with_signed_requests(golden):
    text = prometheus_files(cluster_of(CPU, "", WRITE))["prometheus.yml"]
    golden("hyperpod/prometheus.yml", text)


# Partitions

THEIRS = """ClusterName=demo
NodeName=ip-10-4-33-[1-2],ip-10-3-96-[1-2] CPUs=4
PartitionName=dev Nodes=ALL Default=YES State=UP
PartitionName=cpu Nodes=ip-10-4-33-[1-2] State=UP
"""
GROUPS = {"controller": (), "cpu": ("ip-10-4-33-1", "ip-10-4-33-2"), "gpu": ("ip-10-3-96-1", "ip-10-3-96-2")}
KNOWN = {
    name: NodeInfo(name, NodeState.IDLE, cpus=4, memory_mib=16000, gpus=int("3-96" in name))
    for names in GROUPS.values()
    for name in names
}
PRESENT = {"dev": tuple(KNOWN), "cpu": GROUPS["cpu"]}


def real(partitions: str = CPU + GPU, known=KNOWN):
    return real_cluster(cluster_of(partitions, rest="health: {mode: observe}\n"), GROUPS, known)


def test_missing_partition_is_added_in_a_marked_block_and_nothing_else_changes():
    repair = plan_repair(THEIRS, real(), PRESENT)
    assert repair.added == ("gpu",)
    assert repair.conf.startswith(THEIRS)
    (line,) = [line for line in repair.conf.splitlines() if line.startswith("PartitionName=gpu")]
    assert "Nodes=ip-10-3-96-[1-2]" in line and "MaxTime=10080" in line and "State=UP" in line
    assert plan_repair(repair.conf, real(), PRESENT) == replace(repair, added=()), "a second look changes nothing"


ARMED = "health: {mode: auto}\n"


def test_compute_nodes_get_the_settings_of_the_checks_and_a_prolog():
    files = {each.path: each for each in role_plan(cluster_of(rest=ARMED), SlurmRole.COMPUTE, "k").files}
    assert "/opt/slurm/etc/health.json" in files, "the machines share no folder"
    assert "health --context prolog" in files[PROLOG].content and files[PROLOG].mode == 0o755
    others = role_plan(cluster_of(rest="health: {mode: 'off'}\n"), SlurmRole.COMPUTE, "k").files
    assert PROLOG not in [each.path for each in others]


def test_prolog_is_named_only_where_recovery_is_armed_and_hyperpod_has_none():
    armed = real_cluster(cluster_of(CPU + GPU, rest=ARMED), GROUPS, KNOWN)
    theirs = f"{THEIRS}SchedulerParameters=bf_continue,defer\nPartitionName=gpu Nodes=ip-10-3-96-[1-2] State=UP\n"
    added = plan_repair(theirs, armed, PRESENT).conf.removeprefix(theirs).splitlines()
    flags = "SchedulerParameters=bf_continue,defer,nohold_on_prolog_fail"
    assert added[2:-1] == ["Prolog=/usr/bin/true*", flags], "a glob that also matches on a node that is not set up"
    assert plan_repair(theirs, real(), PRESENT).conf == theirs, "mode observe"
    own = f"{theirs}Prolog=/opt/site/prolog.sh\n"
    assert plan_repair(own, armed, PRESENT).conf == own


def test_new_file_system_gets_a_folder_in_which_all_users_can_write():
    lustre = "storage: [{name: fsx, mount: /fsx, type: lustre, size: 1200G}]\n"
    network = "  subnets: [subnet-0123456789abcdef0]\n  security_groups: [sg-0123456789abcdef0]\n"
    plan = role_plan(cluster_of(CPU, network, lustre), SlurmRole.CONTROLLER, "k")
    (folder,) = [each for each in plan.folders if each.path.startswith("/fsx")]
    assert (folder.path, folder.mode, folder.owner, folder.keep) == ("/fsx/shared", 0o1777, "root", True)
    given = lustre.replace("size: 1200G", "source: fs-0123456789abcdef0")
    others = role_plan(cluster_of(CPU, network, given), SlurmRole.CONTROLLER, "k")
    assert not any(each.path.startswith("/fsx") for each in others.folders), "a file system of others is left alone"


def test_block_disappears_once_hyperpod_writes_the_partition_itself():
    ours = plan_repair(THEIRS, real(), PRESENT).conf
    theirs = f"{THEIRS}PartitionName=gpu Nodes=ip-10-3-96-[1-2] State=UP\n"
    assert plan_repair(ours.replace(THEIRS, theirs), real(), PRESENT).conf == theirs


def test_partition_that_lacks_nodes_is_completed_at_run_time():
    conf = THEIRS.replace("Nodes=ip-10-4-33-[1-2] State", "Nodes=ip-10-4-33-1 State")
    repair = plan_repair(conf, real(CPU), {"cpu": ("ip-10-4-33-1",)})
    assert repair.incomplete == {"cpu": GROUPS["cpu"]}
    assert repair.conf == conf


def test_partition_waits_until_slurm_knows_its_nodes():
    repair = plan_repair(THEIRS, real(known={name: KNOWN[name] for name in GROUPS["cpu"]}), PRESENT)
    assert (repair.waiting, repair.conf) == (("gpu",), THEIRS)


def test_partition_that_shares_nodes_is_added_with_their_names():
    repair = plan_repair(THEIRS, real(CPU + "  - {name: all, nodes_from: [cpu]}\n"), PRESENT)
    assert "PartitionName=all Nodes=ip-10-4-33-[1-2]" in repair.conf


def test_names_of_nodes_come_from_hyperpods_list_of_instances():
    text = resources(controller=("10.0.0.1",), cpu=("10.4.33.1", "10.4.33.2"))
    assert read_groups(text)["cpu"] == ("ip-10-4-33-1", "ip-10-4-33-2")
    with pytest.raises(DalsegnoError, match="list of instances cannot be read"):
        read_groups('{"InstanceGroups": [{}]}')


def test_line_that_hyperpods_agent_overwrites_is_added_again(tmp_path, caplog):
    recorded = Path(__file__).parents[2] / "recorded" / "slurm-24.11.5" / "nodes.txt"
    (node,) = [line for line in recorded.read_text().splitlines() if line.startswith("NodeName=cpu-01 ")]
    answers = {
        "partition": "PartitionName=dev Nodes=ip-10-4-33-[1-2],ip-10-3-96-[1-2] State=UP\n",
        "node": "".join(node.replace("cpu-01", name) + "\n" for name in KNOWN),
    }
    runner = FakeRunner(lambda argv, stdin: next((text for word, text in answers.items() if word in "".join(argv)), ""))
    conf, list_ = tmp_path / "slurm.conf", tmp_path / "resources.json"
    conf.write_text(THEIRS)
    conf.chmod(0o640)
    list_.write_text(resources(cpu=("10.4.33.1", "10.4.33.2"), gpu=("10.3.96.1", "10.3.96.2")))
    folder = ClusterFolder(tmp_path / "demo")
    folder.root.mkdir()
    write_applied(folder, cluster_of(CPU + GPU, "", CARE))
    secrets = tmp_path / "agents"
    key = tmp_path / "munge.key"
    key.write_bytes(b"\0key of munge\xff")
    guard = PartitionGuard(folder.root, SlurmClient(runner, {}), conf, list_, secrets, key)
    assert guard.turn().added == ("gpu",)
    assert guard.turn().added == ()
    reconfigured = [call for call in runner.calls if "reconfigure" in call]
    assert len(reconfigured) == 1
    assert len([call for call in runner.calls if "ReservationName=care" in call]) == 1, "once, not in every turn"
    conf.write_text(THEIRS)  # HyperPod's agent has overwritten the file
    repair = guard.turn()
    assert (repair.added, repair.lost) == (("gpu",), ("gpu",))
    assert "PartitionName=gpu" in conf.read_text()
    assert conf.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in secrets.iterdir()} == set(KNOWN)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in secrets.iterdir())
    own = tmp_path / "own"
    subprocess.run([sys.executable, "-I", "-c", DERIVE, key, "demo", "ip-10-4-33-1", own], check=True)
    assert own.read_text() == (secrets / "ip-10-4-33-1").read_text(), "the node and the controller agree"
    assert own.stat().st_mode & 0o777 == 0o600


# Reservations

CARE = "reservations: [{name: care, nodes: [cpu-1, cpu-2], users: [root], duration: 2h}]\n"


def reserved(rest: str, made=None, present=(), known=KNOWN):
    cluster = cluster_of(CPU, "", rest)
    planned = [each.name for each in cluster.reservations]
    return plan_reservations(real_cluster(cluster, GROUPS, known), planned, made or {}, present)


def test_reservation_is_created_with_the_names_that_nodes_have_in_slurm():
    words = reserved(CARE).create["care"]
    assert words[:3] == ("create", "reservation", "ReservationName=care") and "Nodes=ip-10-4-33-[1-2]" in words


def test_reservation_waits_until_slurm_knows_all_its_nodes():
    assert reserved(CARE, known={"ip-10-4-33-1": KNOWN["ip-10-4-33-1"]}).create == {}


def test_reservation_that_ended_or_was_deleted_by_a_person_is_not_created_again():
    made = reserved(CARE).create
    assert reserved(CARE, made) == reserved(CARE, made, ("care",)) == ReservationChange((), {})


def test_changed_reservation_is_recreated_and_one_that_left_the_file_is_deleted():
    made = reserved(CARE).create
    changed = reserved(CARE.replace("2h", "3h"), made, ("care", "theirs"))
    assert changed.delete == ("care",) and list(changed.create) == ["care"]
    assert reserved("", made, ("care", "theirs")) == ReservationChange(("care",), {})
    assert reserved("", made, ()) == ReservationChange((), {}), "it has ended"
