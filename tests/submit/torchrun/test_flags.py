"""torchrun's command line: lines of its documentation, and every flag compared with torch's parser if installed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dalsegno.errors import UsageError
from dalsegno.runs.submit.values import NodeCount
from dalsegno.runs.torchrun.args import (
    FLAGS,
    HELP,
    TorchrunArgs,
    count_processes,
    parse_streams,
    parse_torchrun,
    torchrun_parser,
)


def read(line: str, **environ: str) -> TorchrunArgs:
    args = parse_torchrun(line.split(), environ)
    assert args is not None
    return args


def test_every_flag_has_a_field_with_the_same_default() -> None:
    defaults = {field.name: field.default for field in fields(TorchrunArgs) if field.name not in SCRIPT}
    assert {flag.dest: flag.default for flag in FLAGS} == defaults


SCRIPT = ("training_script", "training_script_args")


@pytest.mark.parametrize(
    ("line", "args"),
    [
        (
            "--standalone --nnodes=1 --nproc-per-node=8 train.py --lr 0.1",
            TorchrunArgs("train.py", ("--lr", "0.1"), nnodes="1", nproc_per_node="8", standalone=True),
        ),
        (
            "--nnodes=2 --nproc-per-node=4 --max-restarts=3 --rdzv-id=J --rdzv-backend=c10d --rdzv-endpoint=h:1 t.py",
            TorchrunArgs("t.py", nnodes="2", nproc_per_node="4", max_restarts=3, rdzv_id="J", rdzv_backend="c10d",
                         rdzv_endpoint="h:1"),
        ),
        (
            "--nnodes=1:4 --nproc_per_node=gpu --node_rank=1 --master_addr=10.0.0.1 --master_port=1234 -m a.b -m",
            TorchrunArgs("a.b", ("-m",), nnodes="1:4", nproc_per_node="gpu", node_rank=1, master_addr="10.0.0.1",
                         master_port=1234, module=True),
        ),
        (
            "-r 0:1,1:2 -t 3 --log_dir /l --local-ranks-filter 0,1 --no-python ./run --nnodes 9",
            TorchrunArgs("./run", ("--nnodes", "9"), redirects="0:1,1:2", tee="3", log_dir="/l",
                         local_ranks_filter="0,1", no_python=True),
        ),
        (
            "--signals-to-handle SIGTERM,SIGUSR2 --duplicate_stdout_filters a,,b,c --monitor-interval 5 t.py a -- x",
            TorchrunArgs("t.py", ("a", "--", "x"), signals_to_handle="SIGTERM,SIGUSR2",
                         duplicate_stdout_filters=("a,b", "c"), monitor_interval=5.0),
        ),
        ("--stand t.py", TorchrunArgs("t.py", standalone=True)),  # abbreviated, as argparse allows
    ],
)  # fmt: skip
def test_command_lines_are_parsed_as_by_torchrun(line: str, args: TorchrunArgs) -> None:
    assert read(line) == args


VALUES = {"rdzv_conf": "a=1", "start_method": "fork", "numa_binding": "node", "nproc_per_node": "2"}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_both_spellings_of_every_flag_are_accepted(flag: Any) -> None:
    value = [] if flag.switch else [VALUES.get(flag.dest, "1")]
    found = {parse_torchrun([spelling, *value, "t.py", "x"]) for spelling in flag.spellings}
    assert len(found) == 1
    (args,) = found
    assert args is not None and args.training_script_args == ("x",)
    assert getattr(args, flag.dest) != flag.default


def test_flags_override_pet_variables() -> None:
    environ = {"PET_NNODES": "2:4", "PET_MAX_RESTARTS": "5", "PET_STANDALONE": "1", "PET_MODULE": "0", "PET_TEE": "3"}
    args = read("--tee 1 t.py", **environ)
    assert args == TorchrunArgs("t.py", nnodes="2:4", max_restarts=5, standalone=True, tee="1")


def test_other_variables_of_torch_have_the_lowest_precedence() -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}
    args = read("t.py", **environ)
    assert (args.shutdown_timeout, args.log_line_prefix_template) == (60, "[${rank}]")
    assert read("--shutdown-timeout 5 t.py", **environ).shutdown_timeout == 5


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--nnode-range 2 t.py", "did you mean"),
        ("--zebra 2 t.py", "`dalsegno torchrun --help` shows all flags"),
        ("--nproc-per-nod=2 --nproc_per_mode=3 t.py", "did you mean `--nproc_per_node`?"),
        ("--nnodes", "`dalsegno torchrun --help` shows all flags"),
        ("--standalone", "name the script after the flags: `dalsegno torchrun --nproc-per-node 8 train.py --lr 0.1`"),
        ("--max-restarts many t.py", ""),
        ("--start-method thread t.py", ""),
        ("--nnodes 4:1 t.py", "write `4`, or `1:4`: at most 4, at least 1"),
        ("--max-restarts -1 t.py", "write 0 for none"),
        ("--no-python -m t", "remove one of them"),
        ("--tee 9 t.py", "write `3`, or `0:1,1:2` by local rank"),
        ("--rdzv-conf timeout t.py", "write `join_timeout=600,last_call_timeout=30`"),
        ("--local-ranks-filter a t.py", "write `0,1`"),
    ],
)
def test_arguments_that_torchrun_refuses_are_refused(line: str, hint: str) -> None:
    with pytest.raises(UsageError) as fault:
        read(line)
    assert hint in fault.value.hint


def test_a_switch_in_a_variable_must_be_a_number() -> None:
    with pytest.raises(UsageError) as fault:
        read("t.py", PET_STANDALONE="yes")
    assert fault.value.where == "PET_STANDALONE"


def test_help_needs_no_script() -> None:
    assert parse_torchrun(["--nnodes", "2", "--help"]) is None
    assert read("t.py --help").training_script_args == ("--help",)


@pytest.mark.parametrize(
    ("line", "nodes", "backend", "endpoint"),
    [
        ("t.py", NodeCount(1, 1), "static", "127.0.0.1:29500"),
        ("--master-addr a --master-port 7 t.py", NodeCount(1, 1), "static", "a:7"),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h t.py", NodeCount(1, 4), "c10d", "h"),
        ("--standalone --rdzv-endpoint h t.py", NodeCount(1, 1), "c10d", "localhost:0"),
    ],
)
def test_endpoint_and_nodes_are_parsed(line: str, nodes: NodeCount, backend: str, endpoint: str) -> None:
    args = read(line)
    assert (args.nodes, args.backend, args.endpoint) == (nodes, backend, endpoint)


def test_structured_flag_values_are_parsed() -> None:
    args = read("--rdzv-conf join_timeout=9,is_host=true --local-ranks-filter 0,2 t.py")
    assert args.settings == {"join_timeout": "9", "is_host": "true"}
    assert args.shown_ranks == (0, 2)
    assert parse_streams("3") == {None: 3}
    assert parse_streams("0:1,1:2") == {0: 1, 1: 2}


@pytest.mark.parametrize(
    ("text", "gpus", "count"), [("3", 8, 3), ("cpu", 8, 16), ("gpu", 8, 8), ("auto", 8, 8), ("auto", 0, 16)]
)
def test_processes_per_node_are_counted(text: str, gpus: int, count: int) -> None:
    assert count_processes(text, cpus=16, gpus=gpus) == count


@pytest.mark.parametrize("text", ["gpu", "tpu", "-1"])
def test_processes_without_devices_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        count_processes(text, cpus=16, gpus=0)


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"]))))
def test_arguments_after_the_script_belong_to_it(rest: list[str]) -> None:
    assume(rest[:1] != ["--"])  # argparse consumes it, as in torchrun
    args = parse_torchrun(["--nnodes", "2", "train.py", *rest])
    assert args is not None and args.training_script_args == tuple(rest)


def test_help_lists_every_flag_once_with_its_default() -> None:
    said = " ".join(torchrun_parser({"PET_NNODES": "7"}).format_help().split())
    assert set(HELP) == {flag.name for flag in FLAGS}
    assert [flag.name for flag in FLAGS if f"{flag.name} " not in said] == []
    assert "--nproc_per_node" not in said and "-r, --redirects WHAT" in said
    assert "shrink and grow. Default: 1:1." in said and "run fails. Default: 0." in said


# Comparison with torch, if installed


def test_parser_of_torch_has_the_same_flags() -> None:
    run = pytest.importorskip("torch.distributed.run")
    theirs = {action.dest: action for action in run.get_args_parser()._actions}
    ours = {action.dest: action for action in torchrun_parser({})._actions}
    missing = set(theirs) - set(ours) - {"help", "print_completion"}
    assert missing == set(), "torchrun has flags that we lack"
    for dest in set(theirs) & set(ours) - {"help"}:
        assert set(theirs[dest].option_strings) <= set(ours[dest].option_strings), dest
        assert theirs[dest].type in (ours[dest].type, None) or "list" in str(theirs[dest].type), dest
        # a default of 29500 became None with the same meaning, and an empty list is our empty tuple
        assert (theirs[dest].default or None) == (ours[dest].default or None) or dest == "master_port", dest


def test_parser_of_torch_splits_arguments_alike() -> None:
    run = pytest.importorskip("torch.distributed.run")
    line = ["--nnodes", "1:4", "--nproc_per_node", "2", "-m", "a.b", "--tee", "3", "--", "x"]
    theirs, ours = run.parse_args(line), parse_torchrun(line)
    assert ours is not None
    assert (theirs.training_script, tuple(theirs.training_script_args)) == (
        ours.training_script,
        ours.training_script_args,
    )
