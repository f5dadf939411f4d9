"""Find the fenced blocks of README and docs, run their commands, and compare their output."""

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
DALSEGNO = re.compile(r"(?:\./)?dalsegno (bench read|\w+)")

# Commands that neither need a cluster nor create one.
CHEAP = {"compare", "init", "validate", "schema", "ckpt", "image", "bench read", "estimate", "doctor"}
# Lines that no test can run, with the reason.
NOT_RUN = {
    "./dalsegno demo": "`./test --long` runs it: tests/cluster/test_demo.py",
    "./dalsegno COMMAND": "not a command, but the form of all commands",
    "./dalsegno setup": "changes the machine; tests/test_setup.py",
    "./dalsegno setup --dev": "changes the machine; tests/test_setup.py",
    "./test": "runs this test",
    "./test tests/test_architecture.py -x": "runs a test",
    "./test -p tests.cpu_times --cpu-times /tmp/times tests/cluster/test_shell.py && "
    ".venv/bin/python -m tests.cpu_times /tmp/times": "runs cluster tests",
    "./test --long": "takes hours",
    "./test --long container": "takes hours",
    "./test --long bookworm": "takes minutes, and builds a machine",
    "./test --long trixie": "takes an hour",
    "./test --long sid": "takes an hour",
    "UPDATE_GOLDEN=1 ./test tests/slurm && git diff tests/golden": "writes into the repository",
    "rm -rf .venv": "removes the environment of this test",
    "sudo apt-get remove slurmctld slurmd slurmdbd slurmrestd slurm-client munge mariadb-server"
    " && sudo apt-get autoremove": "removes Slurm from the machine",
    ".venv/bin/python docs/field_tables.py": "writes into the repository; tests/docs/test_pages.py",
    "srun --nodes 2 --ntasks-per-node 8 dalsegno bench ddp --model-mb 512": "needs sixteen GPUs; tests/bench",
    "torchrun --nproc-per-node 8 --no-python dalsegno bench ddp --model-mb 512": "needs eight GPUs; tests/bench",
    "dalsegno run --nodes 2 --nproc-per-node 8 --no-preload dalsegno bench ddp --model-mb 512": "needs sixteen GPUs",
    "cd examples && torchrun --nproc-per-node 2 -m ladder ring": "runs in the root of a clone; tests/ladder",
    **dict.fromkeys(
        (
            "dalsegno bench all_reduce -b 8 -e 16G -f 2 --nodes 2 --gpus-per-node 8",
            "dalsegno bench all_gather -b 1G -e 8G -f 2 --nodes 2 --gpus-per-node 8"
            " --container-image /fsx/nccl-tests.sqsh",
            "dalsegno bench all_reduce -b 1K -e 16M -f 4 --nproc 2",
            "dalsegno bench build nccl-tests-2.19.6.tar.gz --nodes 1 --cuda-home /usr/local/cuda"
            " --mpi-home /opt/amazon/openmpi",
            "dalsegno bench all_reduce -b 1G -e 16G -f 2 --nodes 2 --gpus-per-node 8 --nccl-tests nccl-tests-2.19.6",
            "dalsegno bench pairs --nodes 4 --svg pairs.svg",
            "dalsegno bench pairs --nodes 64 --gpus-per-node 8 --bisect",
            "dalsegno inject link-slow train-2 --peer train-4 --rate 20mbit",
            "dalsegno bench pairs --nodes 4 --size 4M --low 0.3",
            "dalsegno inject --clear train-2",
            "dalsegno bench gemm --nodes 2 --gpus-per-node 8",
            "dalsegno bench memory --nodes 2 --gpus-per-node 8",
            "dalsegno bench storage /fsx /tmp --nodes 8",
            "dalsegno bench launch --nodes 4",
        ),
        "needs GPUs or many nodes; tests/cluster/test_bench.py and tests/bench run smaller ones",
    ),
    **dict.fromkeys(
        (
            "dalsegno certify --quick",
            "dalsegno certify --output certificate-march",
            "dalsegno certify --against certificate-march/certificate.json",
            "dalsegno certify --only storage --only pairs",
            "dalsegno certify --container-image ubuntu.sqsh",
            "dalsegno certify --power-cut",
        ),
        "takes minutes, on a whole cluster; tests/cluster/test_certify.py",
    ),
    "PYTHONPATH=src python3 benchmarks/collectives.py": "takes minutes",
    "PYTHONPATH=src python3 benchmarks/collectives.py --nproc 1": "takes a minute",
    "PYTHONPATH=src python3 benchmarks/bench_gpu.py": "needs an NVIDIA GPU",
    "sudo benchmarks/up.py": "takes minutes",
    "sudo benchmarks/scale.py": "takes minutes",
    "sudo benchmarks/scale.py --nodes 256 --seconds 5": "takes a minute",
    "sudo benchmarks/scale.py --nodes 256 --seconds 5 --no-steps": "takes a minute",
    "sudo benchmarks/scale.py --part controller": "takes minutes",
    "sudo benchmarks/scale.py --part controller --nodes 10000": "takes minutes",
    "sudo benchmarks/scale.py --part coordinator --nodes 4096 --node-timeout 1": "takes minutes",
    "benchmarks/scale_costs.py --nodes 256": "takes a minute",
    "PYTHONPATH=src python benchmarks/verify_gpu.py": "needs an NVIDIA GPU",
    "sudo benchmarks/up.py --quick": "takes a minute",
    "sudo benchmarks/up.py --write": "takes minutes, and writes into the repository",
    "sudo benchmarks/restart.py": "takes a quarter of an hour",
    "sudo benchmarks/restart.py --quick": "takes minutes",
    "sudo benchmarks/detection.py --quick": "takes minutes",
    "sudo benchmarks/detection.py --write": "takes a quarter of an hour, and writes into the repository",
    "benchmarks/checkpoint.py": "takes minutes",
    "benchmarks/node_agent.py": "takes a minute",
    "benchmarks/web.py": "measures, and opens a browser; tests/cluster/test_web.py opens the page",
    "benchmarks/containers.py --quick": "takes a minute",
    "benchmarks/containers.py --write": "takes minutes, and writes into the repository",
    "benchmarks/checkpoint.py --write": "takes minutes, and writes into the repository",
    "benchmarks/exporter.py": "takes a minute",
    "benchmarks/exporter.py --live": "takes minutes, and starts 1,000 nodes",
    "benchmarks/exporter.py --write": "takes minutes, and writes into the repository",
    "sudo benchmarks/recovery.py --quick": "takes minutes",
    "sudo benchmarks/recovery.py --write": "takes half an hour, and writes into the repository",
    "benchmarks/standby_gpu.py --runs 5": "needs an NVIDIA GPU",
    "benchmarks/standby_gpu.py --cpu --runs 8": "takes minutes",
    "sudo benchmarks/gpu_cluster.py": "needs an NVIDIA GPU",
    "sudo benchmarks/gpu_cluster.py --write": "needs an NVIDIA GPU, and writes into the repository",
    "sudo .venv/bin/python -m benchmarks.ssh --hosts 32": "takes a minute",
    "sudo .venv/bin/python -m benchmarks.ssh --hosts 32 --cluster": "takes a minute",
    "pip install --upgrade 'dalsegno[ssh]'": "changes the environment of this test",
    "dalsegno image build . -f nccl-tests.Dockerfile --build-arg NCCL_VERSION=v2.27.7-1 -o /fsx/nccl-tests.sqsh": (
        "needs images of a registry; tests/containers/test_dockerfile.py"
    ),
    "dalsegno up --upgrade": "needs hosts over SSH; tests/ssh/test_ssh_cluster.py",
    "sudo benchmarks/restart.py --write": "takes a quarter of an hour, and writes into the repository",
    **dict.fromkeys(
        (
            "python3 -m venv ~/dalsegno",
            "~/dalsegno/bin/pip install dalsegno",
            "~/dalsegno/bin/dalsegno run --nodes 2 train.py",
            "dalsegno adopt",
            "dalsegno adopt -o -",
            "dalsegno adopt --json",
            "dalsegno adopt watch",
            "dalsegno web --tunnel",
            "dalsegno web --listen 127.0.0.1:8080",
            "dalsegno adopt arm debug",
            "dalsegno adopt disarm debug",
        ),
        "needs a cluster of others; tests/cluster/test_existing_cluster.py",
    ),
}


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Its language may be followed by `file=NAME`, which names the file with this content, and by `faulty`.
    """

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
    """A command of a page, and the output that the page shows (None: the page shows none)."""

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
    """Yield the commands of a page in order, except those that no test can run."""
    for block in blocks(page):
        if block.language == "console":
            yield from _console_commands(block)
        elif block.language == "sh" and not all(line in NOT_RUN for line in lines(block)):
            yield Command(block.where, block.text)


def lines(block: Block) -> list[str]:
    """Return the commands of a `sh` block, without their comments."""
    bare = (re.sub(r"\s+# .*", "", line).strip() for line in block.text.splitlines())
    return [line for line in bare if line and not line.startswith("#")]


def _console_commands(block: Block) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        typed, _, answer = part.partition("\n")
        yield Command(block.where, typed, answer)


def needs_torch(page: Path) -> bool:
    return any("import torch" in block.text for block in blocks(page))


def needs_cluster(page: Path) -> bool:
    return any(set(DALSEGNO.findall(command.text)) - CHEAP for command in commands(page))


def run_page(page: Path, folder: Path, env: Mapping[str, str]) -> list[str]:
    """Run the commands of a page in `folder`, and return those whose output differs from the page."""
    _write_files(page, folder)
    path = f"{folder}{os.pathsep}{env['PATH']}"
    faults = []
    for command in commands(page):
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", command.text], cwd=folder, env={**env, "PATH": path}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
        )  # fmt: skip
        meant_to_fail = (command.answer or "").startswith("error:")
        as_shown = command.answer is None or matches(command.answer, done.stdout)
        if not as_shown or (done.returncode != 0) != meant_to_fail:
            faults.append(
                f"{command.where}: `{command.text}` exited with {done.returncode} and printed:\n{done.stdout}"
            )
    return faults


def _write_files(page: Path, folder: Path) -> None:
    """Write the files of the page, and `dalsegno` and `python` as commands, into the folder."""
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)
    for name, words in {"dalsegno": "-m dalsegno", "python": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)


def matches(shown: str, printed: str) -> bool:
    """Return whether both are equal except for numbers and spacing; a line with only … stands for any lines."""
    expected = "".join("(?:.*\n)*?" if line.strip() == "…" else f"{re.escape(line)}\n" for line in _plain(shown))
    return re.fullmatch(expected, "".join(f"{line}\n" for line in _plain(printed))) is not None


def _plain(text: str) -> list[str]:
    """Remove what differs from run to run: addresses, versions, times, and the columns around them."""
    return [" ".join(re.sub(r"\d+(\.\d+)*", "0", line).split()) for line in text.rstrip("\n").split("\n")]
