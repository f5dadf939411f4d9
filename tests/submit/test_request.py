"""A valid request is safe. No argument of it can become an option, a second argument or a second line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.errors import UsageError
from dalsegno.runs.submit.request import RunRequest
from dalsegno.runs.submit.values import Gpus, NodeCount
from dalsegno.spec.facts import facts_from_json, facts_to_json
from tests.submit.runs import asked


def refused(**fields: Any) -> str:
    with pytest.raises(UsageError) as fault:
        asked(**fields)
    return fault.value.what


@pytest.mark.parametrize("word", ["-x", "--help", "a b", "a\nb", "a;b", "$(id)", "a'b", "", "ä"])
def test_ambiguous_name_is_refused(word: str) -> None:
    for field in ("partition", "account", "qos", "constraint", "name"):
        if word or field == "partition":
            assert refused(**{field: word or ","})
    assert refused(exclude=(word,))


def test_several_partitions_are_accepted() -> None:
    assert asked(partition="train,spot").partition == "train,spot"


@pytest.mark.parametrize("constraint", ["a100", "a100&nvlink", "[rack1|rack2]", "gpu*2&(x|y)*4", "!old"])
def test_constraints_of_slurm_are_accepted(constraint: str) -> None:
    assert asked(constraint=constraint).constraint == constraint


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"script": ""}, "no script given"),
        ({"script": "-rf"}, "`-rf` is not a script"),
        ({"args": ("a\0b",)}, "`a?b` contains a zero byte"),
        ({"venv": "v", "conda": "c"}, "`--venv` and `--conda` exclude each other"),
        ({"preload": ("a",), "no_preload": True}, "`--preload` and `--no-preload` exclude each other"),
        ({"preload": ("a,b",)}, "`a,b` is not the name of a Python module"),
        ({"env": (("A B", "1"),)}, "`A B=1` is not of the form NAME=value"),
        ({"chdir": "/a\nb"}, "`/a?b` is not a path that Slurm accepts"),
        ({"chdir": "-x"}, "`-x` looks like an option, not a path"),
        ({"spares": -1}, "`--spares` cannot be -1"),
        ({"nproc_per_node": 0}, "`--nproc-per-node` cannot be 0"),
        ({"framework": "pytorch"}, "unknown framework `pytorch`"),
        ({"framework": "mpi", "nodes": NodeCount(1, 4)}, "a run of framework mpi cannot change its size"),
        ({"signal_lead_s": 70_000}, "Slurm cannot send a signal 70000 s before the end"),
        ({"time_limit_s": 60}, "a time limit of 60 s leaves no time before the signal 120 s ahead of it"),
        ({"sbatch_args": ("train.sh",)}, "`train.sh` is not a long option of Slurm"),
        ({"sbatch_args": ("--a=b\n#SBATCH --uid=0",)}, "`--a=b?#SBATCH --uid=0` is not a long option of Slurm"),
        ({"sbatch_args": ("--nodes=9",)}, "`--nodes` is set by `dalsegno run`"),
    ],
)
def test_invalid_request_is_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as fault:
        RunRequest(**{"script": "train.py", **fields})
    assert fault.value.what == what


@pytest.mark.parametrize(
    ("fields", "processes"),
    [({}, 1), ({"gpus_per_node": Gpus(8)}, 8), ({"gpus_per_node": Gpus(8), "nproc_per_node": 2}, 2)],
)
def test_processes_per_node_default_to_one_per_gpu(fields: dict[str, Any], processes: int) -> None:
    assert asked(**fields).processes_per_node == processes


@pytest.mark.parametrize(
    ("script", "label"),
    [("src/train.py", "train"), ("./a b.sh", "a-b"), ("hello", "hello"), (".hidden", "hidden"), ("日本.py", "run")],
)
def test_default_name_is_that_of_the_script(script: str, label: str) -> None:
    assert asked(script).label == label
    assert asked(script, name="mine").label == "mine"


TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))


@given(
    args=st.lists(TEXT).map(tuple),
    env=st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), TEXT).map(lambda found: tuple(found.items())),
    exclude=st.lists(st.from_regex(r"[a-z][0-9]{1,3}", fullmatch=True)).map(tuple),
    spares=st.integers(0, 9),
)
def test_request_survives_the_round_trip(args: Any, env: Any, exclude: Any, spares: int) -> None:
    request = RunRequest(
        "train.py", args, NodeCount(1, 4), env=env, exclude=exclude, spares=spares, gpus_per_node=Gpus(2)
    )
    assert facts_from_json(RunRequest, json.loads(json.dumps(facts_to_json(request)))) == request
