"""Hosts without a cluster: `plan` says why a host is unfit and changes nothing, and mounts are added and removed."""

from __future__ import annotations

import base64
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

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
from tests.ssh.hosts import VirtualHost, make_key, reason_to_skip, running_hosts

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


def changed_keys(operator: Operator, *names: str) -> str:
    """Return the known_hosts file with the key of another host for each of these hosts."""
    known = dict(line.split(" ", 1) for line in operator.rack.known_hosts.read_text().splitlines())
    other = {name: next(host for host in operator.rack.hosts if host.name != name) for name in names}
    keys = {operator.rack[name].address: known[host.address] for name, host in other.items()}
    return "".join(f"{address} {key}\n" for address, key in {**known, **keys}.items())


def test_head_that_cannot_be_trusted_or_refuses_the_key_stops_up(bare):
    text, known = bare.file.read_text(), bare.rack.known_hosts.read_text()
    make_key(bare.folder / "other-key")
    bare.file.write_text(text.replace(f"key: {bare.rack.key}", f"key: {bare.folder / 'other-key'}"))
    assert "head: " in (said := bare.up(code=1).err) and "authorized_keys" in said
    bare.file.write_text(text)
    for file, says in (("", "ssh-keyscan"), (changed_keys(bare, "head"), "ssh-keygen")):
        bare.rack.known_hosts.write_text(file)
        assert says in bare.up(code=1).err
        assert bare.rack.known_hosts.read_text() == file, "the key is not accepted by itself"
    bare.rack.known_hosts.write_text(known)
    left = [host.run("sh", "-c", "ls -d /var/lib/dalsegno /opt/* 2>/dev/null || true") for host in bare.rack.hosts]
    assert left == [""] * 4 and not bare.state.exists()


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


def test_host_with_the_name_of_another_is_left_out(bare):
    bare.rack["n2"].run("hostname", "n1")
    shown = bare.dalsegno("plan", str(bare.file)).out
    assert "leaves out n2: its host name is `n1`, the same as on n1" in shown and "leaves out n1" not in shown
    bare.rack["n2"].run("hostname", "head")
    shown = bare.dalsegno("plan", str(bare.file)).out
    assert "leaves out n2: its host name is `head`, the same as on head" in shown and "creates lab: 3 nodes" in shown
    bare.rack["n2"].run("hostname", "n2")


# A plugin with the name and the option of Pyxis, so that a job shows which plugin took the option.
PYXIS = r"""
#include <slurm/spank.h>
SPANK_PLUGIN(pyxis, 1);
static char image[64];
static int take(int value, const char *argument, int remote)
{
    snprintf(image, sizeof image, "%s", argument);
    return 0;
}
struct spank_option spank_options[] = {
    {"container-image", "IMAGE", "image of the container", 1, 0, take}, SPANK_OPTIONS_TABLE_END};
int slurm_spank_task_init(spank_t job, int count, char **words)
{
    return image[0] ? spank_setenv(job, "IMAGE", image, 1) : 0;
}
"""
STACK = "cat /etc/slurm/plugstack.conf /etc/slurm/plugstack.conf.d/*"


def install_pyxis(operator: Operator, *hosts: str) -> None:
    source, built = operator.folder / "pyxis.c", operator.folder / "spank_pyxis.so"
    source.write_text(f"#include <stdio.h>\n{PYXIS}")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source], check=True, timeout=60)
    script = (
        "mkdir -p /etc/slurm/plugstack.conf.d /usr/local/lib/slurm && cd /etc/slurm && "
        "base64 -d > /usr/local/lib/slurm/spank_pyxis.so && echo 'include plugstack.conf.d/*' > plugstack.conf && "
        "echo 'required /usr/local/lib/slurm/spank_pyxis.so' > plugstack.conf.d/pyxis.conf && "
        "touch /usr/bin/enroot && chmod 755 /usr/bin/enroot"
    )
    for name in hosts:
        operator.rack[name].run("sh", "-c", script, stdin=base64.b64encode(built.read_bytes()).decode())


@pytest.mark.skipif(not Path("/usr/include/slurm/spank.h").exists(), reason="needs libslurm-dev")
def test_installed_pyxis_is_used_and_hosts_without_it_are_left_out(bare):
    install_pyxis(bare, "head", "n1")
    before = bare.on_head("sh", "-c", STACK)
    more = "users: [{name: ada}]\nslurm: {accounting: false}\nhealth: {mode: off}\ncontainers: {enabled: true}\n"
    bare.write(nodes="n[1-2]", more=more)
    shown = bare.dalsegno("plan", str(bare.file)).out
    assert "uses the installed Pyxis for containers" in shown and "plugstack" not in shown and "gcc" not in shown
    assert "leaves out n2: its Slurm does not load Pyxis, and the head's does" in shown
    bare.write(nodes="n1", more=more)
    bare.up()
    as_ada = ["runuser", "-u", "ada", "--"]
    assert bare.on_head(*as_ada, "srun", "--container-image=own.sqsh", "printenv", "IMAGE") == "own.sqsh\n"
    assert "nothing to do" in bare.up().err
    bare.dalsegno("down", "--yes")
    for name in ("head", "n1"):
        assert bare.rack[name].run("sh", "-c", STACK) == before
        assert bare.rack[name].run("sh", "-c", "ls -d /usr/local/lib/dalsegno 2>/dev/null || true") == ""
        bare.rack[name].run("rm", "-r", "/etc/slurm/plugstack.conf", "/etc/slurm/plugstack.conf.d", "/usr/bin/enroot")
    bare.write(nodes="n[1-3]")
