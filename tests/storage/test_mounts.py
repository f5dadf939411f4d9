"""Tests of what hosts export and mount: values, and the system files against golden files.

The files are not applied here, because that needs an NFS server and client in the kernel.
"""

from collections.abc import Callable

import pytest

from dalsegno.setup.machine_mounts import refuse_taken
from dalsegno.setup.machine_record import BEGIN, END, Refused
from dalsegno.spec.facts import Cluster, Node, Storage
from dalsegno.storage.mounts import HostStorage, MountPlan, NfsExport, fstab_line, host_storage, render_exports

ADDRESSES = {"mgmt": "192.0.2.10", "login1": "192.0.2.11", "gpu1": "192.0.2.21", "gpu2": "192.0.2.22"}
NODES = (Node("gpu1", 4, 8000), Node("gpu2", 4, 8000))
STORAGE = (
    Storage("home", "/home", home=True),
    Storage("data", "/data", source="/tank/data", options="nconnect=16"),
    Storage("old", "/old", type="nfs", source="mgmt:/export/old"),
    Storage("archive", "/mnt/archive-1", type="nfs", source="filer:/vol/archive", options="ro,soft"),
    Storage("fast", "/fast", type="lustre", source="192.0.2.90@o2ib:/fast"),
    Storage("site", "/site", type="existing"),
    Storage("scratch", "/scratch", type="scratch"),
)


def lab(*storage: Storage) -> Cluster:
    return Cluster("lab", "ssh", NODES, (), head="mgmt", logins=("login1",), storage=storage)


def of(host: str, *storage: Storage) -> HostStorage:
    return host_storage(lab(*storage), host, ADDRESSES)


CLIENTS = ("192.0.2.11", "192.0.2.21", "192.0.2.22")


def test_head_exports_a_folder_to_its_own_hosts_only_and_mounts_it_at_the_same_path():
    head = of("mgmt", Storage("home", "/home", home=True))
    assert head.exports == (NfsExport("home", "/srv/dalsegno/home", CLIENTS, home=True),)
    assert head.mounts == (MountPlan("home", "/srv/dalsegno/home", "/home", "none", ("bind", "nofail")),)
    assert head.packages == ("nfs-kernel-server",)
    assert head.folders == ("/srv/dalsegno/home", "/home")


def test_other_hosts_mount_the_folder_of_the_head_over_nfs():
    node = of("gpu1", Storage("home", "/home", home=True))
    (mount,) = node.mounts
    assert (mount.source, mount.mount, mount.fstype) == ("192.0.2.10:/srv/dalsegno/home", "/home", "nfs")
    assert (node.exports, node.packages, node.folders) == ((), ("nfs-common",), ("/home",))


@pytest.mark.parametrize("server", ["mgmt", "192.0.2.10"])
def test_nfs_whose_server_is_the_head_is_served_by_it(server: str):
    storage = Storage("old", "/old", type="nfs", source=f"{server}:/export/old")
    assert [each.folder for each in of("mgmt", storage).exports] == ["/export/old"]
    assert of("gpu2", storage).mounts[0].source == "192.0.2.10:/export/old"


def test_nfs_of_another_server_is_mounted_everywhere_and_exported_nowhere():
    storage = Storage("a", "/a", type="nfs", source="filer:/vol/a")
    hosts = [of(name, storage) for name in ADDRESSES]
    assert {host.mounts[0].source for host in hosts} == {"filer:/vol/a"}
    assert not any(host.exports for host in hosts)


def test_folder_that_is_its_own_mount_point_is_not_mounted_on_the_head():
    assert of("mgmt", Storage("data", "/data", source="/data")).mounts == ()


def test_existing_storage_is_only_checked():
    assert of("gpu1", Storage("site", "/site", type="existing")) == HostStorage(existing=("/site",))


def test_scratch_is_on_compute_nodes_only():
    scratch = Storage("scratch", "/scratch", type="scratch")
    assert [of(name, scratch).scratch for name in ("mgmt", "login1", "gpu1")] == ["", "", "/scratch"]


@pytest.mark.parametrize(
    ("given", "there", "gone"),
    [("", "hard", "soft"), ("soft", "soft", "hard"), ("relatime", "relatime", "noatime"), ("ro", "hard", "rw")],
)
def test_given_options_win_over_the_defaults(given: str, there: str, gone: str):
    options = of("gpu1", Storage("a", "/a", type="nfs", source="filer:/a", options=given)).mounts[0].options
    assert there in options and gone not in options
    assert {"_netdev", "nofail"} <= set(options), "a host must boot without its file server"


def test_exports_match_the_golden_file(golden: Callable[[str, str], None]):
    golden("storage/exports", render_exports("lab", of("mgmt", *STORAGE).exports))


@pytest.mark.parametrize("host", ["mgmt", "gpu1"])
def test_fstab_matches_the_golden_file(host: str, golden: Callable[[str, str], None]):
    golden(f"storage/fstab.{host}", "".join(f"{fstab_line(mount)}\n" for mount in of(host, *STORAGE).mounts))


LINES = [{"path": "/home", "line": "192.0.2.10:/srv/dalsegno/home /home nfs hard 0 0"}]


def test_fstab_line_of_the_administrator_is_not_overridden():
    with pytest.raises(Refused, match="already mounts something at /home") as raised:
        refuse_taken(LINES, "filer:/home /home nfs defaults 0 0\n")
    assert "type: existing" in raised.value.hint


def test_commented_fstab_line_and_our_own_do_not_count():
    own = f"{BEGIN}\n{LINES[0]['line']}\n{END}\n"
    refuse_taken(LINES, f"# filer:/home /home nfs defaults 0 0\nUUID=1 / ext4 defaults 0 1\n{own}")
