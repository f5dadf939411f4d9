"""Container jobs on a cluster that knows nothing of us, whose hosts are reached by a real ssh."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.containers.native import PLUGIN, build_native
from dalsegno.system.processes import LocalRunner
from tests.cluster.conftest import Answer, at_home, taken_down
from tests.cluster.test_containers import Contained, make_image, text_of
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")

FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 2, cpus: 4, memory: 1G, default: true}
users:
  - {name: ada}
slurm: {accounting: false}
health: {mode: observe}
"""
HOSTS = ("head", "train-1", "train-2")
PORT = 2222
SSHD = """
Port {port}
HostKey {folder}/host-{host}
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{host}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
SetEnv PATH={home}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin SHLVL=2
"""  # the level keeps bash from what .bashrc has of this machine
FAR = """
name: far
target: ssh
ssh:
  port: {port}
  key: {folder}/key
  user: {user}
  hosts: {hosts}
partitions:
  - {{name: train, nodes: 2}}
"""


@dataclass(frozen=True)
class Far:
    """Hosts with disks of their own, an sshd, and Slurm's files where any Slurm has them; none of our marks."""

    cluster: Contained
    ada: Contained

    @property
    def home(self) -> Path:
        return self.cluster.cli.home

    @property
    def disk(self) -> Path:
        """On each host another; plugstack.conf is in a folder of it that has a blank in its name."""
        return self.home / "disk"

    @property
    def stack(self) -> Path:
        return self.disk / "own etc/plugstack.conf"

    def lay(self, stacks: Mapping[str, str | None]) -> None:
        """Empty disks, but for each host's plugstack.conf."""
        for host in HOSTS:
            self.cluster.on(host, "sh", "-c", 'rm -rf "$1"/*; mkdir -p "$1/own etc"', "sh", str(self.disk))
            if (text := stacks.get(host)) is not None:
                self.cluster.on(host, "sh", "-c", 'printf "%s\\n" "$2" >"$1"', "sh", str(self.stack), text)

    def read(self, host: str, script: str) -> list[str]:
        """What a script says on a host, with its disk as $1, and as ssh brings it there."""
        words = f"set -- {self.disk}; {script}"
        argv = ["ssh", "-o", "BatchMode=yes", *self.options("-o"), "-p", str(PORT), f"root@{self.address(host)}", words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        return done.stdout.splitlines()

    def address(self, host: str) -> str:
        lines = (self.home / "clusters/one/etc/hosts").read_text().splitlines()
        return next(line.split()[0] for line in lines if line.split()[1:] == [host])

    def options(self, flag: str) -> list[str]:
        folder = self.home / "ssh"
        said = (
            f"IdentityFile={folder}/key",
            f"UserKnownHostsFile={folder}/known",
            "IdentitiesOnly=yes",
            "ConnectTimeout=60",
        )
        return [word for each in said for word in (flag, each)]

    def check(self, *args: str, user: str = "root", known: bool = True) -> Answer:
        """From outside of the cluster, by a file that names its hosts."""
        hosts = json.dumps({host: self.address(host) for host in HOSTS})
        text = FAR.format(port=PORT, folder=self.home / "ssh", user=user, hosts=hosts)
        options = self.options("--ssh-option") if known else ["-o", f"UserKnownHostsFile={self.home}/none"]
        file = self.cluster.cli.file(text, "far.yaml")
        return self.cluster.cli.run("containers", "check", file, "--folder", f"{self.disk}/ours", *options, *args)

    def start_sshd(self, host: str) -> None:
        folder = self.home / "ssh"
        self.cluster.on(host, "/usr/sbin/sshd", "-f", str(folder / f"{host}.conf"), "-E", str(folder / f"{host}.log"))
        eventually(lambda: self.listens(host))

    def stop_sshd(self, host: str) -> None:
        pid = self.home / f"ssh/{host}.pid"
        self.cluster.on(host, "sh", "-c", 'kill "$(cat "$1")"', "sh", str(pid))
        eventually(lambda: not self.listens(host))

    def listens(self, host: str) -> bool:
        with socket.socket() as probe:
            probe.settimeout(5)
            return probe.connect_ex((self.address(host), PORT)) == 0


def prepare(far: Far, host: str) -> None:
    folder, etc = far.home / "ssh", far.home / "clusters/one/etc"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / f"host-{host}"], check=True)
    key = " ".join((folder / f"host-{host}.pub").read_text().split()[:2])
    with open(folder / "known", "a") as known:
        known.write(f"[{far.address(host)}]:{PORT},[{host}]:{PORT} {key}\n")
    (folder / f"{host}.conf").write_text(SSHD.format(port=PORT, folder=folder, host=host, home=far.home))
    own = far.home / f"tmp/etc-{host}"
    shutil.copytree(etc, own)
    (own / "cluster-id").unlink()
    (own / "plugstack.conf").unlink()
    with open(own / "slurm.conf", "a") as conf:
        conf.write(f'PlugStackConfig="{far.stack}"\n')
    script = 'mount -t tmpfs none /run; mkdir /run/sshd; mount -t tmpfs -o mode=755 none "$1"; mount --bind "$2" "$3"; '
    script += 'mount --bind "$2" /etc/slurm; mount --bind "$4" /etc/ssh/ssh_config.d'
    words = ["sh", "-ec", script, "sh", str(far.disk), str(own), str(etc), str(far.home / "ssh_config.d")]
    far.cluster.on(host, *words)
    far.start_sshd(host)


