"""`dalsegno storage check` for a cluster on other machines: which nodes it asks, as whom, and with which Python."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.cli.cluster.storage import reachable_nodes
from dalsegno.errors import NotThere
from dalsegno.spec.facts import Cluster, Node, Partition, SshAccess, SshHost, Storage
from dalsegno.system.processes import Completed, FakeRunner
from dalsegno.targets.folder import ClusterFolder, write_applied
from dalsegno.targets.oci.plan import OciStage, OciState, write_oci_state
from dalsegno.targets.parallelcluster.head import PclusterHead
from dalsegno.targets.ssh.folder import SshFolder, SshStage, SshState, write_ssh_state
from tests.targets.oci.conftest import cluster_of
from tests.targets.parallelcluster.files import MINIMAL
from tests.targets.parallelcluster.files import cluster_of as pcluster_of

pytestmark = pytest.mark.cluster  # the tests start hundreds of processes

SRC = Path(__file__).parents[2] / "src"
NODES = """\
NodeName=gpu-77 State=IDLE CPUTot=8 RealMemory=1000 Partitions=train
NodeName=gpu-78 State=MIXED CPUTot=8 RealMemory=1000 Partitions=train
"""
ASLEEP = """\
NodeName=train-st-m5-1 State=IDLE+CLOUD CPUTot=8 RealMemory=1000 Partitions=train
NodeName=train-dy-m5-1 State=IDLE+CLOUD+POWERED_DOWN CPUTot=8 RealMemory=1000 Partitions=train
NodeName=train-dy-m5-2 State=IDLE+CLOUD+POWERING_UP CPUTot=8 RealMemory=1000 Partitions=train
"""
# Stands in for ssh: answers for Slurm, and runs other commands here, with files of the test in the place of the host's.
SSH = """\
#!/bin/sh
for last; do :; done
to_files_of_the_test='s#/usr/local/bin/dalsegno#{root}/command#; s#/opt/dalsegno/current#{src}#'
echo "$*" >> {root}/calls
case "$last" in
  *"show node"*) cat {root}/nodes ;;
  *) exec sh -c "$(printf %s "$last" | sed "$to_files_of_the_test")" ;;
esac
"""
SUDO = """#!/bin/sh
[ "$1" = -- ] && shift
exec "$@"
"""


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a home. Its machines have a `python3` that is too old for our code, as on Oracle Linux 8.

    The folder of the storage is in it. So it is not `tmp_path`, which can be below /dev/shm, where no storage may be.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        root = Path(name)
        (root / "bin").mkdir()
        (root / "data").mkdir(mode=0o777)
        program(root / "bin/ssh", SSH.format(root=root, src=SRC))
        program(root / "bin/sudo", SUDO)
        program(root / "bin/python3", "#!/bin/sh\necho 'SyntaxError: Python 3.6' >&2\nexit 1\n")
        (root / "command").write_text(f"#!{sys.executable} -I\n# Written by Dal Segno.\n")
        yield root


def storage_of(home: Path) -> str:
    return f"storage: [{{name: data, mount: {home}/data, type: fss, home: true}}]\n"


def on_oci(home: Path) -> None:
    (home / "key.pub").write_text("ssh-ed25519 AAAA me\n")
    cluster = cluster_of(home, rest=storage_of(home))
    folder = ClusterFolder(home / "clusters/demo")
    folder.root.mkdir(parents=True)
    write_applied(folder, cluster)
    write_oci_state(folder, OciState(OciStage.UP, "s", controller="192.0.2.7"))


def run_check(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, because the search for programs reads PATH once."""
    argv = [sys.executable, "-m", "dalsegno", "storage", "check", "--cluster", "demo", "--quick", "--json", *words]
    path = f"{home}/bin:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "DALSEGNO_HOME": str(home), "SLURM_CONF": "", "PYTHONPATH": str(SRC)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)


