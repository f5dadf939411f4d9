"""Tests of which worker is killed, and of parsing the command line. No cluster is needed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.forwarding import AS_ROOT, FORWARDED
from dalsegno.cli.health.inject import command, describe_injection, read_words
from dalsegno.cli.out import parse_time
from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.inject.faults import FAULTS, FaultOptions
from dalsegno.inject.injection import clear
from dalsegno.inject.workers import NodeWorker, SeenProcess, choose, rank_of
from dalsegno.system.children import Process
from dalsegno.system.files import write_atomic
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import CanInject
from dalsegno.targets.local import LocalTarget
from dalsegno.targets.local.nodes import LocalNodes
from tests.local.sites import access_to
from tests.local.test_desired import FOLDER, cluster, put


def seen(pid: int, rank: int | None, parent: int = 1, run: str = "") -> SeenProcess:
    return SeenProcess(Process(pid, pid * 10), parent, rank, run)


NODE = [seen(5, None), seen(10, None), seen(12, 10, 10), seen(11, 2, 10)]


def chosen(some: list[SeenProcess], run: str | None = None, rank: int | None = None) -> tuple[int, int]:
    worker, process = choose(some, "train-1", run, rank)
    return worker.rank, process.pid


def test_the_lowest_rank_is_killed():
    assert chosen(NODE) == (2, 11)
    assert chosen(NODE, rank=10) == (10, 12)


def test_child_of_a_worker_is_not_chosen_as_the_worker():
    loaders = [seen(20, 2, 11), seen(21, 2, 20)]
    assert chosen([*loaders, *NODE]) == (2, 11)


def test_runs_that_share_a_node_are_distinguished():
    two = [seen(11, 0, 10, "r1"), seen(31, 0, 30, "r2")]
    assert chosen(two, run="r2") == (0, 31)
    assert choose(two, "train-1", "r1", None)[0] == NodeWorker(0, 11, "r1")


def test_worker_is_recognized_by_its_name_or_its_environment():
    assert rank_of(b"ds:w12\n", {}) == 12
    assert rank_of(b"python\n", {b"DALSEGNO_RUN": b"r1", b"RANK": b"3"}) == 3
    assert rank_of(b"python\n", {b"TORCHELASTIC_RUN_ID": b"7", b"RANK": b"2"}) == 2, "of `dalsegno torchrun`"
    assert rank_of(b"python\n", {b"RANK": b"3"}) is None, "anybody's variable"
    assert rank_of(b"ds:wx\n", {b"DALSEGNO_RUN": b"r1"}) is None


def test_missing_worker_is_an_error_that_lists_the_existing_ranks():
    with pytest.raises(NotThere, match="no worker of rank 3 on train-1") as caught:
        chosen(NODE, rank=3)
    assert caught.value.hint == "there is rank 2, rank 10"
    with pytest.raises(NotThere) as caught:
        chosen([])
    assert caught.value.hint == "no run has workers there"


def test_unknown_node_is_refused_with_the_known_names():
    nodes = LocalNodes(LocalRunner(), FOLDER, put(cluster(2)), cluster(2))
    assert nodes.node("train-1").name == "train-1"
    with pytest.raises(NotThere, match="no node `train1`") as caught:
        nodes.node("train1")
    assert "did you mean `train-1`?" in caught.value.hint and "train-2" in caught.value.hint


def test_the_local_target_can_inject():
    assert isinstance(LocalTarget, type) and all(
        hasattr(LocalTarget, name) for name in dir(CanInject) if name[0] != "_"
    )


@pytest.mark.parametrize(("text", "seconds"), [("5", 5), ("5s", 5), ("0.3s", 0.3), ("300ms", 0.3), ("2m", 120)])
def test_times_with_units_are_parsed(text: str, seconds: float):
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "-1s", "soon", "1e3", "5 s;true", "0.0s"])
def test_invalid_time_is_refused(text: str):
    with pytest.raises(UsageError):
        parse_time(text)


def test_the_faults_are_listed():
    listed = CliRunner().invoke(command, ["--list"]).output
    assert [line.split()[0] for line in listed.splitlines()[1:]] == list(FAULTS)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no fault given"),
        (["power-of", "train-1"], "did you mean `power-off`?"),
        (["xdi", "79", "train-1"], "did you mean `xid`?"),
        (["foo", "train-1"], "`dalsegno inject --list` shows them"),
        (["power-off"], "needs a node"),
        (["power-off", "train-1", "--for", "5s"], "`--for` has no effect on `power-off`"),
        (["net-cut", "train-1", "--rank", "0"], "`--rank` has no effect on `net-cut`"),
        (["net-cut", "train-1", "--for", "5s", "--clear"], "cannot be combined"),
        (["xid", "train-1"], "`xid` needs a code"),
        (["xid", "79"], "needs a node"),
        (
            ["xid", "abc", "train-1"],
            "invalid code `abc`: `xid` needs a number such as `dalsegno inject xid 79 train-1`",
        ),
        (["xid", "79", "train-1", "train-2"], "such as `dalsegno inject xid 79 NODE`"),
        (["ecc", "train-1", "train-2"], "one node at a time"),
        (["ecc", "79", "train-2"], "one node at a time"),
        (["link-slow", "train-1"], "needs the other end of the link"),
        (["net-slow", "train-1", "--peer", "train-2"], "`--peer` has no effect on `net-slow`"),
        (["slow-gpu", "train-1", "--percent", "3"], "`--percent` has no effect on `slow-gpu`"),
    ],
)
def test_wrong_arguments_are_refused_with_the_reason(args: list[str], words: str):
    error = CliRunner().invoke(command, args).exception
    assert isinstance(error, DalsegnoError) and words in f"{error.what} {error.hint}" and error.exit_code == 2


@pytest.mark.parametrize("args", [["xid", "79", "train-1"], ["--clear"], ["worker-kill", "x", "--allow-real-nodes"]])
def test_slurm_commands_without_a_cluster_count_as_no_cluster(args: list[str], tmp_path: Path):
    for name in ("srun", "sinfo"):
        (tmp_path / name).write_text(
            "#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2\nexit 1\n"
        )
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/bin", "DALSEGNO_HOME": str(tmp_path), "SLURM_CONF": "", "DALSEGNO_CLUSTER": ""}
    error = CliRunner().invoke(command, args, env=env).exception
    assert isinstance(error, NotThere) and error.what == "there is no cluster yet"


SLURM_OF_HEAD = """#!/bin/sh
case "$*" in
*"show node"*) echo "NodeName=ip-10-4-33-1 State=IDLE CPUTot=8 RealMemory=1000 Partitions=cpu" ;;
*version*) echo "slurm 24.11.0" ;;
esac
"""


@pytest.mark.parametrize("target", ["hyperpod", "parallelcluster"])
def test_own_cluster_of_real_nodes_allows_faults_in_own_jobs(target: str, tmp_path: Path):
    folder = tmp_path / "clusters" / "demo"
    folder.mkdir(parents=True)
    write_atomic(folder / "state.json", json.dumps({"target": target, "role": "head"}))
    for name in ("scontrol", "squeue"):
        (tmp_path / name).write_text(SLURM_OF_HEAD)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/bin", "DALSEGNO_HOME": str(tmp_path), "SLURM_CONF": "", "DALSEGNO_CLUSTER": ""}
    node = "ip-10-4-33-1"
    answers = [
        str(CliRunner().invoke(command, words, env=env).exception)
        for words in (
            ["worker-kill", node],
            ["--allow-real-nodes", "worker-kill", node],
            ["--allow-real-nodes", "power-off", node],
        )
    ]
    assert [answer.splitlines()[0] for answer in answers] == [
        "this cluster's nodes are real",
        f"no job of yours runs on {node}",
        "`power-off` is not allowed on real nodes: it would affect more than your own run",
    ]


def test_fault_is_injected_as_the_user_on_the_head():
    """As root, the user's own jobs would not be found."""
    assert "inject" in FORWARDED - AS_ROOT