@pytest.fixture(scope="module")
def far(cache: Path) -> Iterator[Far]:
    with taken_down(at_home(cache)) as cli:
        image = make_image(cli.home)
        cli.ok("up", cli.file(FILE))
        far = Far(Contained(cli, image), Contained(cli, image, "ada"))
        for name in ("ssh", "disk", "bin", "ssh_config.d"):
            (cli.home / name).mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", cli.home / "ssh/key"], check=True)
        for host in HOSTS:
            prepare(far, host)
        far.cluster.lines("scontrol reconfigure")
        yield far
        for host in HOSTS:
            far.stop_sshd(host)


def batch(far: Far, user: Contained, node: str) -> str:
    """What a batch script on a node gets from its srun with --container-image."""
    said = far.home / "tmp/batch.out"
    said.unlink(missing_ok=True)
    inner = "srun $I sh -c 'echo from \\$FROM_IMAGE' 2>&1; echo end"
    user.lines(f'cd {far.home}/tmp; unset TMPDIR; sbatch -w {node} -o {said} --wrap "{inner}"')
    eventually(lambda: text_of(said).endswith("end\n"))
    return text_of(said)


@contextmanager
def sudo(far: Far) -> Iterator[None]:
    """ada may do anything on the hosts, and is asked for no password."""
    rights, shadow = far.home / "sudoers", far.home / "shadow"
    rights.write_text("ada ALL=(ALL) NOPASSWD: ALL\n")
    rights.chmod(0o440)
    shadow.write_text("root:*:19000::::::\nada:*:19000::::::\n")
    shadow.chmod(0o640)
    script = 'mount --bind "$1" /etc/sudoers && mount --bind "$2" /etc/shadow'
    for host in HOSTS:
        far.cluster.on(host, "sh", "-c", script, "sh", str(rights), str(shadow))
    yield
    for host in HOSTS:
        far.cluster.on(host, "umount", "/etc/sudoers", "/etc/shadow")


IN_IMAGE = "from as it says\nend\n"
INSTALLED = 'cd "$1/ours" && sha256sum */dalsegno* && tail -n 1 "$1/own etc/plugstack.conf"'


