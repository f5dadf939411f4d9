"""Check and fix container jobs on a cluster that Dal Segno did not create, over a real ssh."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
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
"""  # this SHLVL prevents bash from reading .bashrc
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
    """Hosts with their own disks, an sshd, and Slurm's files in the usual place, without files of Dal Segno."""

    cluster: Contained
    ada: Contained

    @property
    def home(self) -> Path:
        return self.cluster.cli.home

    @property
    def disk(self) -> Path:
        """The mount point of each host's own disk. plugstack.conf is in a subfolder with a space in its name."""
        return self.home / "disk"

    @property
    def stack(self) -> Path:
        return self.disk / "own etc/plugstack.conf"

    def lay(self, stacks: Mapping[str, str | None]) -> None:
        """Empty all disks and write each host's plugstack.conf."""
        for host in HOSTS:
            self.cluster.on(host, "sh", "-c", 'rm -rf "$1"/*; mkdir -p "$1/own etc"', "sh", str(self.disk))
            if (text := stacks.get(host)) is not None:
                self.cluster.on(host, "sh", "-c", 'printf "%s\\n" "$2" >"$1"', "sh", str(self.stack), text)

    def read(self, host: str, script: str) -> list[str]:
        """Run a script on a host over ssh, with its disk as $1, and return the lines of its output."""
        words = f"set -- {self.disk}; {script}"
        argv = ["ssh", "-o", "BatchMode=yes", *self.options("-o"), "-p", str(PORT), f"root@{self.address(host)}", words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        return done.stdout.splitlines()

    def address(self, host: str) -> str:
        lines = (self.home / "clusters/one/etc/hosts").read_text().splitlines()
        return next(line.split()[0] for line in lines if line.split()[1:] == [host])

    def options(self, flag: str) -> list[str]:
        folder = self.home / "ssh"
        options = (
            f"IdentityFile={folder}/key",
            f"UserKnownHostsFile={folder}/known",
            "IdentitiesOnly=yes",
            "ConnectTimeout=60",
        )
        return [word for each in options for word in (flag, each)]

    def check(self, *args: str, user: str = "root", known: bool = True) -> Answer:
        """Run the check from outside the cluster, with a cluster file that lists its hosts."""
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
    """Return the output of srun with --container-image in a batch script on a node."""
    output = far.home / "tmp/batch.out"
    output.unlink(missing_ok=True)
    inner = "srun $I sh -c 'echo from \\$FROM_IMAGE' 2>&1; echo end"
    user.lines(f'cd {far.home}/tmp; unset TMPDIR; sbatch -w {node} -o {output} --wrap "{inner}"')
    eventually(lambda: text_of(output).endswith("end\n"))
    return text_of(output)


IN_IMAGE = "from as it says\nend\n"


def run_commands(far: Far, report: str) -> None:
    """Run the commands of a report as an administrator would. `shell` selects the host where `dalsegno shell` runs."""
    for step in json.loads(report)["commands"]:
        for host in step["hosts"]:
            for command in step["commands"]:
                if command.startswith("systemctl "):  # virtual hosts have no systemd
                    continue
                if host == "shell":
                    done = far.cluster.sh(command)
                    assert (done.code, done.err) == (0, ""), f"{command}: {done}"
                else:
                    far.cluster.on(host, "sh", "-c", command)


@pytest.fixture
def ssh_settings(far: Far) -> None:
    """Configure ssh on the hosts, so that they reach each other with the user's own settings."""
    known = "\n".join(f"    {each.replace('=', ' ')}" for each in far.options("")[1::2])
    (far.home / "ssh_config.d/far.conf").write_text(f"Host *\n    Port {PORT}\n{known}\n")


def test_the_printed_commands_install_our_plugin_on_a_cluster_without_any(far: Far, ssh_settings: None):
    """train-1 requires a missing plugin, so srun fails there and ssh is used."""
    far.lay({"head": "required /nowhere/x.so", "train-1": "required /nowhere/spank_pyxis.so"})
    refused = far.cluster.sh(f"dalsegno run --framework=plain --container-image={far.cluster.image} true")
    assert refused.code == 2 and "dalsegno containers check" in refused.err
    check = f"dalsegno containers check --folder {far.disk}/ours --json -o ConnectTimeout=60"
    blocked = far.cluster.sh(check, timeout_s=120)
    assert blocked.code == 1 and [each["hosts"] for each in json.loads(blocked.out)["commands"]] == [["shell"]], blocked
    run_commands(far, blocked.out)
    bare = far.cluster.sh(check, timeout_s=120)
    assert bare.code == 1, bare
    assert [each["hosts"] for each in json.loads(bare.out)["commands"]] == [
        ["shell"], ["shell"], ["shell"], ["train-1"], ["train-2"]
    ], "compile, copy, and a line for each"  # fmt: skip
    run_commands(far, bare.out)
    done = far.cluster.sh(check, timeout_s=120)
    assert done.code == 0 and json.loads(done.out)["commands"] == [], done

    assert far.read("train-1", 'stat -c "%U %a" "$1"/ours/*/dalsegno_container.so') == ["root 755"]
    assert far.read("train-1", 'grep nowhere "$1/own etc/plugstack.conf"')[0].startswith("# required")
    for someone in (far.cluster, far.ada):
        assert someone.lines("srun -N2 $I sh -c 'echo from $FROM_IMAGE'") == ["from as it says"] * 2
        assert batch(far, someone, "train-2") == IN_IMAGE
    named = "srun -w train-1 --container-name=mine"
    assert far.ada.lines(f"{named} $I touch /kept; {named} ls /kept") == ["/kept"]
    run = far.ada.sh(
        f"dalsegno run --framework=plain -N2 --container-image={far.cluster.image} echo within", timeout_s=120
    )
    assert run.code == 0 and run.out.count("within") == 2, run


def test_a_file_of_hosts_is_checked_over_ssh_and_hosts_that_do_not_answer_are_named(far: Far, ssh_settings: None):
    far.lay({})
    unknown = far.check(known=False)
    assert unknown.code == 1 and "Host key verification failed" in unknown.out
    assert "StrictHostKeyChecking=accept-new" in unknown.out
    far.stop_sshd("train-2")
    silent = far.check("--json")
    far.start_sshd("train-2")
    found = {each["host"]: each for each in json.loads(silent.out)["findings"]}
    assert silent.code == 1 and set(found) == set(HOSTS)
    assert "Connection refused" in found["train-2"]["what"] and "is sshd running there?" in found["train-2"]["fix"]
    assert json.loads(silent.out)["commands"] == [], "our plugin is compiled on a host of the cluster"
    assert far.read("train-1", 'ls "$1"') == ["own etc"], "the check changes nothing"
    text = (
        "name: far\ntarget: ssh\nssh: {jump: ada@head}\nhead: {name: head}\npartitions: [{name: n, nodes: [train-1]}]"
    )
    file = far.cluster.cli.file(text, "jump.yaml")
    through = far.cluster.sh(f"dalsegno containers check {file} --json -o ConnectTimeout=60", timeout_s=120)
    assert all(each["asked"] for each in json.loads(through.out)["hosts"]), through
    assert "Accepted publickey for ada" in (far.home / "ssh/head.log").read_text()


def test_the_printed_commands_register_pyxis_on_hosts_without_it(far: Far):
    """Our plugin under Pyxis's file name replaces Pyxis, and a script replaces Enroot."""
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
    run_commands(far, answer.out)
    fixed = far.check("--json")
    assert fixed.code == 0, f"{fixed.out}\n{fixed.err}"
    for host in HOSTS:
        assert far.read(host, 'ls "$1"; grep ^required "$1/own etc/plugstack.conf"') == ["own etc", line]
    assert batch(far, far.ada, "train-2") == IN_IMAGE
