"""Tests of storage on virtual hosts: mounts on every host, scratch folders of jobs, and runs in folders on storage."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import NodeRole, read_status
from dalsegno.system.hanging_calls import slowness
from dalsegno.targets.local.folder import Folder
from tests.cluster.conftest import Answer, Cli, at_home, taken_down
from tests.cluster.runs import QUICK
from tests.cluster.test_containers import make_image
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300 * slowness()),
    pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root"),
]
NODES = ("train-1", "train-2", "train-3")
FEW_S = 60.0 * slowness()

# Both scripts step slowly, to leave time to cut a node's power, and end when the file `go` exists. The script without
# torch writes each rank's step to the storage.
QUICK_TRAIN = """
import os, sys, time

folder, rank = sys.argv[1], os.environ["JAX_PROCESS_ID"]
os.makedirs(folder + "/ckpt", exist_ok=True)
kept = f"{folder}/ckpt/{rank}"
step = int(open(kept).read()) if os.path.exists(kept) else 0
while not os.path.exists(folder + "/go"):
    step += 1
    with open(kept + ".new", "w") as file:
        file.write(str(step))
    os.rename(kept + ".new", kept)
    with open(f"{folder}/step.{rank}", "w") as file:
        file.write(f"{os.environ['DALSEGNO_GENERATION']} {step} {os.environ['DALSEGNO_SCRATCH']}")
    time.sleep(0.05)