def test_a_cluster_without_any_plugin_gets_ours_on_every_host_that_answers(far: Far):
    far.lay(
        {"head": "required /nowhere/x.so", "train-1": "# mine"}
    )  # that one must go before the head shows what it lacks
    unknown = far.check(known=False)
    assert unknown.code == 1 and "Host key verification failed" in unknown.out
    assert "StrictHostKeyChecking=accept-new" in unknown.out

    planned = far.check("--repair", "--dry-run", "--json")
    told = json.loads(planned.out)
    assert planned.code == 1 and [each["host"] for each in told["planned"]] == list(HOSTS) and told["repaired"] == []
    assert far.read("train-1", 'ls "$1"; cat "$1/own etc/plugstack.conf"') == ["own etc", "# mine"]

    far.stop_sshd("train-2")
    with sudo(far):
        first = far.check("--repair", user="ada")
    assert first.code == 1 and "train-2: could not be asked: ssh: " in first.out, first
    assert "Connection refused" in first.out and "is sshd running there?" in first.out
    assert (
        "warning: train-2 could not be asked: where it reads a plugstack.conf that others read too, no job" in first.err
    )
    assert far.read("train-1", 'stat -c "%U %a" "$1"/ours/*/dalsegno_container.so') == ["root 755"]
    assert batch(far, far.ada, "train-1") == IN_IMAGE
    far.start_sshd("train-2")

    # There it was interrupted once: what lies there half is put right, and the rest is left alone.
    lines = far.read("train-1", INSTALLED)
    build = lines[0].split()[1].split("/")[0]
    far.read("train-2", f'mkdir -p "$1/ours/{build}" && echo half >"$1/ours/{build}/dalsegno-container"')
    times = 'stat -c "%n %Y %i" "$1"/ours/* "$1/own etc"/*'
    before = far.read("train-1", times)
    again = far.check("--repair", "--json")
    assert again.code == 0, again
    assert [each["host"] for each in json.loads(again.out)["repaired"]] == ["train-2"]
    assert far.read("train-2", INSTALLED) == lines and far.read("train-1", times) == before
    assert far.read("train-1", f'ls -A "$1/ours" "$1/ours/{build}"').count("dalsegno_container.so") == 1
    assert far.read("train-2", 'find "$1" -name ".new*" -o -name ".*dalsegno.*"') == []

    for someone in (far.cluster, far.ada):
        assert someone.lines("srun -N2 $I sh -c 'echo from $FROM_IMAGE'") == ["from as it says"] * 2
        assert batch(far, someone, "train-2") == IN_IMAGE
    named = "srun -w train-1 --container-name=mine"
    assert far.ada.lines(f"{named} $I touch /kept; {named} ls /kept") == ["/kept"]
    run = far.ada.sh(
        f"dalsegno run --framework=plain -N2 --container-image={far.cluster.image} echo within", timeout_s=120
    )
    assert run.code == 0 and run.out.count("within") == 2, run


def test_a_plugstack_that_hosts_share_gets_its_line_when_all_of_them_have_the_files(far: Far):
    """One file for all; where our plugin goes is each host's own disk, and train-2's cannot take it at first."""
    shared = far.home / "tmp/shared.conf"
    shared.write_text("# all of us\n")
    far.lay({})
    for host in HOSTS:
        far.read(host, f'ln -s {shared} "$1/own etc/plugstack.conf"')
    far.read("train-2", 'touch "$1/ours"')
    held = far.check("--repair")
    assert held.code == 1 and "train-2 could not be mended: ssh: " in held.err, held
    assert (
        "train-2 reads the same plugstack.conf as others, and has no " in held.err and "no line is written" in held.err
    )
    assert shared.read_text() == "# all of us\n"
    assert len(far.ada.lines("srun -N2 hostname")) == 2, "every node starts jobs as it did"
    far.read("train-2", 'rm "$1/ours"')
    planned = json.loads(far.check("--dry-run", "--json").out)["planned"]
    mended = far.check("--repair", "--json")
    assert mended.code == 0, mended
    done = json.loads(mended.out)["repaired"]
    assert [each["done"] for each in done] == [each["does"] for each in planned], "the plan was all of it"
    assert [len(each["done"]) for each in done] == [2, 1, 1], "files for each, and one line"
    assert shared.read_text().count("\nrequired ") == 1
    for node in HOSTS[1:]:
        assert batch(far, far.ada, node) == IN_IMAGE


