"""Tests of `pip install dalsegno` by an ordinary user, on a cluster that was made without Dal Segno."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, Request, build_opener, urlopen

import pytest

from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import read
from dalsegno.runs.status import RunPhase, RunStatus, read_status
from dalsegno.system.children import environment, find, owner
from tests.cluster.foreign import NODES, UID, USER, ForeignCluster, foreign_cluster, free_ports, install
from tests.cluster.runs import comm
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have an ordinary user of its own"),
]

QUICK = ("--framework", "jax", "--preload", "json")
TRAIN = """
import os, sys, time
print("generation", os.environ["DALSEGNO_GENERATION"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
TRAIN_WITH_TORCH = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("generation", os.environ["DALSEGNO_GENERATION"], flush=True)
done = torch.zeros(1)
while not done[0]:
    total = torch.ones(1)
    dist.all_reduce(total)
    done[0] = os.path.exists("stop")
    dist.broadcast(done, 0)
    time.sleep(0.05)
print("sum", int(total[0]), flush=True)
dist.destroy_process_group()
"""
LONG_S = 90.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[ForeignCluster]:
    with foreign_cluster() as cluster:
        install(cluster)
        yield cluster


@pytest.fixture(autouse=True)
def all_nodes_up(cluster: ForeignCluster) -> Iterator[None]:
    yield
    for node, process in list(cluster.slurmd.items()):
        if process.poll() is not None:
            cluster.boot(node)
    eventually(lambda: set(cluster.states().values()) == {"idle"}, LONG_S)


def test_adopt_writes_a_valid_file_and_says_what_works(cluster: ForeignCluster):
    done = cluster.user("dalsegno", "adopt")
    assert done.code == 0, done.err
    assert "campus: plain Slurm" in done.err and "3 nodes in 2 partitions" in done.err
    assert cluster.ok("dalsegno", "validate").startswith("cluster.yaml is valid: campus on existing, 3 nodes in 2")
    text = (cluster.home / "cluster.yaml").read_text()
    assert 'nodes: "c[1-3]"' in text and 'time_limit: "00:10:00"' in text and "accounting: false" in text
    assert cluster.user("dalsegno", "adopt").code == 1, "it does not overwrite its file"
    found = json.loads(cluster.ok("dalsegno", "adopt", "--output", "-", "--json"))
    assert (found["platform"], found["evidence"], found["gpus"]) == ("plain", [], 0)
    works = {each["command"] for each in found["abilities"] if each["reach"] == "works"}
    assert {"run", "torchrun", "bench", "exporter", "why", "doctor", "web"} <= works
    refused = cluster.user("dalsegno", "up")
    assert refused.code == 1 and "did not create" in refused.err


def test_doctor_examines_a_script_against_the_nodes_of_an_ordinary_user(cluster: ForeignCluster):
    (cluster.home / "nccl.py").write_text("import torch.distributed as dist\ndist.init_process_group('nccl')\n")
    (cluster.home / "job.sh").write_text("#!/bin/sh\nsrun --container-image=alpine python3 nccl.py\n")
    done = cluster.user("dalsegno", "doctor", "job.sh", "--probe", "--json")
    found = {each["symptom"]: each for each in json.loads(done.out)["findings"]}
    assert done.code == 1 and "has none" in found["wrong-backend"]["what"]
    assert "no container runtime" in found["no-containers"]["what"]
    assert [each["where"] for each in found["no-containers"]["evidence"]][1:] == ["c1", "c2"], "two of three"
    job = cluster.ok("sbatch", "--parsable", "-o", "out.txt", "--wrap", "echo 'CUDA out of memory'; exit 1").strip()
    eventually(lambda: "a GPU ran out of memory" in cluster.user("dalsegno", "doctor", job).out, LONG_S)


def test_run_survives_a_lost_worker_and_a_lost_node(cluster: ForeignCluster):
    (cluster.home / "train.py").write_text(TRAIN)
    options = ("--detach", "--nodes", "2", *QUICK)
    name = cluster.ok("dalsegno", "run", *options, "train.py", f"{cluster.home}/stop").strip()
    run = RunFolder(cluster.home / ".local/state/dalsegno/runs" / name)
    wait_for_generation(run, 1)
    assert run.root.stat().st_uid == UID
    os.kill(worker(cluster, 1), 9)
    wait_for_generation(run, 2)
    first, second = nodes_of(run)
    cluster.lose(second)
    wait_for_generation(run, 3)
    assert nodes_of(run)[0] == first and second not in nodes_of(run), "the third node replaces the lost one"
    (cluster.home / "stop").touch()
    eventually(lambda: status(run).over, LONG_S)
    assert status(run).exit_code == 0, tail(run)
    assert name in cluster.ok("dalsegno", "runs")
    assert "generation 3" in cluster.ok("dalsegno", "logs", name)
    assert second in cluster.ok("dalsegno", "why", name)
    assert second in cluster.ok("dalsegno", "why", second)
    (cluster.home / "stop").unlink()


# All nodes of this cluster are on one machine, so the first task must be named as the host of the rendezvous.
BATCH = """\
#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --output=ranks.txt
srun sh -c 'exec dalsegno torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
  --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf is_host=$((SLURM_PROCID == 0)) --rdzv-id $SLURM_JOB_ID \\
  --no-python ./rank.sh'
echo "ended with $?"
"""


def test_user_replaces_torchrun_in_a_batch_script(cluster: ForeignCluster):
    (cluster.home / "rank.sh").write_text("#!/bin/sh\necho rank $RANK of $WORLD_SIZE\n")
    (cluster.home / "rank.sh").chmod(0o755)
    (cluster.home / "batch.sh").write_text(BATCH.format(port=free_ports(1)[0]))
    cluster.ok("sbatch", "batch.sh")
    output = cluster.home / "ranks.txt"
    eventually(lambda: "ended with" in output.read_text(), LONG_S)
    lines = output.read_text().splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == [f"rank {n} of 4" for n in range(4)], lines
    assert lines[-1] == "ended with 0"


def test_user_measures_storage_on_nodes(cluster: ForeignCluster):
    words = ("storage", str(cluster.home), "--nodes", "2", "--size", "1M", "--seconds", "0.2", "--json")
    found = json.loads(cluster.ok("dalsegno", "bench", *words, timeout_s=120))
    assert all(each["write_mb_per_s"] > 0 and not each["error"] for each in found), found


@pytest.mark.long
def test_training_with_torch_survives_a_lost_node(cluster: ForeignCluster):
    """Run the command from the docs, `dalsegno run --nodes 2 train.py`, with PyTorch in the user's environment."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("needs torch")
    (site,) = cluster.home.glob("venv/lib/python3*/site-packages")
    (site / "torch.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    if cluster.user("python3", "-c", "import torch").code:
        pytest.skip("the user cannot read this installation of torch")
    (cluster.home / "train.py").write_text(TRAIN_WITH_TORCH)
    name = cluster.ok("dalsegno", "run", "--detach", "--nodes", "2", "train.py").strip()
    run = RunFolder(cluster.home / ".local/state/dalsegno/runs" / name)
    wait_for_generation(run, 1)
    first, second = nodes_of(run)
    cluster.lose(second)
    wait_for_generation(run, 2)
    (cluster.home / "stop").touch()
    eventually(lambda: status(run).over, LONG_S)
    (cluster.home / "stop").unlink()
    assert status(run).exit_code == 0, tail(run)
    assert nodes_of(run)[0] == first and "sum 2" in run.log(2, 0).read_text()


def test_reading_commands_work_without_a_controller(cluster: ForeignCluster):
    metrics = cluster.ok("dalsegno", "exporter", "--once")
    assert "slurm_nodes_idle 3" in metrics
    shown = json.loads(cluster.ok("dalsegno", "status", "--json"))
    assert {node["name"] for node in shown["nodes"]} == {"c1", "c2", "c3"}
    assert "c1" in cluster.ok("dalsegno", "top", "--once")


def test_user_opens_her_own_web_page_and_cancels_a_job_there(cluster: ForeignCluster):
    """`dalsegno web` shows what Slurm shows the user. Other users of the machine get nothing from it."""
    job = int(cluster.ok("sbatch", "--parsable", "--wrap", "sleep 300"))
    others = int(cluster.as_root("sbatch", "--parsable", "-D", "/tmp", "-o", "/dev/null", "--wrap", "sleep 300"))
    page = subprocess.Popen(cluster.argv("dalsegno", "web", "--no-open"), stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout
        url = page.stdout.readline().strip()
        with pytest.raises(HTTPError, match="401"):
            urlopen(url.partition("/login")[0], timeout=30)
        browser = Visit(url)
        shown = eventually(lambda: found if f"/node/{NODES[0]}" in (found := browser.get("/")) else "")
        assert "campus" in shown and 'Recovery</h2><p class="figure-value"><b>off' in shown
        assert "No node agent reports checks." in browser.get("/node/c1")
        queue = eventually(lambda: found if f"job-{others}" in (found := browser.get("/queue")) else "")
        assert f"do=cancel&amp;job={job}" in queue and f"do=cancel&amp;job={others}" not in queue
        assert browser.cancel(job) == 200
        eventually(lambda: str(job) not in cluster.ok("squeue", "-h", "-o", "%i").split())
        assert browser.cancel(others) == 403 and str(others) in cluster.ok("squeue", "-h", "-o", "%i").split()
        assert "/run/" in browser.get("/runs"), "the run of an earlier test"
        again = json.loads(cluster.ok("dalsegno", "web", "--json"))
        assert again["role"] == "user" and again["url"] != url
        assert Visit(again["url"]).get("/runs"), "another address of the same page"
        (folder,) = cluster.home.glob(".local/state/dalsegno/web/*")
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        page.terminate()
        cluster.as_root("scancel", str(others), str(job))
    assert page.wait(30) == 0
    assert "does not answer" in cluster.user("dalsegno", "web", "--revoke").err


class Visit:
    """A browser that has followed the address to log in."""

    def __init__(self, url: str) -> None:
        self._open, self._origin = build_opener(HTTPCookieProcessor()).open, url.partition("/login")[0]
        self._open(url, timeout=30)

    def get(self, path: str) -> str:
        return str(self._open(f"{self._origin}{path}", timeout=30).read().decode())

    def cancel(self, job: int) -> int:
        (token,) = set(re.findall(r'name="csrf" value="(\w+)"', self.get("/")))
        form = f"do=cancel&job={job}&csrf={token}".encode()
        try:
            sent = Request(f"{self._origin}/do", form, {"Origin": self._origin})
            return int(self._open(sent, timeout=30).status)
        except HTTPError as error:
            return error.code


def wait_for_generation(run: RunFolder, number: int) -> None:
    """Wait until a generation has formed and each of its ranks has printed its line."""

    def formed() -> bool:
        of_run = [each for each in read(run.journal) if each["event"] == "generation"]
        logs = [run.log(number, rank) for rank in range(2)]
        assert not status(run).over, "it has ended"
        return of_run[-1]["generation"] >= number and all(f"generation {number}" in log.read_text() for log in logs)

    try:
        eventually(formed, LONG_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; {tail(run)}") from None
    eventually(lambda: status(run).phase is RunPhase.RUNNING)  # the file is written a moment later


def nodes_of(run: RunFolder) -> list[str]:
    return list([each for each in read(run.journal) if each["event"] == "generation"][-1]["nodes"])


def status(run: RunFolder) -> RunStatus:
    found = read_status(run.status)
    assert found is not None
    return found


def worker(cluster: ForeignCluster, rank: int) -> int:
    """Return the PID of a worker of this cluster. Other clusters on the machine may have workers of the same user."""
    home = f"HOME={cluster.home}".encode()

    def is_it(pid: int) -> bool:
        return owner(pid) == UID and comm(pid) == f"ds:w{rank}" and home in environment(pid)

    return eventually(lambda: find(is_it))[0].pid


def tail(run: RunFolder) -> str:
    logs = [path for path in (run.coordinator_log, run.agents_log, *run.root.glob("job-*.log")) if path.exists()]
    said = [f"{path.name}:\n{path.read_text()[-1500:]}" for path in logs]
    return "\n".join([str(read_status(run.status)), *(str(each) for each in list(read(run.journal))[-20:]), *said])


def test_user_has_no_files_of_ours_outside_her_home(cluster: ForeignCluster):
    """The installation and the runs of the earlier tests used only the user's home and shared memory."""
    owned = [path for path in Path("/tmp").iterdir() if not path.is_symlink() and path.lstat().st_uid == UID]
    owned = [path for path in owned if not path.name.startswith("torchinductor_")]  # files that PyTorch itself creates
    assert owned == [], USER


@pytest.mark.long
def test_watcher_says_what_it_would_do_and_acts_only_when_armed(cluster: ForeignCluster):
    """An administrator runs the watcher and reads its events. The watcher changes no node before it is armed."""
    admin = cluster.root / "admin"
    admin.mkdir(exist_ok=True)
    cluster.ok_as_root("dalsegno", "adopt", "-o", f"{admin}/cluster.yaml", "--force")
    watcher = cluster.start_as_root("dalsegno", "adopt", "watch", f"{admin}/cluster.yaml")
    try:
        eventually(lambda: "in service" in cluster.as_root("dalsegno", "nodes"))
        cluster.lose("c1")
        eventually(lambda: "would set it down" in cluster.ok_as_root("dalsegno", "events"), LONG_S)
        assert "dalsegno" not in cluster.as_root("scontrol", "show", "node", "c1"), "it only observes"
        assert "only reports" in cluster.ok_as_root("dalsegno", "automation", "status")
        cluster.ok_as_root("dalsegno", "adopt", "arm", "all", f"{admin}/cluster.yaml")
        reason = "Reason=dalsegno:drain:gone slurmd answers neither Slurm nor a probe"
        eventually(lambda: reason in cluster.as_root("scontrol", "show", "node", "c1"), LONG_S)
        assert "all, which is armed" in cluster.ok_as_root("dalsegno", "automation", "status")
    finally:
        watcher.terminate()
    assert watcher.wait(30) is not None
    cluster.as_root("scontrol", "update", "nodename=c1", "state=resume")