"""
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
from dalsegno.train import Checkpointer

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
ckpt = Checkpointer(sys.argv[1] + "/ckpt", model=model, memory_every=1, disk_every=5)
for step in ckpt.steps(10**6):
    done = torch.tensor([float(os.path.exists(sys.argv[1] + "/go"))])
    dist.all_reduce(done, op=dist.ReduceOp.MIN)
    if done.item():
        break
    ckpt.done(step)
    with open(f"{sys.argv[1]}/step.{os.environ['RANK']}", "w") as file:
        file.write(f"{os.environ['DALSEGNO_GENERATION']} {step} {os.environ['DALSEGNO_SCRATCH']}")
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def mounts() -> Iterator[Path]:
    """Return a folder of the machine in which `up` creates mount points."""
    folder = Path(f"/var/tmp/ds-{os.getpid()}")
    folder.mkdir()
    yield folder
    folder.rmdir()  # `down` has removed the mount points


def file(mounts: Path, *more: str) -> str:
    return "\n".join([
        "name: one", "target: local", "login: {count: 1}",
        "partitions: [{name: train, nodes: 3, cpus: 4, memory: 2G}]",
        "users: [{name: ada}, {name: bob}]", "slurm: {accounting: false}", "storage:",
        f"  - {{name: fsx, mount: {mounts}/fsx}}",
        f"  - {{name: homes, mount: {mounts}/people, home: true}}",
        f"  - {{name: scratch, mount: {mounts}/scratch, type: scratch}}",
        *more,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def stored(cache: Path, mounts: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(file(mounts)))
        yield cli


def on(cli: Cli, host: str, *command: str) -> Answer:
    return cli.run("shell", "-w", host, "--", *command)


def as_user(cli: Cli, user: str, script: str) -> str:
    return cli.ok("shell", "-u", user, "--", "sh", "-c", script)


def test_every_host_has_the_storage_and_the_machine_does_not(stored: Cli, mounts: Path):
    as_user(stored, "ada", f"echo hello > {mounts}/fsx/file")
    for host in ("head", "login-1", *NODES):
        assert on(stored, host, "cat", f"{mounts}/fsx/file").out == "hello\n"
        assert on(stored, host, "mountpoint", "-q", f"{mounts}/people").code == 0
    assert list((mounts / "fsx").iterdir()) == [] == list((mounts / "people").iterdir())
    assert as_user(stored, "ada", "cd && pwd && stat -c %U .") == f"{mounts}/people/ada\nada\n"


def test_check_finds_a_node_without_the_mount(stored: Cli, mounts: Path):
    assert json.loads(stored.ok("storage", "check", "--quick", "--json"))["ok"]
    host = json.loads((Folder(stored.home / "clusters/one").host("train-2") / "init.json").read_text())
    os.kill(host["pid"], 19)  # stopped, because the host would mount the storage again
    try:
        assert on(stored, "train-2", "umount", f"{mounts}/fsx").code == 0
        answer = stored.run("storage", "check", "fsx", "--quick")
        assert answer.code == 1 and "fsx on train-2" in answer.err and "nothing is mounted there" in answer.err
        assert "train-2: users or storage" in str(stored.status("one")["problems"])
    finally:
        os.kill(host["pid"], 18)
    stored.ok("up", stored.file(file(mounts)))
    assert json.loads(stored.ok("storage", "check", "--quick", "--json"))["ok"]


def test_user_checks_a_path_with_jobs_inside_the_cluster(stored: Cli, mounts: Path):
    found = json.loads(as_user(stored, "ada", f"dalsegno storage check {mounts}/fsx --quick --json"))
    assert found["ok"] and found["user"] == "ada" and sorted(found["storage"][0]["nodes"]) == list(NODES)
    answer = stored.run("shell", "-u", "ada", "--", "dalsegno", "storage", "check", "/usr/share", "--quick")
    assert answer.code == 1 and "nothing is mounted there" in answer.err


def test_job_has_a_scratch_folder_on_each_node_until_its_end(stored: Cli, mounts: Path):
    script = 'stat -c "%n %U %a" $SLURM_TMPDIR; touch $TMPDIR/x; ls $DALSEGNO_SCRATCH'
    out = as_user(stored, "ada", f"srun -N2 --label sh -c '{script}'")
    job = out.split("job-")[1].split()[0]
    assert sorted(out.splitlines()) == sorted(
        line for task in (0, 1) for line in (f"{task}: {mounts}/scratch/job-{job} ada 700", f"{task}: x")
    )
    folders = [Folder(stored.home / "clusters/one").scratch(node) for node in NODES]
    eventually(lambda: not [path for folder in folders for path in folder.glob("job-*")])
    eventually(lambda: not [path for folder in folders for path in folder.glob(".dalsegno/trash/*")])


def test_container_has_the_scratch_folder_too(stored: Cli, mounts: Path):
    (stored.home / "image").mkdir()
    image = make_image(stored.home / "image")
    script = f"srun -N1 --container-image={image} sh -c 'echo x > $TMPDIR/y; cat $DALSEGNO_SCRATCH/y'"
    answer = stored.run("shell", "-u", "ada", "--", "sh", "-c", script)
    assert (answer.code, answer.out, answer.err) == (0, "x\n", "")


def test_scratch_of_one_user_is_closed_to_others_and_junk_does_not_drain_the_node(stored: Cli, mounts: Path):
    junk = "mkdir -p a/b; ln -s /etc a/link; for i in $(seq 2000); do : > a/b/$i; done; chmod 000 a"
    as_user(stored, "bob", f"srun -w train-1 sh -c 'cd $TMPDIR; {junk}; echo ok'")
    spy = f"srun -w train-1 sh -c 'ls {mounts}/scratch/.dalsegno'"
    assert stored.run("shell", "-u", "ada", "--", "sh", "-c", spy).code != 0
    folder = Folder(stored.home / "clusters/one").scratch("train-1")
    eventually(lambda: not [*folder.glob("job-*"), *folder.glob(".dalsegno/trash/*")])
    states = {node["name"]: node["state"] for node in stored.status("one")["nodes"]}  # type: ignore[attr-defined]
    assert states["train-1"] == "idle"


def test_broken_scratch_disk_does_not_drain_the_node(stored: Cli, mounts: Path):
    folder = Folder(stored.home / "clusters/one").scratch("train-3")
    folder.chmod(0o777)
    try:
        done = as_user(stored, "ada", "srun -w train-3 sh -c 'echo [$DALSEGNO_SCRATCH]'")
        assert done == "[]\n"
    finally:
        folder.chmod(0o755)
    assert as_user(stored, "ada", "srun -w train-3 sh -c 'echo $DALSEGNO_SCRATCH'").startswith(f"{mounts}/scratch")


def test_storage_is_added_and_removed_while_the_cluster_runs(stored: Cli, mounts: Path, tmp_path: Path):
    (tmp_path / "there").write_text("here\n")
    added = stored.file(file(mounts, f"  - {{name: data, mount: {mounts}/data, source: {tmp_path}}}"), "more.yaml")
    planned = stored.ok("plan", added)
    assert f"mounts storage data at {mounts}/data" in planned and "restarts nothing" in planned
    stored.ok("up", added)
    assert [on(stored, host, "cat", f"{mounts}/data/there").out for host in ("login-1", "train-1")] == ["here\n"] * 2
    stored.ok("up", stored.file(file(mounts)))
    eventually(lambda: on(stored, "train-1", "mountpoint", "-q", f"{mounts}/data").code != 0)
    assert (tmp_path / "there").exists()


@pytest.mark.parametrize("framework", ["plain files", pytest.param("torch", marks=pytest.mark.long)])
def test_run_and_checkpoints_on_storage_survive_a_power_cut(stored: Cli, mounts: Path, framework: str):
    options, script = " ".join(QUICK), QUICK_TRAIN
    if framework == "torch":
        pytest.importorskip("torch")
        options, script = "", TRAIN
    folder = framework.split()[0]
    work = Folder(stored.home / "clusters/one").storage / "fsx" / folder
    as_user(stored, "ada", f"mkdir {mounts}/fsx/{folder}")
    (work / "train.py").write_text(script)
    command = f"dalsegno run --detach {options} -N 2 --spares 1 train.py {mounts}/fsx/{folder}"
    started = f"cd {mounts}/fsx/{folder} && {command}"
    run = as_user(stored, "ada", started).strip()

    def steps() -> list[list[str]]:
        return [words for path in work.glob("step.*") if len(words := path.read_text().split()) == 3]

    eventually(lambda: len(steps()) == 2 and all(int(step) > 12 for _, step, _ in steps()), FEW_S)
    assert all(scratch.startswith(f"{mounts}/scratch/job-") for _, _, scratch in steps())
    assert list((work / "ckpt").iterdir())
    (kept,) = (Folder(stored.home / "clusters/one").storage / "homes/ada").rglob(f"runs/{run}")
    status = read_status(RunFolder(kept).status)
    assert status is not None
    member = next(node.name for node in status.nodes if node.state is NodeRole.MEMBER)
    stored.ok("inject", "power-off", member)
    last = max(int(step) for _, step, _ in steps())
    eventually(lambda: all(int(words[0]) > 1 and int(words[1]) > last for words in steps()), FEW_S)
    (work / "go").touch()
    eventually(lambda: (status := read_status(RunFolder(kept).status)) and status.exit_code == 0, FEW_S)
    eventually(lambda: on(stored, member, "mountpoint", "-q", f"{mounts}/fsx").code == 0, FEW_S)
    left = on(stored, member, "ls", f"{mounts}/scratch")
    assert (left.code, left.out) == (0, ""), "a replaced machine has an empty disk"
