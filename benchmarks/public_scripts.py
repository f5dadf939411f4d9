#!/usr/bin/env python3
"""Run public training scripts under `dalsegno run` and `dalsegno torchrun`, and kill one rank of each.

    sudo benchmarks/public_scripts.py CHECKOUTS VENV            prints a table, about ten minutes
    sudo benchmarks/public_scripts.py CHECKOUTS VENV --write    also writes it to docs/frameworks.md

CHECKOUTS has the repositories `examples` (pytorch), `nanoGPT` (karpathy) and `transformers` (huggingface). VENV has
torch, transformers, accelerate, datasets, evaluate, scikit-learn, hydra-core, boto3, requests and aiohttp.

Two virtual hosts with one rank each train on CPUs. A script that is hard-wired to GPUs is copied, and the lines in
`CASES` are changed in the copy. SIGKILL ends rank 1 when its case says so (`kill_at`), and the script
must reach its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rivals import kill
from stage import ROOT, Failed, Shape, Stage
from table import aligned, write

PAGE = ROOT / "docs/frameworks.md"
LIMIT_S = 400.0
PORT = 29577
LAUNCHERS = ("run", "torchrun")
WORDS = ("the", "a", "rank", "node", "step", "loss", "runs", "ends", "again", "then", "and", "of")

Change = tuple[str, str, str]  # file name, the text in it that needs GPUs, and the text for CPUs that replaces it


@dataclass(frozen=True)
class Case:
    """A public script: where it is, how it is started, and what shows its progress."""

    name: str
    folder: str  # the folder of the script, relative to CHECKOUTS
    script: str
    args: tuple[str, ...]
    progress: str  # matches a line of rank 0 and the number of its step, epoch or iteration
    unit: str  # empty if the script prints no number
    kill_at: float
    changes: tuple[Change, ...] = ()
    prepare: Callable[[Path, Path], None] | None = None  # creates the data, given the copied folder and the venv


def prepare_characters(folder: Path, venv: Path) -> None:
    """Write a made-up text, and let nanoGPT's own script turn it into data."""
    data = folder / "data/shakespeare_char"
    (data / "input.txt").write_text(made_up_text(20_000))
    check([str(venv / "bin/python"), str(data / "prepare.py")])


def prepare_language_model(folder: Path, venv: Path) -> None:
    """Write a made-up text and a tokenizer for it, because nothing can be downloaded."""
    (folder / "text.txt").write_text(made_up_text(20_000))
    check([str(venv / "bin/python"), "-c", TOKENIZER], cwd=folder)


TOKENIZER = """
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
made = Tokenizer(models.WordLevel(unk_token="?"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
made.train(["text.txt"], trainers.WordLevelTrainer(special_tokens=["?"]))
PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", eos_token="?").save_pretrained("tokenizer")
"""


def prepare_minigpt(folder: Path, _venv: Path) -> None:
    (folder / "made_up.txt").write_text(made_up_text(800))


