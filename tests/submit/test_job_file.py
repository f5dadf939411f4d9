"""job.yaml: the same names as on the command line, and all errors at once, each at its line."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.errors import SpecError
from dalsegno.runs.submit.job_file import JobFile, load_job, parse_job
from dalsegno.runs.submit.options import OPTIONS
from dalsegno.runs.submit.request import RunRequest
from dalsegno.runs.submit.values import Gpus, NodeCount

WHOLE = """
    script: train.py
    args: [--epochs, 10, --note, "it's 1e-4"]
    nodes: 1:4
    nproc_per_node: 4
    gpus_per_node: h100:8
    cpus_per_task: 6
    mem: 64G
    spares: 1
    partition: train
    time: 1-12:00:00
    account: ml
    qos: high
    constraint: nvlink
    exclude: [gpu7, "gpu[1-2]"]
    env:
      NCCL_DEBUG: INFO
      THREADS: 4
    venv: /home/ada/venv
    name: llama
    detach: true
    max_restarts: 5
    preload: [transformers]
    fresh: yes
    framework: jax
    hang_timeout: 10m
    signal_lead: 300
    chdir: /home/ada
    output: out
    sbatch_args: ["--comment-like=a b", --nice=5]
"""


def problems(text: str) -> list[tuple[int, str, str]]:
    with pytest.raises(SpecError) as fault:
        parse_job(dedent(text).lstrip("\n"), "j.yaml")
    return [(int(each.where.removeprefix("j.yaml:")), each.what, each.hint) for each in fault.value.problems]


def test_every_key_sets_its_field() -> None:
    assert parse_job(dedent(WHOLE)) == RunRequest(
        script="train.py",
        args=("--epochs", "10", "--note", "it's 1e-4"),
        nodes=NodeCount(1, 4),
        nproc_per_node=4,
        gpus_per_node=Gpus(8, "h100"),
        cpus_per_task=6,
        memory_mib=65_536,
        spares=1,
        partition="train",
        time_limit_s=36 * 3600,
        account="ml",
        qos="high",
        constraint="nvlink",
        exclude=("gpu7", "gpu1", "gpu2"),
        env=(("NCCL_DEBUG", "INFO"), ("THREADS", "4")),
        venv="/home/ada/venv",
        name="llama",
        detach=True,
        max_restarts=5,
        preload=("transformers",),
        fresh=True,
        framework="jax",
        hang_timeout_s=600,
        signal_lead_s=300,
        chdir="/home/ada",
        output="out",
        sbatch_args=("--comment-like=a b", "--nice=5"),
    )


def test_arguments_in_one_line_are_split_as_a_shell_would() -> None:
    assert parse_job("script: t.py\nargs: --lr 1e-4 --note 'a b'\n").args == ("--lr", "1e-4", "--note", "a b")


def test_missing_and_blank_keys_are_defaults() -> None:
    assert parse_job("script: t.py\nnodes:\nx-mine: {a: 1}\n") == RunRequest("t.py")


def test_command_line_overrides_the_file() -> None:
    assert parse_job("script: t.py\nnodes: 2\nspares: 1\n", over={"nodes": NodeCount(8, 8)}) == RunRequest(
        "t.py", nodes=NodeCount(8, 8), spares=1
    )


def test_all_errors_are_reported_with_their_lines() -> None:
    text = """
        nodez: 4
        args: [--lr, 0.10]
        walltime: 3
        detach: 4
        name: -x
        mem: big
        env: [A=1]
        sbatch_args: [--nodes=3]
    """
    assert problems(text) == [
        (1, "a job file needs `script`", "add `script: train.py`"),
        (1, "a job file has no setting `nodez`", "did you mean `nodes`?"),
        (2, "`args`: `0.1` is not text", "put it in quotes: YAML converts numbers and yes/no"),
        (3, "a job file has no setting `walltime`", "did you mean `time`?"),
        (4, "`detach` must be `true` or `false`, not `4`", ""),
        (5, "`name`: invalid run name `-x`",
            "use letters, digits and `._@+=:-`, starting with a letter or digit, at most 80"),
        (6, "`mem`: `big` is not a size", "write `64G`, `512M`, `1T`, or `0` for all"),
        (7, "`env`: a list is not a mapping of variables", "write `NAME: value` lines below it"),
        (8, "`sbatch_args`: `--nodes` is set by `dalsegno run`", "use `--nodes`"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "this file contains no job"),
        ("- a", "this file contains no job"),
        ("script: t.py\nvenv: a\nconda: b\n", "`venv` and `conda` exclude each other"),
        ("script: ''\n", "no script given"),
    ],
)
def test_error_of_the_whole_file_names_the_file(text: str, what: str) -> None:
    with pytest.raises(SpecError) as fault:
        parse_job(text, "j.yaml")
    assert (fault.value.what, fault.value.where) == (what, "j.yaml")


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    good, binary = tmp_path / "job.yaml", tmp_path / "job.bin"
    good.write_text("\N{ZERO WIDTH NO-BREAK SPACE}script: t.py\n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert load_job(good) == RunRequest("t.py")
    for path, what in ((tmp_path / "none", "the file cannot be read: No such file or directory"),
                       (tmp_path, "the file cannot be read: Is a directory"),
                       (binary, "the file is not UTF-8 text")):  # fmt: skip
        with pytest.raises(SpecError) as fault:
            load_job(path)
        assert (fault.value.what, fault.value.where) == (what, str(path))


def test_missing_script_is_reported_with_other_errors(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"script: nothere.py\nchdir: {tmp_path}\nnodes: many\n")
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path / "job.yaml")
    answer = [(problem.what, problem.where.rpartition(":")[2]) for problem in caught.value.problems]
    assert answer == [("`nodes`: `many` is not a number of nodes", "3"), ("script `nothere.py` not found", "1")]
    assert caught.value.problems[1].hint == f"no such file in {tmp_path}"


def test_errors_use_the_option_names_of_a_job_file() -> None:
    with pytest.raises(SpecError, match="`preload` and `no_preload` exclude each other"):
        parse_job("script: t.py\npreload: [json]\nno_preload: true\n")


def test_job_file_has_a_key_for_every_option() -> None:
    assert set(JobFile.model_fields) == {"script", "args", *(option.word for option in OPTIONS)}


KEYS = st.sampled_from([*(option.word for option in OPTIONS), "script", "args", "nodez", "x-a"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)


@given(st.dictionaries(KEYS, SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS)))
def test_random_files_do_not_crash_the_parser(data: dict[str, object]) -> None:
    import yaml

    try:
        parse_job(yaml.safe_dump(data, allow_unicode=True))
    except SpecError as fault:
        assert all(each.where for each in fault.problems)
