"""The placement of hosts on this machine, which later changes keep."""

import ipaddress
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster, Group, Local, Node, Partition, Slurm, User
from dalsegno.system.cgroups import CgroupTree
from dalsegno.system.machine import MachineFacts
from dalsegno.targets.local.folder import ApplyStage, ClusterState, Folder, ids_of_others, write_state
from dalsegno.targets.local.placement import Free, choose_hosts, place

V1 = CgroupTree(1, "/sys/fs/cgroup/freezer")
ROOT = MachineFacts("Linux", "box", "root", True, "slurm-wlm 22.05.8", True, (), V1)
USER = replace(ROOT, user="ada", is_root=False, namespaces=False)


def cluster(count: int = 2, gpus: int = 0, **more: object) -> Cluster:
    nodes = tuple(Node(f"train-{i}", cpus=2, memory_mib=1000, gpus=gpus) for i in range(1, count + 1))
    return Cluster("demo", "local", nodes, (Partition("train", tuple(n.name for n in nodes)),), **more)  # type: ignore[arg-type]


def put(wanted: Cluster, machine: MachineFacts = ROOT, before: object = None, free: Free | None = None):  # type: ignore[no-untyped-def]
    return place(wanted, machine, "00000000", before, free or Free(), "/state/dev")  # type: ignore[arg-type]


def test_root_gets_virtual_hosts_each_with_its_own_address():
    placed = put(cluster(2))
    assert placed.hosts == "virtual"
    assert placed.addresses == {"head": "10.192.0.2", "train-1": "10.192.0.3", "train-2": "10.192.0.4"}


def test_a_plain_user_gets_loopback_ports_in_a_row():
    placed = put(cluster(2), USER)
    assert placed.hosts == "loopback"
    names = ("slurmctld", "slurmdbd", "agents", "observer", "train-1", "train-2")
    assert placed.ports == {name: 17000 + number for number, name in enumerate(names)}


def test_root_without_namespaces_uses_loopback():
    assert choose_hosts(cluster(), replace(ROOT, namespaces=False)) == "loopback"


def test_impossible_virtual_hosts_are_refused_with_the_reason():
    with pytest.raises(TargetError, match="they need root"):
        put(cluster(local=Local(hosts="virtual")), USER)
    with pytest.raises(TargetError, match="does not permit namespaces"):
        put(cluster(local=Local(hosts="virtual")), replace(ROOT, namespaces=False))


def test_added_node_does_not_move_others():
    first = put(cluster(2))
    second = put(cluster(4), before=first)
    assert {name: second.addresses[name] for name in first.addresses} == first.addresses
    assert len(set(second.addresses.values())) == 5


def test_address_of_a_removed_node_is_reused():
    first = put(cluster(3))
    second = put(cluster(2), before=first)
    third = put(cluster(3), before=second)
    assert third.addresses == first.addresses


def test_a_subnet_in_use_is_avoided():
    used = [ipaddress.IPv4Network("10.192.0.0/16")]
    assert put(cluster(), free=Free(networks=used)).subnet == "10.193.0.0/20"


def test_requested_subnet_must_not_overlap_the_machines_networks():
    used = [ipaddress.IPv4Network("192.168.1.0/24")]
    with pytest.raises(TargetError, match=r"192.168.0.0/16 overlaps 192.168.1.0/24"):
        put(cluster(local=Local(subnet="192.168.0.0/16")), free=Free(networks=used))


def test_running_cluster_keeps_its_subnet():
    first = put(cluster(local=Local(subnet="10.1.0.0/20")))
    with pytest.raises(TargetError, match=r"cannot become 10\.2\.0\.0/20 while it is up"):
        put(cluster(local=Local(subnet="10.2.0.0/20")), before=first)


def test_address_of_a_node_being_removed_is_not_reused():
    first = put(cluster(2))
    nodes = (Node("train-1", 2, 1000), Node("other-1", 2, 1000))
    second = put(replace(cluster(2), nodes=nodes), before=first)
    assert second.addresses["other-1"] not in first.addresses.values()


