"""No change of the cluster file deletes a file system, and `down` deletes only what it has named."""

from __future__ import annotations

import json

import pytest

from dalsegno.errors import TargetError
from dalsegno.targets.base import ClusterPhase
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.parallelcluster.folder import read_state
from dalsegno.targets.parallelcluster.plan import PclusterPlan
from tests.targets.parallelcluster.files import MINIMAL, WALKTHROUGH, cluster_of
from tests.targets.parallelcluster.stage import Stage

pytestmark = pytest.mark.cluster  # the tests start hundreds of processes

BOTH = "".join(
    line
    for line in WALKTHROUGH.replace("ml-cluster", "demo").splitlines(keepends=True)
    if not line.lstrip().startswith(("data_repositories", "key:", "allowed_ips"))  # without a key, nothing uses ssh
)
HOME = "  - {name: home, mount: /home, type: openzfs, size: 512G, home: true}\n"
FSX = "  - {name: fsx, mount: /fsx, type: lustre, size: 1200G, throughput: 250}\n"
WITHOUT_FSX = BOTH.replace(FSX, "")
BUCKET = "dalsegno-demo-123456789012-ap-northeast-1"


def id_of(stage: Stage, kind: str) -> str:
    (found,) = [id for id, each in stage.account.file_systems.items() if each["FileSystemType"] == kind]
    return found


def plan_of(stage: Stage, text: str) -> PclusterPlan:
    return stage.target().plan(cluster_of(text))


def forget_policies(stage: Stage) -> None:
    """Remove the policies, as in stacks of earlier versions."""
    template = stage.account.stacks["dalsegno-demo"]["template"]
    for each in template["Resources"].values():
        if each["Type"] == "AWS::FSx::FileSystem":
            for attribute in ("DeletionPolicy", "UpdateReplacePolicy", "Metadata"):
                del each[attribute]


# Changes of the cluster file


@pytest.mark.parametrize("old", [False, True], ids=["this version", "stack of an earlier version"])
def test_storage_removed_from_the_file_keeps_its_file_system_and_plan_says_so(stage: Stage, old: bool):
    stage.up(BOTH)
    id = id_of(stage, "LUSTRE")
    if old:
        forget_policies(stage)
    said = plan_of(stage, WITHOUT_FSX).sentences()
    command = f"aws fsx delete-file-system --file-system-id {id} --region ap-northeast-1"
    (released,) = [line for line in said if line.startswith("stack/Fsx:")]
    assert command in released and "AWS bills it" in released and "not mounted any more" in released
    (unmounted,) = [line for line in said if line.startswith("SharedStorage[fsx]")]
    assert unmounted.endswith(f"it is unmounted everywhere; {id} stays with its files")
    stage.up(WITHOUT_FSX)
    assert stage.account.file_systems[id]["files"] == "files of Fsx"
    assert "Fsx" not in stage.account.stacks["dalsegno-demo"]["template"]["Resources"]
    assert [each["Name"] for each in stage.config()["SharedStorage"]] == ["home"]
    assert plan_of(stage, WITHOUT_FSX).empty


def test_own_file_system_named_as_source_stays_mounted_with_its_files(stage: Stage):
    stage.up(BOTH)
    lustre, zfs = id_of(stage, "LUSTRE"), id_of(stage, "OPENZFS")
    volume = zfs.replace("fs-", "fsvol-")
    named = BOTH.replace("type: lustre, size: 1200G, throughput: 250", f"type: lustre, source: {lustre}")
    named = named.replace("type: openzfs, size: 512G", f"type: openzfs, source: {volume}")
    before = stage.config()["SharedStorage"]
    said = plan_of(stage, named).sentences()
    kept = "it stays mounted with its files; from now on, `dalsegno down` keeps it"
    assert [line.partition(":")[0] for line in said if kept in line] == ["stack/Home", "stack/Fsx"]
    stage.up(named)
    assert stage.config()["SharedStorage"] == before and set(stage.account.file_systems) == {lustre, zfs}
    assert plan_of(stage, named).empty
    assert stage.target().removal().storage == ()
    assert stage.target().removal().kept == (f"bucket {BUCKET}", f"storage home ({volume})", f"storage fsx ({lustre})")
    stage.target().destroy(stage.said.append)
    assert set(stage.account.file_systems) == {lustre, zfs} and stage.account.stacks == {}


