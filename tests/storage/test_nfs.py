"""NFS as `target: ssh` sets it up, with the kernel's server and client on one machine.

It needs root, systemd and a kernel with both modules, like that of the virtual machine of `./test --long`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.setup.delivery import (
    Answer,
    ChangeAction,
    ChangeKind,
    MachineChange,
    applier_argv,
    apply_request,
    compare_request,
    read_answer,
    remove_request,
)
from dalsegno.setup.node_plan import HostParts, NodePlan
from dalsegno.spec.facts import Cluster, Storage
from dalsegno.targets.ssh.storage import storage_parts

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]
SERVED, MOUNT = "/srv/dalsegno-test/data", "/mnt/dalsegno-data"
ADDRESSES = {"head": "127.0.0.2", "n1": "127.0.0.1"}  # the client's connections come from the second
CLUSTER_ID = "c0ffee"


def parts(host: str, storage: Storage) -> HostParts:
    cluster = Cluster("lab", "ssh", (), (), head="head", storage=(storage,))
    return storage_parts(cluster, host, ADDRESSES, debian=True)


SERVER = parts("head", Storage("data", SERVED, source=SERVED))
CLIENT = parts("n1", Storage("data", MOUNT, type="nfs", source=f"127.0.0.1:{SERVED}"))


def plan_of(each: HostParts) -> NodePlan:
    return NodePlan(
        "lab", CLUSTER_ID, "head", packages=each.packages, folders=each.folders, files=each.files,
        commands=each.commands, services=each.services, mounts=each.mounts,
    )  # fmt: skip


def ask(request: bytes) -> Answer:
    done = subprocess.run(applier_argv(), input=request, capture_output=True, timeout=300, check=False)
    return read_answer("head", (done.stdout or done.stderr).decode())


def printed(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def mounted() -> Iterator[NodePlan]:
    """The machine as server and client of one folder. The server is set up first, as the head is."""
    if os.geteuid() != 0 or not Path("/run/systemd/system").is_dir() or not shutil.which("exportfs"):
        pytest.skip("needs root, systemd and the package nfs-kernel-server")
    if any(subprocess.run(["modprobe", name], capture_output=True).returncode for name in ("nfsd", "nfsv4")):
        pytest.skip("this kernel has no NFS server or client")
    ask(apply_request(plan_of(SERVER)))
    plan = plan_of(SERVER + CLIENT)
    ask(apply_request(plan))
    yield plan
    ask(apply_request(plan_of(SERVER)))
    ask(remove_request(CLUSTER_ID))
    shutil.rmtree(SERVED)


def test_client_mounts_the_folder_of_the_server_and_sees_its_files(mounted):
    fstype, options = printed("findmnt", "-no", "FSTYPE,OPTIONS", MOUNT).split()
    assert fstype == "nfs4" and {"hard", "noatime", "rw"} <= set(options.split(","))
    as_user = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
    printed(*as_user, "sh", "-c", f"echo hello > {MOUNT}/greeting")
    assert printed("stat", "-c", "%u", f"{SERVED}/greeting") == "12345\n"
    assert Path(SERVED, "greeting").read_text() == "hello\n"


def test_root_of_a_client_has_no_rights_of_root_on_the_server(mounted):
    Path(MOUNT, "by-root").touch()
    assert Path(SERVED, "by-root").stat().st_uid == 65534
    Path(SERVED, "private").touch(0o600)
    with pytest.raises(PermissionError):
        Path(MOUNT, "private").read_text()


def test_folder_is_exported_to_the_hosts_of_the_cluster_only(mounted):
    assert [line.split("(")[0].split() for line in printed("exportfs", "-s").splitlines()] == [[SERVED, "127.0.0.1"]]


def test_set_up_is_complete_after_one_run_and_repairs_an_unmounted_folder(mounted):
    assert ask(compare_request(mounted)).changes == ()
    printed("umount", MOUNT)
    assert ask(apply_request(mounted)).changes == (MachineChange(ChangeKind.MOUNT, MOUNT, ChangeAction.CREATE),)
    assert Path(MOUNT, "greeting").exists()


def test_removal_unmounts_and_stops_exporting_and_keeps_the_files(mounted):
    ask(apply_request(plan_of(SERVER)))  # clients leave before their server
    assert not os.path.ismount(MOUNT)
    ask(remove_request(CLUSTER_ID))
    assert SERVED not in printed("exportfs", "-s")
    assert SERVED not in Path("/etc/fstab").read_text()
    assert Path(SERVED, "greeting").exists()
    ask(apply_request(plan_of(SERVER)))
    ask(apply_request(mounted))
    assert Path(MOUNT, "greeting").exists()