def test_message_says_that_recovery_does_not_repair_a_head_without_power():
    off = FAULTS["power-off"]
    assert "recovery does not repair it, because it is not a node; `dalsegno up`" in describe_injection(
        off, "head", FaultOptions(), {"is_node": False}
    )
    assert "`dalsegno events -f` shows" in describe_injection(off, "train-1", FaultOptions(), {"is_node": True})


def test_both_ends_of_a_slow_link_are_named():
    message = describe_injection(FAULTS["link-slow"], "train-1", FaultOptions(peer="train-2"), {})
    assert message.startswith("link-slow: train-1 - train-2; `dalsegno inject --clear train-1` undoes it")


def test_clearing_faults_of_the_head_is_not_an_error(tmp_path: Path):
    assert clear(access_to(tmp_path), "head") == []
    with pytest.raises(NotThere, match="no node `heap`"):
        clear(access_to(tmp_path), "heap")


def test_fault_code_may_precede_or_follow_its_node():
    for words in (["xid", "79", "train-1"], ["xid", "train-1", "79"]):
        fault, node, options = read_words(words, FaultOptions(gpu=1))
        assert (fault.name, node, options) == ("xid", "train-1", FaultOptions(gpu=1, code=79))


def test_json_list_has_all_fields_of_each_fault():
    listed = json.loads(CliRunner().invoke(command, ["--list", "--json"]).output)
    assert [each["name"] for each in listed] == list(FAULTS)
    xid = next(each for each in listed if each["name"] == "xid")
    assert (xid["options"], xid["repaired_by"], xid["safe"]) == (["--for", "--gpu", "--until", "CODE"], "reset", False)


def test_only_faults_of_the_users_own_workers_are_safe_on_real_nodes():
    assert {each.name for each in FAULTS.values() if each.safe} == {"worker-kill", "worker-hang", "slow-gpu"}


def test_the_page_has_a_row_for_each_fault():
    page = (Path(__file__).parents[2] / "docs/local.md").read_text()
    assert [name for name, fault in FAULTS.items() if f"| `{name}` | {fault.what} |" not in page] == []