def test_pyxis_is_registered_where_it_is_not_and_ours_is_not_put_beside_it(far: Far):
    """Our plugin under Pyxis's file name stands in for Pyxis, and a script for Enroot: registering is what is tried."""
    version = far.cluster.lines("scontrol --version")[0].split()[1]
    ours = build_native(LocalRunner(), far.home / "cache", version)
    pyxis = far.home / "pyxis"
    shutil.copytree(ours, pyxis)
    (pyxis / PLUGIN).rename(pyxis / "spank_pyxis.so")
    (far.home / "bin/enroot").write_text("#!/bin/sh\necho 3.5.0\n")
    (far.home / "bin/enroot").chmod(0o755)
    line = f"required {pyxis}/spank_pyxis.so data={far.disk}/kept"
    far.lay({"head": line, "train-1": f"required {ours}/{PLUGIN} data={far.disk}/kept\n{line}", "train-2": "# none"})
    assert "unrecognized option '--container-image" in batch(far, far.ada, "train-2")
    answer = far.check("--json")
    found = {each["host"]: each for each in json.loads(answer.out)["findings"]}
    assert answer.code == 1 and found["train-2"]["fix"].startswith(f"add `{line}` to ")
    assert set(found) == {"train-1", "train-2"}
    refused = far.check("--repair", user="ada")
    assert refused.code == 1 and "train-[1-2] could not be mended: ssh: " in refused.err and "sudo" in refused.err
    mended = far.check("--repair", "--json")
    assert mended.code == 0, f"{mended.out}\n{mended.err}"
    for host in HOSTS:
        assert far.read(host, 'ls "$1"; grep ^required "$1/own etc/plugstack.conf"') == ["own etc", line]
    assert batch(far, far.ada, "train-2") == IN_IMAGE
    run = far.ada.sh(
        f"dalsegno run --framework=plain -N2 --container-image={far.cluster.image} echo within", timeout_s=120
    )
    assert run.code == 0 and run.out.count("within") == 2, run


def test_on_the_head_a_node_that_starts_no_step_is_reached_by_ssh_with_the_users_own_settings(far: Far):
    """train-1 requires a plugin that is not there: srun fails on it. ssh is set up in its own file, not by options."""
    known = "\n".join(f"    {each.replace('=', ' ')}" for each in far.options("")[1::2])
    (far.home / "ssh_config.d/far.conf").write_text(f"Host *\n    Port {PORT}\n{known}\n")
    far.lay({"train-1": "required /nowhere/spank_pyxis.so"})
    refused = far.cluster.sh(f"dalsegno run --framework=plain --container-image={far.cluster.image} true")
    assert refused.code == 2 and "neither Pyxis nor Dal Segno's plugin is set up" in refused.err
    assert "dalsegno containers check" in refused.err
    words = f"dalsegno containers check --repair --folder {far.disk}/ours --json -o ConnectTimeout=60"
    mended = far.cluster.sh(words, timeout_s=120)
    assert mended.code == 0, f"{mended.out}\n{mended.err}"
    assert [each["host"] for each in json.loads(mended.out)["repaired"]] == ["shell", "train-1", "train-2"]
    assert far.read("train-1", 'grep nowhere "$1/own etc/plugstack.conf"')[0].startswith("# out of use")
    assert batch(far, far.ada, "train-1") == IN_IMAGE
    # And by a file, through a host between.
    text = (
        "name: far\ntarget: ssh\nssh: {jump: ada@head}\nhead: {name: head}\npartitions: [{name: n, nodes: [train-1]}]"
    )
    file = far.cluster.cli.file(text, "jump.yaml")
    through = far.cluster.sh(f"dalsegno containers check {file} -o ConnectTimeout=60", timeout_s=120)
    assert through.code == 0, through
    assert "Accepted publickey for ada" in (far.home / "ssh/head.log").read_text()
