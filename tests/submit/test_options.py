"""The table of options: a name means the same on the command line, in variables and in a job file."""

from __future__ import annotations

from dataclasses import fields

import pytest

from dalsegno.errors import UsageError
from dalsegno.runs.submit.options import OPTIONS, make_request, options_from_env, parse_option
from dalsegno.runs.submit.request import RunRequest
from dalsegno.runs.submit.values import Gpus, NodeCount


def test_every_field_of_a_request_has_an_option() -> None:
    assert {option.target for option in OPTIONS} | {"script", "args"} == {field.name for field in fields(RunRequest)}


def test_keys_flags_and_variables_have_the_same_names() -> None:
    (option,) = [option for option in OPTIONS if option.word == "gpus_per_node"]
    assert (option.flag, option.variable) == ("--gpus-per-node", "DALSEGNO_RUN_GPUS_PER_NODE")


def test_variables_set_options_and_others_are_ignored() -> None:
    environ = {
        "DALSEGNO_RUN_NODES": "1:4",
        "DALSEGNO_RUN_GPUS_PER_NODE": "h100:8",
        "DALSEGNO_RUN_TIME": "2h",
        "DALSEGNO_RUN_ENV": "A=1 B='x y'",
        "DALSEGNO_RUN_FRESH": "yes",
        "DALSEGNO_RUN_SBATCH_ARGS": "--reservation=morning --nice=10",
        "DALSEGNO_RUN_QOS": "",
        "DALSEGNO_RUN_ID": "train-1",
        "HOME": "/root",
    }
    assert options_from_env(environ) == {
        "nodes": NodeCount(1, 4),
        "gpus_per_node": Gpus(8, "h100"),
        "time_limit_s": 7200,
        "env": (("A", "1"), ("B", "x y")),
        "fresh": True,
        "sbatch_args": ("--reservation=morning", "--nice=10"),
    }


def test_error_names_its_flag_or_variable() -> None:
    with pytest.raises(UsageError) as fault:
        options_from_env({"DALSEGNO_RUN_NODES": "many"})
    assert (fault.value.where, fault.value.what) == ("DALSEGNO_RUN_NODES", "`many` is not a number of nodes")
    with pytest.raises(UsageError) as fault:
        parse_option("max-restarts", "x")
    assert fault.value.where == "--max-restarts"


def test_command_line_overrides_variables_and_variables_override_the_file() -> None:
    file = {"nodes": NodeCount(1, 1), "spares": 1, "qos": "low"}
    variables = {"nodes": NodeCount(2, 2), "spares": 2}
    line = {"nodes": NodeCount(3, 3)}
    request = make_request("train.py", ("-v",), file, variables, line)
    assert request == RunRequest("train.py", ("-v",), NodeCount(3, 3), spares=2, qos="low")


def test_empty_image_name_is_refused() -> None:
    with pytest.raises(UsageError, match="name is empty"):
        parse_option("container_image", "")
    assert options_from_env({"DALSEGNO_RUN_CONTAINER_IMAGE": ""}) == {}