def test_users_of_the_cluster_keep_their_uids():
    first = put(cluster(users=(User("ada", ("a",), "a"), User("bob", ("a",), "a"))))
    second = put(cluster(users=(User("zoe", ("a",), "a"), User("ada", ("a",), "a"))), before=first)
    assert second.uids["ada"] == first.uids["ada"] and second.uids["zoe"] not in first.uids.values()


def test_users_of_two_clusters_on_one_machine_have_different_ids(tmp_path: Path):
    with_users = cluster(1, users=(User("ada", ("lab",), "lab", groups=("vision",)),), groups=(Group("vision"),))
    first, second = Folder(tmp_path / "one"), Folder(tmp_path / "two")
    first.root.mkdir()
    write_state(first, ClusterState(ApplyStage.UP, put(with_users), "22.05.8"))
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/state.json").write_text('{"target": "ssh"}')
    assert ids_of_others(first) == frozenset(), "a cluster is not its own neighbour"
    placed = put(with_users, free=Free(other_ids=ids_of_others(second)))
    assert (placed.uids["ada"], placed.gids["vision"]) == (20002, 1020002)


def test_a_link_name_in_use_is_avoided():
    assert put(cluster(), free=Free(links=frozenset({"ds00000000"}))).link == "ds000000001"


def test_new_ports_are_free_and_existing_ones_are_kept():
    asked = []

    def port_run(count: int, taken: set[int]) -> int:
        asked.append((count, sorted(taken)))
        return 20000

    first = put(cluster(1), USER, free=Free(port_run=port_run))
    second = put(cluster(2), USER, before=first, free=Free(port_run=lambda count, taken: 21000))
    assert asked == [(5, [])]
    assert second.ports == {**first.ports, "train-2": 21000}


def test_missing_free_ports_are_reported():
    with pytest.raises(TargetError, match="no 5 consecutive free ports"):
        put(cluster(1), USER, free=Free(port_run=lambda count, taken: None))


def test_a_running_cluster_does_not_change_its_kind_of_hosts():
    first = put(cluster())
    with pytest.raises(TargetError, match="cannot change from virtual to loopback"):
        put(cluster(local=Local(hosts="loopback")), before=first)


def test_a_backup_controller_needs_virtual_hosts():
    wanted = cluster(slurm=Slurm(backup_controller=True))
    assert "head-backup" in put(wanted).addresses
    with pytest.raises(TargetError, match="backup controller"):
        put(wanted, USER)


def test_simulated_gpus_are_files_of_the_cluster():
    placed = put(cluster(1, gpus=2))
    assert placed.gpus_simulated
    assert placed.gpu_files["train-1"] == ("/state/dev/nvidia0", "/state/dev/nvidia1")


def test_real_gpus_are_assigned_in_order():
    machine = replace(ROOT, gpu_files=tuple(f"/dev/nvidia{i}" for i in range(4)))
    placed = put(cluster(2, gpus=2), machine)
    assert not placed.gpus_simulated
    assert placed.gpu_files == {
        "train-1": ("/dev/nvidia0", "/dev/nvidia1"),
        "train-2": ("/dev/nvidia2", "/dev/nvidia3"),
    }


def test_too_few_real_gpus_are_simulated_unless_real_is_required():
    machine = replace(ROOT, gpu_files=("/dev/nvidia0",))
    assert put(cluster(2, gpus=2), machine).gpus_simulated
    with pytest.raises(TargetError, match="asks for 4 GPUs, this machine has 1"):
        put(cluster(2, gpus=2, local=Local(gpus="real")), machine)


def test_more_hosts_than_a_bridge_supports_are_refused_with_a_hint():
    with pytest.raises(TargetError) as caught:
        put(cluster(1000))
    assert "loopback" in caught.value.hint