@pytest.mark.parametrize(
    ("old", "new", "path", "because"),
    [
        ("size: 1200G", "size: 2400G", "", ""),
        ("size: 512G", "size: 1024G", "", ""),
        ("size: 512G", "size: 256G", "stack/Home/StorageCapacity", "cannot get smaller"),
        ("throughput: 250", "throughput: 500", "stack/Fsx/LustreConfiguration/PerUnitStorageThroughput",
         "replaced by an empty one"),
        ("zone: ap-northeast-1a", "zone: ap-northeast-1c", "stack/PublicSubnet/AvailabilityZone", "would be replaced"),
        ("availability_zone: ap-northeast-1a", "head_subnet: subnet-0a23456789abcdef0\n"
         "  subnets: [subnet-0b23456789abcdef0]\n  security_groups: [sg-0123456789abcdef0]",
         "stack/Vpc", "the cluster uses this part of its network"),
    ],
)  # fmt: skip
def test_change_of_the_stack_is_applied_in_place_or_refused(stage: Stage, old, new, path, because):
    stage.up(BOTH)
    before = json.dumps(stage.account.file_systems)
    assert old in BOTH
    changed = BOTH.replace(old, new)
    said = plan_of(stage, changed).sentences()
    updates = stage.account.calls.count("update_stack")
    if path:
        assert any(line.startswith(path) and because in line for line in said), said
        with pytest.raises(TargetError, match="cannot change on a running cluster"):
            stage.up(changed)
        assert stage.account.calls.count("update_stack") == updates and plan_of(stage, BOTH).empty
    else:
        assert any("grows while it is used" in line for line in said), said
        stage.up(changed)
        assert stage.account.calls.count("update_stack") == updates + 1 and plan_of(stage, changed).empty
    assert json.dumps(stage.account.file_systems) == before


def test_storage_added_to_a_running_cluster_is_created_and_named_in_the_plan(stage: Stage):
    stage.up(WITHOUT_FSX)
    plan = plan_of(stage, BOTH)
    assert [(each.noun, each.names) for each in plan.resources] == [("FSx for Lustre file system", ("fsx",))]
    assert plan.time.most > 20
    stage.up(BOTH)
    assert [each["Name"] for each in stage.config()["SharedStorage"]] == ["home", "fsx"]
    settings = stage.config()["SharedStorage"][1]["FsxLustreSettings"]
    assert settings == {"FileSystemId": id_of(stage, "LUSTRE")} and plan_of(stage, BOTH).empty


def test_reservation_added_or_removed_later_leaves_the_network_in_its_zone(stage: Stage):
    reserved = MINIMAL.replace("us-east-1}", "us-east-1, capacity_reservation: cr-0123456789abcdef0}")
    stage.account.zone = "us-east-1b"
    stage.account.reservations = [{
        "CapacityReservationId": "cr-0123456789abcdef0", "InstanceType": "p5.48xlarge", "State": "active",
        "AvailabilityZone": "us-east-1b", "TotalInstanceCount": 4, "AvailableInstanceCount": 4,
    }]  # fmt: skip
    for before, after in ((reserved, MINIMAL), (MINIMAL, reserved)):
        stage.up(before)
        assert not [line for line in plan_of(stage, after).sentences() if line.startswith("stack/")]
        stage.target().destroy(stage.said.append)


def test_failed_update_of_the_stack_is_repeated_or_undone_by_the_next_up(stage: Stage):
    stage.up(BOTH)
    grown = BOTH.replace("size: 512G", "size: 1024G")
    stage.account.refusals.append(("update_stack", CloudRefusal.DENIED))
    with pytest.raises(CloudError):
        stage.up(grown)
    assert any("StorageCapacity: 512 → 1024" in line for line in plan_of(stage, grown).sentences())
    stage.account.stacks["dalsegno-demo"]["status"] = "UPDATE_ROLLBACK_COMPLETE"
    stage.up(BOTH)
    assert stage.target().status().phase is ClusterPhase.UP


# Removal


