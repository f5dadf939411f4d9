"""Tests of the command line of `run`."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dalsegno.cli.training.run import RUN_SETTINGS, find_misplaced, read_fields, run_options
from dalsegno.cli.training.run import command as run
from dalsegno.errors import UsageError
from dalsegno.runs.submit.options import OPTIONS, make_request
from dalsegno.runs.submit.request import RunRequest
from dalsegno.runs.submit.values import Gpus, NodeCount


def read(*words: str) -> RunRequest:
    """Return the request of a command line."""
    found: list[RunRequest] = []

    @click.command(context_settings=dict(RUN_SETTINGS))
    @run_options
    @click.argument("script")
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def command(script: str, args: tuple[str, ...], **given: Any) -> None:
        found.append(make_request(script, args, read_fields(given)))

    done = CliRunner().invoke(command, list(words), standalone_mode=False)
    if done.exception:
        raise done.exception
    return found[0]


def test_no_options_set_no_fields() -> None:
    assert read("train.py") == RunRequest("train.py")


def test_arguments_after_the_script_belong_to_it() -> None:
    request = read("-N", "2", "train.py", "-N", "3", "--", "--nodes=4", "a_b", "--x_y")
    assert (request.nodes, request.args) == (NodeCount(2, 2), ("-N", "3", "--", "--nodes=4", "a_b", "--x_y"))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["-N4"], {"nodes": NodeCount(4, 4)}),
        (["--nnodes=1:4"], {"nodes": NodeCount(1, 4)}),
        (["--nproc_per_node", "8"], {"nproc_per_node": 8}),
        (["--ntasks-per-node=8"], {"nproc_per_node": 8}),
        (["--gpus-per-node", "h100:8"], {"gpus_per_node": Gpus(8, "h100")}),
        (["-p", "train,spot", "-A", "ada", "-q", "high", "-C", "a&b"],
         {"partition": "train,spot", "account": "ada", "qos": "high", "constraint": "a&b"}),
        (["-t", "2:00:00", "-c", "4", "--mem=64G"], {"time_limit_s": 7200, "cpus_per_task": 4, "memory_mib": 65536}),
        (["-x", "n[1-2]", "--exclude", "n4"], {"exclude": ("n1", "n2", "n4")}),
        (["-J", "mine", "-D", "/tmp"], {"name": "mine", "chdir": "/tmp"}),
        (["--job-name=mine"], {"name": "mine"}),
        (["--env", "A=x y", "--env", "B_C=1", "--env", "A=2"], {"env": (("B_C", "1"), ("A", "2"))}),
        (["--preload", "a.b,c", "--preload", "d"], {"preload": ("a.b", "c", "d")}),
        (["--detach", "--fresh", "--no-preload"], {"detach": True, "fresh": True, "no_preload": True}),
        (["--hang-timeout", "off"], {"hang_timeout_s": 0}),
        (["--sbatch-arg", "--nice=1", "--sbatch-arg=--begin=a b"], {"sbatch_args": ("--nice=1", "--begin=a b")}),
        (["--sbatch-args", "--nice=10 --begin=now"], {"sbatch_args": ("--nice=10", "--begin=now")}),
    ],
)  # fmt: skip
def test_options_have_the_names_of_slurm_and_torchrun(words: list[str], fields: dict[str, Any]) -> None:
    assert read(*words, "train.py") == RunRequest("train.py", **fields)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--nodes", "many"], "--nodes"),
        (["--env", "A"], "--env"),
        (["--sbatch-arg", "--nodes=3"], "--sbatch-arg"),
        (["--sbatch-args", "train.sh"], "--sbatch-args"),
        (["--max-restarts=-1"], "--max-restarts"),
    ],
)
def test_error_names_the_option(words: list[str], where: str) -> None:
    with pytest.raises(UsageError) as fault:
        read(*words, "train.py")
    assert fault.value.where == where


def test_unknown_option_before_the_script_is_refused() -> None:
    with pytest.raises(click.NoSuchOption):
        read("--nodez", "2", "train.py")


def test_help_lists_every_option() -> None:
    help_text = CliRunner().invoke(run, ["--help"]).output
    assert [option.flag for option in OPTIONS if not re.search(rf"{option.flag}[ ,]", help_text)] == []
    assert [option.word for option in OPTIONS if option.kind.name != "FLAG" and option.shows not in help_text] == []


@pytest.mark.parametrize("word", ["nodes", "spares", "max_restarts", "framework", "signal_lead"])
def test_help_shows_actual_defaults(word: str) -> None:
    option = next(each for each in OPTIONS if each.word == word)
    default = option.help.partition("Default: ")[2].removesuffix(".")
    assert option.parse(default) == getattr(RunRequest("train.py"), option.target)


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--nodes", "4"], ["--nodes"]),
        (["--lr", "1e-4", "--nproc_per_node=8", "-N", "2"], ["--nproc_per_node", "-N"]),
        (["--nnodes=2", "--nnodes=3"], ["--nnodes"]),
        (["--", "--nodes", "4"], []),
        (["--name", "x", "--output", "y", "-n", "3", "nodes"], []),
    ],
)
def test_run_options_after_the_script_are_found(args: list[str], found: list[str]) -> None:
    assert find_misplaced(args) == found


def test_run_options_after_the_script_give_a_warning() -> None:
    done = CliRunner().invoke(run, ["no-such-script.py", "--nodes", "4"], standalone_mode=False)
    assert "`--nodes` after no-such-script.py is passed to the script, not to `dalsegno run`" in done.output
