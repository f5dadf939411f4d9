"""Hosts without a cluster: `plan` says why it cannot use one and changes nothing, and mounts come and go."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from dalsegno.errors import TargetError
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
from dalsegno.setup.node_plan import NodePlan, PlannedFile, PlannedFolder, PlannedMount
from tests.ssh.cluster_operator import Operator
from tests.ssh.hosts import VirtualHost, reason_to_skip, running_hosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Four hosts without a cluster."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("bare")
    with running_hosts(4, folder / "hosts", names=["head", "n1", "n2", "n3"], disk_mib=700) as rack:
        operator = Operator(folder, rack)
        operator.clear_hosts()
        operator.write(nodes="n[1-3]")
        yield operator


def test_unfit_hosts_are_left_out_with_the_reason(bare):
    bare.rack["n1"].run("sh", "-c", "mkdir -p /etc/slurm; echo ClusterName=theirs > /etc/slurm/slurm.conf")
    bare.rack["n2"].run("sh", "-c", "head -c 400M /dev/zero > /var/filler")
    shown = bare.dalsegno("plan", str(bare.file)).out
    assert "leaves out n1: another Slurm is set up there: it has /etc/slurm/slurm.conf" in shown
    assert "leaves out n2: /var has" in shown
    assert bare.rack["n1"].run("cat", "/etc/slurm/slurm.conf") == "ClusterName=theirs\n"
    left = [host.run("sh", "-c", "ls -d /var/lib/dalsegno /opt/* 2>/dev/null || true") for host in bare.rack.hosts]
    assert left == [""] * 4
    assert not bare.state.exists()
    bare.rack["n1"].run("rm", "/etc/slurm/slurm.conf")
    bare.rack["n2"].run("rm", "/var/filler")


def test_head_with_another_slurm_stops_everything(bare):
    bare.rack["head"].run("sh", "-c", "mkdir -p /etc/slurm; echo ClusterName=theirs > /etc/slurm/slurm.conf")
    done = bare.dalsegno("up", str(bare.file), code=1)
    assert "head: another Slurm is set up there" in done.err
    assert not bare.state.exists()
    bare.rack["head"].run("rm", "/etc/slurm/slurm.conf")


def test_mount_of_a_plan_is_mounted_once_and_unmounted_without_loss(bare):
    line = "/srv/data /data none bind,nofail 0 0"
    plan = NodePlan("lab", "c0ffee", "n3", mounts=(PlannedMount("/data", line),),
                    folders=(PlannedFolder("/srv/data", 0o1777, keep=True),),
                    files=(PlannedFile("/etc/fstab", f"{line}\n", block=True),))  # fmt: skip
    host = bare.rack["n3"]

    def ask(request: bytes) -> Answer:
        return read_answer("n3", host.run(*applier_argv(), stdin=request.decode()))

    mounted = MachineChange(ChangeKind.MOUNT, "/data", ChangeAction.CREATE)
    assert mounted in ask(apply_request(plan)).changes
    host.run("sh", "-c", "touch /data/kept; mountpoint -q /data")
    assert ask(compare_request(plan)).changes == ()
    host.run("umount", "/data")  # as after a boot without the mount
    assert ask(apply_request(plan)).changes == (mounted,)
    ask(remove_request("c0ffee"))
    assert (
        host.run("sh", "-c", "ls -d /data 2>/dev/null; ls /srv/data; grep -c /data /etc/fstab || true") == "kept\n0\n"
    )
    host.run("sh", "-c", "mkdir /data; mount -t tmpfs theirs /data")
    with pytest.raises(TargetError, match="something is mounted at /data already"):
        read_answer("n3", _output(host, compare_request(plan)))
    host.run("sh", "-c", "umount /data; rmdir /data; rm -r /srv/data")


def _output(host: VirtualHost, request: bytes) -> str:
    return host.run("sh", "-c", f"{shlex.join(applier_argv())} || true", stdin=request.decode())


def test_two_hosts_with_one_name_are_refused(bare):
    bare.rack["n2"].run("hostname", "n1")
    done = bare.dalsegno("up", str(bare.file), code=1)
    assert "n1 and n2 both call themselves `n1`" in done.err
    bare.rack["n2"].run("hostname", "n2")