def check(home: Path, *words: str) -> dict[str, Any]:
    done = run_check(home, *words)
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_nodes_of_oci_are_asked_by_their_names_in_slurm_with_the_python_of_our_code(home: Path):
    on_oci(home)
    (home / "nodes").write_text(NODES)
    found = check(home)
    (storage,) = found["storage"]
    assert sorted(storage["nodes"]) == ["gpu-77", "gpu-78"]
    assert all(storage["nodes"].values()), found
    calls = (home / "calls").read_text()
    assert "train-1" not in calls and "opc@gpu-77" in calls


def test_storage_is_used_as_the_login_user_of_the_machines_if_the_file_names_no_user(home: Path):
    on_oci(home)
    (home / "nodes").write_text(NODES)
    program(home / "bin/id", "#!/bin/sh\necho daemon\n")
    assert check(home)["user"] == "daemon"
    assert check(home, "--user", "nobody")["user"] == "nobody"


@pytest.mark.parametrize("answer", ["--help", "ann bob", "$(id)", ""])
def test_answer_that_is_not_a_user_name_is_refused(home: Path, answer: str):
    on_oci(home)
    (home / "nodes").write_text(NODES)
    program(home / "bin/id", f"#!/bin/sh\necho '{answer}'\n")
    done = run_check(home)
    assert done.returncode == 1 and "the head did not name its login user" in done.stderr


@pytest.mark.parametrize("flood", ["yes | head -c 3000000", "printf '[%.0s' $(seq 100000)"])
def test_hostile_output_of_a_node_counts_as_no_answer(home: Path, flood: str):
    on_oci(home)
    (home / "nodes").write_text(NODES)
    (home / "command").write_text(f"#!/bin/sh\n{flood}\n")
    (storage,) = check(home, "--user", "nobody")["storage"]
    assert storage["nodes"] == {"gpu-77": None, "gpu-78": None}


def test_login_user_of_an_ssh_cluster_is_asked_on_its_head(home: Path):
    """Whatever name the head has."""
    hosts = (SshHost("gpu01", "192.0.2.10"), SshHost("gpu-77", "192.0.2.11"))
    access = SshAccess(hosts)
    data = Storage("data", f"{home}/data", type="existing")
    node = Node("gpu-77", 8, 1024)
    cluster = Cluster("demo", "ssh", (node,), (Partition("train", ("gpu-77",)),), head="gpu01", ssh=access)
    folder = SshFolder(home / "clusters/demo")
    folder.root.mkdir(parents=True)
    write_ssh_state(folder, SshState(SshStage.UP, "c0ffee", "gpu01", access))
    write_applied(folder, replace(cluster, storage=(data,)))
    program(home / "bin/id", "#!/bin/sh\necho daemon\n")
    assert check(home)["user"] == "daemon"
    assert "192.0.2.10 id -un" in (home / "calls").read_text()


def test_nodes_that_are_powered_down_are_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A program on such a node would start its machine, or wait for one that is not there."""
    head = PclusterHead(tmp_path, FakeRunner(lambda argv, stdin: ASLEEP))
    assert reachable_nodes(head, pcluster_of(MINIMAL)) == ["train-st-m5-1"]
    assert "train-dy-m5-[1-2]" in capsys.readouterr().err
    off = "".join(line for line in ASLEEP.splitlines(keepends=True) if "-dy-" in line)
    with pytest.raises(NotThere, match="no node runs"):
        reachable_nodes(PclusterHead(tmp_path, FakeRunner(lambda argv, stdin: off)), pcluster_of(MINIMAL))


def test_without_an_answer_of_slurm_the_nodes_of_the_file_are_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    silent = FakeRunner(lambda argv, stdin: Completed(tuple(argv), 1, "", "Unable to contact slurm controller"))
    assert reachable_nodes(PclusterHead(tmp_path, silent), pcluster_of(MINIMAL)) == ["train-1", "train-2"]
    assert "Slurm does not answer" in capsys.readouterr().err