def test_down_deletes_the_file_systems_that_it_named_before_their_network(stage: Stage):
    stage.up(BOTH)
    removal = stage.target().removal()
    assert removal.homes == (), "they are on a file system of their own"
    assert removal.sentences([]) == [
        "deletes the files of storage demo-home (FSx OPENZFS, 512 GiB), demo-fsx (FSx LUSTRE, 1200 GiB)",
        f"keeps bucket {BUCKET}",
    ]
    assert stage.target().destroy(stage.said.append)
    assert stage.account.file_systems == {} and stage.account.stacks == {} and not stage.folder.exists()
    assert stage.account.backups == [], "a backup of OpenZFS would cost money, and nobody would know it"
    assert stage.account.buckets == {BUCKET}


def test_down_that_failed_halfway_continues(stage: Stage):
    stage.up(BOTH)
    stage.account.refusals.append(("delete_stack", CloudRefusal.DENIED))
    with pytest.raises(CloudError):
        stage.target().destroy(stage.said.append)
    assert stage.account.file_systems == {} and stage.account.stacks != {} and stage.folder.exists()
    assert stage.target().destroy(stage.said.append)
    assert stage.account.stacks == {} and not stage.folder.exists()


def test_down_after_somebody_deleted_the_stack_finds_the_file_systems(stage: Stage):
    stage.up(BOTH)
    del stage.account.stacks["dalsegno-demo"]
    assert stage.target().destroy(stage.said.append)
    assert stage.account.file_systems == {}


def test_down_after_somebody_deleted_a_file_system_removes_the_rest(stage: Stage):
    stage.up(BOTH)
    del stage.account.file_systems[id_of(stage, "LUSTRE")]
    assert stage.target().destroy(stage.said.append)
    assert stage.account.file_systems == {} and stage.account.stacks == {}


def test_down_keeps_a_file_system_that_left_the_file_and_its_network(stage: Stage):
    stage.up(BOTH)
    id = id_of(stage, "LUSTRE")
    stage.up(WITHOUT_FSX)
    removal = stage.target().removal()
    assert f"file system {id}, which the cluster file does not have any more" in removal.kept
    assert removal.storage == ("demo-home (FSx OPENZFS, 512 GiB)",)
    assert stage.target().destroy(stage.said.append)
    assert list(stage.account.file_systems) == [id] and stage.account.stacks == {}
    assert f"keeping the network of {id}" in stage.said


def test_down_deletes_the_network_if_the_kept_file_system_is_gone(stage: Stage):
    stage.up(BOTH)
    id = id_of(stage, "LUSTRE")
    stage.up(WITHOUT_FSX)
    del stage.account.file_systems[id]
    stage.target().destroy(stage.said.append)
    assert stage.account.stacks == {} and not any(line.startswith("keeping the network") for line in stage.said)


def test_file_systems_of_a_failed_creation_are_deleted_before_the_next_one(stage: Stage):
    stage.account.stack_fails = "The maximum number of addresses has been reached."
    with pytest.raises(TargetError, match="addresses"):
        stage.up(BOTH)
    first = set(stage.account.file_systems)
    stage.account.stack_fails = ""
    stage.up(BOTH)
    state = read_state(stage.target().folder)
    assert state is not None and len(first) == 2
    assert set(stage.account.file_systems) == set(state.file_systems.values())


def test_bucket_that_down_kept_is_used_by_the_next_up(stage: Stage):
    """CloudFormation refuses to create a bucket that exists."""
    stage.up(BOTH)
    stage.target().destroy(stage.said.append)
    assert stage.account.buckets == {BUCKET}
    stage.up(BOTH)
    assert "Bucket" not in stage.account.stacks["dalsegno-demo"]["template"]["Resources"]
    assert plan_of(stage, BOTH).empty and any(key.startswith(f"s3://{BUCKET}/") for key in stage.account.objects)


def test_down_names_home_folders_on_the_head_node_and_storage_that_stays(stage: Stage):
    disks = "{name: tools, mount: /tools, type: efs}, {name: disk, mount: /d, type: ebs, size: 100G}"
    stage.up(f"{MINIMAL}users: [{{name: ada}}]\nstorage: [{disks}]\n")
    removal = stage.target().removal()
    assert removal.homes == ("ubuntu", "ada") and removal.storage == ()
    assert removal.kept[1:] == ("EFS file system of storage tools", "EBS volume of storage disk")
