"""The batch script, compared with golden files; no argument of a user ever becomes two."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dalsegno.errors import DalsegnoError
from dalsegno.runs.submit.plan import RunPlan, plan_join, plan_next
from dalsegno.runs.submit.slurm_args import render_commands, render_sbatch, sbatch_word
from dalsegno.runs.submit.values import Gpus, NodeCount
from dalsegno.system.processes import LocalRunner
from tests.submit.runs import FOREIGN, HEAD, planned

NASTY = ["a b", "it's", '"q"', "a\nb", "$HOME", "`id`", "\\", "*", "", "#SBATCH --uid=0", "--", "-x", "ä", "!1"]

PLANS = {
    "smallest": planned(),
    "whole": planned(
        nodes=NodeCount(2, 4), spares=1, gpus_per_node=Gpus(8, "h100"), cpus_per_task=12, memory_mib=524_288,
        partition="train", time_limit_s=36 * 3600, account="ml", qos="high", constraint="[rack1|rack2]",
        exclude=("gpu1", "gpu2"), env=(("NCCL_DEBUG", "INFO"), ("NOTE", "it's\nhere")), venv="/home/ada/my env",
        max_restarts=5, preload=("transformers",), fresh=True, hang_timeout_s=600, signal_lead_s=300,
        chdir="/home/ada/100% #1", output="out", sbatch_args=("--reservation=mon morning", "--nice=5"),
    ),
    "mpi": planned(script="./hello", args=("--size", "2"), nodes=2, nproc_per_node=4, framework="mpi"),
    "plain": planned(conda="/opt/conda/envs/ml", args=tuple(NASTY), framework="plain"),
}  # fmt: skip
PLANS["next"] = plan_next(PLANS["whole"])
COMMANDS = {
    "head": planned(HEAD, nodes=4, spares=1, gpus_per_node=Gpus(8), time_limit_s=7200, chdir="/home/ada"),
    "head-mpi": planned(HEAD, nodes=2, framework="mpi", script="./hello"),
}
COMMANDS["head-join"] = plan_join(COMMANDS["head"], suspects=["train-3"], members=["train-1", "train-2", "train-4"])
COMMANDS["head-next"] = plan_next(COMMANDS["head"])


@pytest.mark.parametrize("name", PLANS)
def test_batch_scripts_match_the_golden_files(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"jobs/{name}.sbatch", render_sbatch(PLANS[name]))


@pytest.mark.parametrize("name", COMMANDS)
def test_head_commands_match_the_golden_files(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"jobs/{name}.txt", render_commands(COMMANDS[name]))


def test_dry_run_without_a_head_shows_script_and_step() -> None:
    shown = render_commands(planned())
    assert shown.startswith(render_sbatch(planned()))
    assert "\n# srun " in shown


# sbatch's own parser (src/sbatch/opt.c), to read our lines


def read_by_sbatch(script: str) -> list[str]:
    """Return the options that sbatch finds: it stops at the first line that is neither a comment nor blank."""
    found: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            found.extend(_words(_blank_out(line.removeprefix("#SBATCH"))))
        elif line.strip() and not line.startswith("#"):
            break
    return found


def _blank_out(line: str) -> str:
    for word in ("packjob", "hetjob"):
        at = line.lower().find(word)
        if at >= 0:
            line = line[:at] + " " * len(word) + line[at + len(word) :]
    return line


def _words(line: str) -> list[str]:
    words: list[str] = []
    word, quote, escaped, started = "", "", False, False
    for letter in line + " ":
        if letter.isspace() and not quote:
            words += [word] if started else []
            word, escaped, started = "", False, False
            continue
        started = True
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = True
            continue
        elif quote:
            if letter == quote:
                quote = ""
                continue
        elif letter in "\"'":
            quote = letter
            continue
        elif letter == "#":
            return [*words, *([word] if word else [])]
        word += letter
    assert not quote, f"unmatched {quote} in {line}"
    return words


LINE = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp", "Cn", "Co", "Cf"]), min_size=1)


@given(LINE)
@example("/a b/#1")
@example('it\'s \\ "quoted"')
@example("my-hetjob-PackJob")
def test_sbatch_parses_any_quoted_word(value: str) -> None:
    word = f"--output={value}"
    if word.isprintable():
        assert read_by_sbatch(f"#SBATCH {sbatch_word(word)}\n") == [word]


def test_word_with_a_line_break_is_refused() -> None:
    with pytest.raises(DalsegnoError, match="cannot be written to a batch script"):
        sbatch_word("--output=a\nb")


@pytest.mark.parametrize("name", PLANS)
def test_sbatch_sees_only_our_options(name: str) -> None:
    names = [word.partition("=")[0] for word in read_by_sbatch(render_sbatch(PLANS[name]))]
    assert len(names) == len(set(names))
    assert "--uid" not in names


def test_percent_sign_in_a_path_is_escaped() -> None:
    assert "--output=/home/ada/100%% #1/out/train-k3f9/job-%j.log" in read_by_sbatch(render_sbatch(PLANS["whole"]))


# The shell


def command_line(plan: RunPlan) -> list[str]:
    """Return the last command of the script, as a shell splits it. It may span several lines."""
    script = render_sbatch(plan)
    return shlex.split(script[script.index("\nexec ") :])[1:]


def test_script_contains_only_the_folder_of_the_user() -> None:
    plan = planned(args=("hunter2",), env=(("WANDB_API_KEY", "hunter2"),))
    assert "hunter2" not in render_sbatch(plan)


@pytest.mark.parametrize("name", PLANS)
def test_scripts_pass_the_syntax_check_of_bash(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(render_sbatch(PLANS[name]))
    assert LocalRunner().run(["/bin/bash", "-n", str(script)]).exit_code == 0


def test_run_on_a_foreign_cluster_is_one_script_with_its_coordinator() -> None:
    words = command_line(planned(FOREIGN, nodes=2))
    assert words[:4] == ["/home/ada/venv/bin/python", "-m", "dalsegno", "run-coordinator"]
    assert words[4:] == [planned(FOREIGN, nodes=2).folder]
