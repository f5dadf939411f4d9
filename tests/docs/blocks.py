"""The fenced blocks of README and docs: finding them, running their commands, comparing what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DALSEGNO = re.compile(r"(?:\./)?dalsegno (\w+)")

# Commands that need no cluster, and leave none.
CHEAP = {"init", "validate", "schema", "ckpt", "image"}
# Lines that no test can run, and why.
NOT_RUN = {
    "./dalsegno demo": "tests/cluster plays the same scene",
    "./dalsegno COMMAND": "no command, but the form of all",
    "./dalsegno setup": "changes the machine; tests/test_setup.py",
    "./dalsegno setup --dev": "changes the machine; tests/test_setup.py",
    "./test": "this is it",
    "./test tests/test_architecture.py -x": "this is it",
    "./test --long": "takes hours",
    "./test --long container": "takes hours",
    "./test --long bookworm": "takes minutes, and builds a machine",
    "./test --long trixie": "takes an hour",
    "./test --long sid": "takes an hour",
    "UPDATE_GOLDEN=1 ./test tests/slurm && git diff tests/golden": "writes into the repository",
    "rm -rf .venv": "removes what runs this test",
    "sudo apt-get remove slurmctld slurmd slurmdbd slurmrestd slurm-client munge mariadb-server"
    " && sudo apt-get autoremove": "removes Slurm from the machine",
    ".venv/bin/python docs/field_tables.py": "writes into the repository; tests/docs/test_pages.py",
    "srun --nodes 2 --ntasks-per-node 8 dalsegno bench ddp --model-mb 512": "wants sixteen GPUs; tests/bench",
    "torchrun --nproc-per-node 8 --no-python dalsegno bench ddp --model-mb 512": "wants eight GPUs; tests/bench",
    "dalsegno run --nodes 2 --nproc-per-node 8 --no-preload dalsegno bench ddp --model-mb 512": "wants sixteen GPUs",
    "cd examples && torchrun --nproc-per-node 2 -m ladder ring": "from the root of a clone; tests/ladder",
    "sudo benchmarks/up.py": "takes minutes",
    "sudo benchmarks/up.py --quick": "takes a minute",
    "sudo benchmarks/up.py --write": "takes minutes, and writes into the repository",
    "sudo benchmarks/restart.py": "takes a quarter of an hour",
    "sudo benchmarks/restart.py --quick": "takes minutes",
    "benchmarks/checkpoint.py": "takes minutes",
    "benchmarks/node_agent.py": "takes a minute",
    "benchmarks/containers.py --quick": "takes a minute",
    "benchmarks/containers.py --write": "takes minutes, and writes into the repository",
    "benchmarks/checkpoint.py --write": "takes minutes, and writes into the repository",
    "sudo benchmarks/recovery.py --quick": "takes minutes",
    "sudo benchmarks/recovery.py --write": "takes half an hour, and writes into the repository",
    "sudo benchmarks/gpu_cluster.py": "needs an NVIDIA GPU",
    "sudo benchmarks/gpu_cluster.py --write": "needs an NVIDIA GPU, and writes into the repository",
    "sudo benchmarks/restart.py --write": "takes a quarter of an hour, and writes into the repository",
}


@dataclass(frozen=True)
class Block:
    """One fenced block. The words after its language may say `file=NAME` (it is that file) and `faulty`."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str:
        return next((word.removeprefix("file=") for word in self.words if word.startswith("file=")), "")


@dataclass(frozen=True)
class Command:
    """What a reader would type, and what the page says it answers (None: nothing is said of that)."""

    where: str
    text: str
    answer: str | None = None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = FENCE.finditer(text)
    return [Block(page, text.count("\n", 0, f.start()) + 1, f[1], tuple(f[2].split()), f[3]) for f in found]


def every_block(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def commands(page: Path) -> Iterator[Command]:
    """All that is to be typed, in order, but for what no test can run."""
    for block in blocks(page):
        if block.language == "console":
            yield from _dialogue(block)
        elif block.language == "sh" and not all(line in NOT_RUN for line in lines(block)):
            yield Command(block.where, block.text)


def lines(block: Block) -> list[str]:
    """The commands of a `sh` block, without their comments."""
    bare = (re.sub(r"\s+# .*", "", line).strip() for line in block.text.splitlines())
    return [line for line in bare if line and not line.startswith("#")]


def _dialogue(block: Block) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        typed, _, answer = part.partition("\n")
        yield Command(block.where, typed, answer)


def needs_torch(page: Path) -> bool:
    return any("import torch" in block.text for block in blocks(page))


def needs_cluster(page: Path) -> bool:
    return any(set(DALSEGNO.findall(command.text)) - CHEAP for command in commands(page))


# Running ----------------------------------------------------------------------------------------------------


def play(page: Path, folder: Path, env: Mapping[str, str]) -> list[str]:
    """Do in `folder` all that the page does; gives what came out otherwise than the page says."""
    _furnish(page, folder)
    path = f"{folder}{os.pathsep}{env['PATH']}"
    faults = []
    for command in commands(page):
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", command.text], cwd=folder, env={**env, "PATH": path}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
        )  # fmt: skip
        meant_to_fail = (command.answer or "").startswith("error:")
        as_told = command.answer is None or matches(command.answer, done.stdout)
        if not as_told or (done.returncode != 0) != meant_to_fail:
            faults.append(f"{command.where}: `{command.text}` ended with {done.returncode} and said:\n{done.stdout}")
    return faults


def _furnish(page: Path, folder: Path) -> None:
    """The page's files, and `dalsegno` and `python` as commands in the folder."""
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)
    for name, words in {"dalsegno": "-m dalsegno", "python": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)


def matches(told: str, said: str) -> bool:
    """Equal but for numbers and spacing; a line with only … stands for any lines."""
    expected = "".join("(?:.*\n)*?" if line.strip() == "…" else f"{re.escape(line)}\n" for line in _plain(told))
    return re.fullmatch(expected, "".join(f"{line}\n" for line in _plain(said))) is not None


def _plain(text: str) -> list[str]:
    """Addresses, versions and times differ from run to run; so do the columns around them."""
    return [" ".join(re.sub(r"\d+(\.\d+)*", "0", line).split()) for line in text.rstrip("\n").split("\n")]