CASES = (
    Case(
        "ddp-tutorial-series, multinode.py", "examples/distributed/ddp-tutorial-series", "multinode.py", ("300", "50"),
        r"\[GPU0\] Epoch (\d+)", "epoch", 120,
        (
            ("multinode.py", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "pass"),
            ("multinode.py", 'backend="nccl"', 'backend="gloo"'),
            ("multinode.py", 'self.local_rank = int(os.environ["LOCAL_RANK"])', 'self.local_rank = "cpu"'),
            ("multinode.py", 'loc = f"cuda:{self.local_rank}"', 'loc = "cpu"'),
            ("multinode.py", ", device_ids=[self.local_rank]", ""),
        ),
    ),
    Case(
        "minGPT-ddp, main.py", "examples/distributed/minGPT-ddp/mingpt", "main.py",
        ("data_config.path=made_up.txt", "data_config.truncate=1.0", "data_config.block_size=16",
         "gpt_config.n_layer=1", "gpt_config.n_head=2", "gpt_config.n_embd=16", "trainer_config.max_epochs=40",
         "trainer_config.batch_size=32", "trainer_config.data_loader_workers=0", "trainer_config.save_every=3",
         "trainer_config.use_amp=False"),
        r"\[RANK0\] Epoch (\d+)", "epoch", 10,
        (
            ("main.py", "if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:"),
            ("main.py", "acc = torch.accelerator.current_accelerator()", 'acc = "cpu"'),
            ("main.py", "torch.accelerator.set_device_index(rank)", "pass"),
            ("trainer.py", "self.acc = torch.accelerator.current_accelerator()", 'self.acc = "cpu"'),
            ("trainer.py", "model.to(self.local_rank)", "model"),
            ("trainer.py", ", device_ids=[self.local_rank]", ""),
            ("trainer.py", "source.to(self.local_rank)", "source"),
            ("trainer.py", "targets.to(self.local_rank)", "targets"),
        ),
        prepare_minigpt,
    ),
    Case(
        "nanoGPT, train.py", "nanoGPT", "train.py",
        ("--dataset=shakespeare_char", "--backend=gloo", "--dtype=float32", "--compile=False", "--eval_interval=20",
         "--eval_iters=2", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4",
         "--gradient_accumulation_steps=2", "--max_iters=400"),
        r"iter (\d+):", "iteration", 130,
        (
            ("train.py", "device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
            ("train.py", "torch.cuda.set_device(device)", "pass"),
            ("train.py", ", device_ids=[ddp_local_rank]", ""),
        ),
        prepare_characters,
    ),
    Case(
        "FSDP2, example.py", "examples/distributed/FSDP2", "example.py", (), r"FSDPTransformer\(()", "", 0,
        (
            ("example.py", "if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:"),
            ("example.py", "backend=backend, device_id=device", "backend=backend"),
        ),
    ),
    Case(
        "transformers, run_clm.py", "transformers/examples/pytorch/language-modeling", "run_clm.py",
        ("--model_type", "gpt2", "--config_overrides", "n_layer=1,n_head=2,n_embd=16,n_positions=32",
         "--tokenizer_name", "tokenizer", "--train_file", "text.txt", "--block_size", "32", "--do_train",
         "--per_device_train_batch_size", "4", "--max_steps", "150", "--save_steps", "20", "--logging_steps", "1",
         "--output_dir", "out", "--use_cpu", "--ddp_backend", "gloo", "--report_to", "none", "--disable_tqdm", "True"),
        r"'epoch': '?([\d.]+)", "epoch", 0.1, (), prepare_language_model,
    ),
)  # fmt: skip


def made_up_text(words: int) -> str:
    drawn = random.Random(0)
    return " ".join(drawn.choice(WORDS) + (".\n" if number % 12 == 11 else "") for number in range(words))


def check(argv: Sequence[str], cwd: Path | None = None) -> None:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{argv[0]} ended with code {done.returncode}\n{done.stderr}")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one script under one launcher."""

    killed_at: str
    continued_at: str  # the first step after the kill
    code: int


def copy(case: Case, checkouts: Path, venv: Path, to: Path) -> Path:
    """Copy the script's folder, apply the changes of the case to the copy, and prepare its data."""
    folder = to / case.script.removesuffix(".py")
    shutil.copytree(checkouts / case.folder, folder)
    for name, old, new in case.changes:
        text = (folder / name).read_text()
        if old not in text:
            raise Failed(f"{case.name}: {name} has no `{old}` any more")
        (folder / name).write_text(text.replace(old, new))
    if case.prepare is not None:
        case.prepare(folder, venv)
    return folder


def command(launcher: str, case: Case, venv: Path) -> list[str]:
    dalsegno = str(ROOT / "dalsegno")
    if launcher == "run":
        return [dalsegno, "run", "--venv", str(venv), "-N", "2", "--nproc-per-node", "1", case.script, *case.args]
    return [
        "srun", "-N", "2", "--ntasks-per-node", "1", "-c", "1", "--unbuffered",
        dalsegno, "torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"train-1:{PORT}", case.script, *case.args,
    ]  # fmt: skip


def play(stage: Stage, launcher: str, case: Case, venv: Path, folder: Path) -> Outcome:
    """Start the script, kill rank 1 at its point, and wait for the end."""
    path = f"{venv}/bin:{os.environ['PATH']}"
    # `dalsegno torchrun` prefers its own Python if that has torch.
    own = {"VIRTUAL_ENV": str(venv), "PYTHON_EXEC": f"{venv}/bin/python", "PATH": path, "HF_HUB_OFFLINE": "1"}
    env = {**stage.slurm_env, **own}
    output = folder / "output.txt"
    with open(output, "wb") as file:
        started = subprocess.Popen(command(launcher, case, venv), env=env, cwd=folder, stdout=file, stderr=file)
    try:
        until = time.monotonic() + LIMIT_S
        before = wait_for(lambda: reached(case, output.read_text(errors="replace")), started, until, output)
        offset = output.stat().st_size
        kill(worker(1, folder))
        code = started.wait(max(1.0, until - time.monotonic()))
    finally:
        if started.poll() is None:
            started.terminate()
            started.wait(60)
    after = points(case, restarted(output.read_bytes()[offset:].decode(errors="replace")))
    if not after:
        raise Failed(f"{case.name} did not continue under {launcher}\n{output.read_text(errors='replace')[-3000:]}")
    return Outcome(before[-1], after[0], code)


def points(case: Case, text: str) -> list[str]:
    return [found or "0" for found in re.findall(case.progress, text)]


def reached(case: Case, text: str) -> list[str]:
    """Return the progress so far if the point of the kill is reached, otherwise an empty list."""
    found = points(case, text)
    return found if found and float(found[-1]) >= case.kill_at else []


def restarted(text: str) -> str:
    """Return the output of the new workers, which follows the line that reports the restart; "" without such a line."""
    found = re.search(r"^generation 2:|restarting on ", text, re.MULTILINE)
    return text[found.end() :] if found else ""


def wait_for(
    is_there: Callable[[], list[str]], started: subprocess.Popen[bytes], until: float, output: Path
) -> list[str]:
    while not (found := is_there()):
        if started.poll() is not None or time.monotonic() > until:
            raise Failed(f"the script did not come to its kill\n{output.read_text(errors='replace')[-3000:]}")
        time.sleep(0.02)
    return found


def worker(rank: int, folder: Path) -> int:
    """Return the worker with this rank of the script in this folder. Other runs on this machine are left alone."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text() == f"ds:w{rank}\n" and (process / "cwd").resolve() == folder:
                return int(process.name)
    raise Failed(f"there is no worker with rank {rank} in {folder}")


def row(case: Case, outcomes: Sequence[Outcome | str]) -> list[str]:
    """Return a row of the table: the script, changed lines, and the outcome under each launcher."""
    return [case.name, str(len(case.changes)) if case.changes else "none", *(describe(case, each) for each in outcomes)]


def describe(case: Case, outcome: Outcome | str) -> str:
    if isinstance(outcome, str):
        return outcome
    numbers = f"killed at {case.unit} {outcome.killed_at}, continues at {outcome.continued_at}"
    killed = numbers if case.unit else "killed after its start, starts again"
    return f"{killed}, {'ends' if outcome.code == 0 else f'fails with code {outcome.code}'}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--only", default="", help="only scripts whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    stage, work = Stage(), Path(tempfile.mkdtemp(prefix="public-scripts-"))
    rows, failed = [], False
    try:
        stage.up(Shape(2, accounting=False))
        for case in (each for each in CASES if options.only in each.name):
            outcomes: list[Outcome | str] = []
            for launcher in LAUNCHERS:
                try:
                    folder = copy(case, options.checkouts.resolve(), options.venv.resolve(), work / launcher)
                    outcomes.append(play(stage, launcher, case, options.venv.resolve(), folder))
                except (Failed, subprocess.TimeoutExpired) as error:
                    say(f"{case.name} under {launcher}: {error}")
                    outcomes.append("failed")
                    failed = True
                say(f"{case.name}, {launcher}: {describe(case, outcomes[-1])}")
            rows.append(row(case, outcomes))
    finally:
        left = stage.close()
        shutil.rmtree(work, ignore_errors=True)
    table = aligned(("script", "changed lines", *(f"`dalsegno {each}`" for each in LAUNCHERS)), rows)
    print(table)
    if options.write and not failed:
        write(PAGE, table, "public_scripts")
    for each in left:
        say(f"left behind: {each}")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
