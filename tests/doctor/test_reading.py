"""Scripts, batch scripts, logs, environments and snapshots are read without running anything, within limits."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dalsegno.doctor.batch import misplaced_options, read_batch, read_submit_line
from dalsegno.doctor.logs import LogEnd, LogSign, find_end, find_signs
from dalsegno.doctor.script import read_script
from dalsegno.doctor.slurm_source import PROBE, parse_probes
from dalsegno.doctor.sources import (
    find_snapshot,
    look_at_python,
    numbered_lines,
    place_of,
    port_is_taken,
    read_dump_files,
    signs_in,
)
from dalsegno.system.processes import LocalRunner

RECORDED = Path(__file__).parents[1] / "recorded/doctor"

# Scripts


def test_reading_a_script_does_not_run_it(tmp_path: Path):
    read_script(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n", "train.py")
    assert not (tmp_path / "ran").exists()


def test_names_are_resolved_through_imports():
    text = """
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.distributed as dist
import torch
def setup():
    dist.init_process_group("NCCL")
def main():
    setup()
    DDP(torch.nn.Linear(1, 1).to("cuda:0"))
    dist.all_reduce(torch.ones(1))
"""
    facts = read_script(text, "train.py")
    assert [(call.line, call.name, call.function) for call in facts.wrappers] == [
        (9, "DistributedDataParallel", "main")
    ]
    assert [(call.line, call.function) for call in facts.starts] == [(6, "setup")]
    assert (facts.backend, facts.backend_line, facts.cuda_line) == ("nccl", 6, 9)
    assert [call.name for call in facts.collectives] == ["all_reduce"]


def test_own_class_of_the_same_name_is_not_torchs():
    assert read_script("class DistributedDataParallel: pass\nDistributedDataParallel()", "t.py").wrappers == ()


def test_imported_module_is_distinguished_from_a_program():
    program = "def main(): ...\nif __name__ == '__main__':\n    main()\n"
    assert read_script(program, "t.py").is_program and read_script("model = build()\n", "t.py").is_program
    assert not read_script('"""About."""\nimport torch\nSIZE = 3\nclass Model: ...\n', "t.py").is_program


@pytest.mark.parametrize(
    "save",
    [
        "if rank == 0:\n    torch.save(1, 'a.pt')",
        "if dist.get_rank() == 0 and step % 10 == 0:\n    torch.save(1, 'a.pt')",
        "torch.save(1, f'a-{rank}.pt')",
        "def save():\n    torch.save(1, 'a.pt')\nif is_main_process():\n    save()",
        "def save():\n    if rank != 0:\n        return\n    torch.save(1, 'a.pt')\nsave()",
    ],
)
def test_save_that_depends_on_the_rank_is_guarded(save: str):
    assert read_script(f"import torch\n{save}\n", "t.py").open_saves == ()


def test_hostile_scripts_are_refused_not_fatal():
    assert read_script("\0", "t.py").fault
    assert read_script("(" * 5000, "t.py").fault
    assert read_script("x = " + "-" * 100_000 + "1", "t.py").fault


# Batch scripts


def test_recorded_batch_script_is_understood():
    facts = read_batch((RECORDED / "job.sbatch").read_text(), "job.sbatch")
    assert facts.options["partition"] == "gpu" and facts.option_lines["output"] == 5
    assert [line.line for line in facts.late] == [9]
    assert facts.environment() == (8, "/fsx/ada/venv") and facts.variable("MASTER_PORT") == (7, "29500")
    assert [line.line for line in facts.container_lines()] == [10]
    assert [line.line for line in facts.broken] == [11]
    assert not facts.requests_gpus and not facts.takes_arguments


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node=4 train.py",
        "torchrun --nproc_per_node 4 -m package.train",
        'srun torchrun "${ARGS[@]}" $SCRIPT',
        "torchrun --standalone --no-python ./train",
        "python -m torch.distributed.run --nnodes=2 tool --lr 3",
    ],
)
def test_launcher_with_a_script_is_in_order(command: str):
    assert read_batch(f"#!/bin/sh\n{command}\n", "job").without_script() == []


def test_script_and_arguments_are_found_in_a_submit_line():
    line = read_submit_line("sbatch -N 2 --exclusive --time 5 job.sh --nodes=4 x")
    assert line is not None and (line.script, line.arguments) == ("job.sh", ("--nodes=4", "x"))
    short = read_submit_line("/usr/bin/sbatch -N2 -o 'j-%j.out' --wrap 'echo x'")
    assert short is not None and (short.script, short.options["output"]) == ("", "j-%j.out")


@pytest.mark.parametrize("line", ["", "srun -J x --chdir=/tmp --nodes=2 hostname", "salloc -N 2 job.sh --nodes=2"])
def test_programs_of_srun_and_salloc_are_not_taken_for_batch_scripts(line: str):
    assert read_submit_line(line) is None


def test_options_of_scripts_are_not_taken_for_slurms():
    assert misplaced_options(["--lr", "0.1", "-N", "2", "--nodes", "2", "--mem=4G"]) == ["--nodes 2", "--mem=4G"]
    assert misplaced_options(["--exclusive", "x", "--nodes"]) == ["--exclusive", "--nodes"]


def test_arguments_of_scripts_end_where_the_command_ends():
    lines = "srun python train.py --lr 1 > log --mem=1\ncp --nodes=2 train.py x\nsrun ./t.py a && srun --nodes=2 b"
    calls = read_batch(f"#!/bin/sh\n{lines}\n", "job").calls
    assert [(call.path, call.arguments) for call in calls] == [("train.py", ("--lr", "1"))]


# Logs


def test_evidence_is_escaped_and_short():
    line = "\x1b[31mCUDA out of memory\x1b]0;evil\x07" + "x" * 10_000
    (seen,) = find_signs([(3, line)], "out")
    assert (seen.sign, seen.where) == (LogSign.GPU_MEMORY, "out:3")
    assert "\\x1b[31m" in seen.text and seen.text.isprintable() and len(seen.text) < 500


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Cuda failure 2 'out of memory'",
        "gpu-3:17:99 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
    ],
)
def test_lack_of_gpu_memory_is_recognized(line: str):
    assert LogSign.GPU_MEMORY in {seen.sign for seen in find_signs([(1, line)], "out")}


def test_long_log_is_read_at_both_ends_with_right_line_numbers(tmp_path: Path):
    path = tmp_path / "out"
    lines = [f"line {number}" for number in range(1, 20_001)]
    path.write_text("\n".join(lines))
    read = list(numbered_lines(path, head=1000, tail=1000))
    assert read[0] == (1, "line 1") and read[-1] == (20_000, "line 20000")
    whole = [(number, text) for number, text in read if text == f"line {number}"]
    assert len(whole) >= len(read) - 2 and len(read) < 300, "only the cut lines differ"


def test_pipes_and_folders_are_not_read_as_logs(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert signs_in(tmp_path / "pipe") == [] == signs_in(tmp_path) == signs_in(tmp_path / "missing")


@pytest.mark.parametrize(
    "part", ["port: 1 ", "PG ID 1Rank 1]", "a", "a.py", "world size of 1 ", "torch", "unable to open "]
)
def test_hostile_lines_do_not_take_long(part: str):
    line = ("torch " + part * 2000)[:2000]
    began = time.process_time()
    list(find_signs(((number, line) for number in range(20)), "out"))
    assert time.process_time() - began < 1.0, "20 lines"


def test_repeated_lines_do_not_fill_the_memory(tmp_path: Path):
    (tmp_path / "out").write_text("CUDA out of memory\n" * 5_000)
    assert len(signs_in(tmp_path / "out")) < 100


TRACEBACK = ["Traceback (most recent call last):", '  File "t.py", line 1, in <module>', "ValueError: bad"]


def end(*lines: str) -> LogEnd:
    return find_end(enumerate(lines, 1), "out")


def test_last_error_of_a_log_is_the_last_line_of_its_last_traceback():
    found = end("KeyError: 'x'", *TRACEBACK, "srun: error: n1: task 0: Exited with exit code 1")
    assert (found.error, found.error_line, found.at_end) == ("ValueError: bad", 4, True)


def test_prefixes_of_ranks_and_the_launchers_own_traceback_do_not_hide_the_error():
    launcher = ["Traceback (most recent call last):", "  x", "torch.distributed.elastic.ChildFailedError: "]
    assert end(*(f"[rank1]: {line}" for line in TRACEBACK), *launcher).error == "[rank1]: ValueError: bad"


def test_error_after_which_the_program_goes_on_does_not_end_the_log():
    assert not end(*TRACEBACK, *(f"step {number}" for number in range(60))).at_end


@pytest.mark.parametrize("line", ["step 1: no errors", "Error rate: 0.1", "loss Exception-free", "INFO: done"])
def test_ordinary_lines_are_not_errors(line: str):
    assert (end(line).error, end(line).last) == ("", ((1, line),))


# Environments


def environment(folder: Path, version: str) -> str:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").write_bytes(b"\x7fELF")
    (folder / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    packages = folder / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    if version:
        (packages / "torch").mkdir()
        (packages / "torch/version.py").write_text(version)
    return str(folder / "bin/python")


def test_torch_and_cuda_are_read_from_the_environments_files(tmp_path: Path):
    cpu = environment(tmp_path / "cpu", "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip = None\n")
    gpu = environment(tmp_path / "gpu", "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    none = environment(tmp_path / "none", "")
    found = [look_at_python(each, {}, "") for each in (cpu, gpu, none, "/nowhere/python")]
    assert [(each.torch, each.cuda) for each in found] == [
        ("2.13.0+cpu", False), ("2.13.0", True), ("", None), (None, None),
    ]  # fmt: skip


def test_torch_is_unknown_for_wrapper_scripts(tmp_path: Path):
    (tmp_path / "python3").write_text("#!/bin/sh\nexec pyenv exec python3\n")
    assert look_at_python(str(tmp_path / "python3"), {}, "").torch is None


MOUNTS = """
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /fsx rw - lustre 10.0.0.1@tcp:/fsx rw
31 22 0:41 / /home rw - nfs4 head:/home rw
"""


def test_network_file_systems_are_shared_and_folders_of_one_machine_are_not():
    shared = [place_of(path, MOUNTS).shared for path in ("/fsx/a", "/home/ada/x", "/opt/x", "/tmp/x")]
    assert shared == [True, True, False, False]
    assert place_of("/fsx/a", "").shared is None, "unknown"


def test_port_of_a_listener_is_taken():
    import socket

    with socket.socket() as sock:
        sock.bind(("", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert port_is_taken(port)
    assert not port_is_taken(port)


# Snapshots and dumps


def test_number_of_ranks_is_counted_from_the_files_of_a_snapshot(tmp_path: Path):
    names = {
        "deepspeed/global_step10": [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(8)],
        "dcp/step-3": [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))],
        "own": [f"model_rank{rank}.pt" for rank in range(2)],
        "plain": ["snapshot.pt"],
    }
    for folder, files in names.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in files:
            (tmp_path / folder / name).touch()
    found = [find_snapshot(tmp_path / folder) for folder in ("deepspeed", "dcp", "own", "plain", "missing")]
    sizes = [(each.world_size, each.needs_same_size) if each else None for each in found]
    assert sizes == [(8, True), (4, False), (2, True), None, None]


def test_dumps_of_other_users_are_not_read():
    folder = RECORDED / "nccl-timeout"
    paths = sorted(folder.iterdir())
    assert [dump.rank for _, dump in read_dump_files(paths, os.stat(folder / "trace_0").st_uid)] == [0]
    assert read_dump_files(paths, 54321) == []


# The probe


def test_probe_answers_what_it_sees_on_a_machine(tmp_path: Path):
    (tmp_path / "train.py").touch(mode=0o644)
    python = environment(tmp_path / "venv", "x")
    os.chmod(python, 0o755)
    env = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n1"}

    def probe(*words: str) -> object:
        (answer,) = parse_probes(LocalRunner().run(["sh", "-c", PROBE, "sh", *words], env=env).stdout)
        return answer.script, answer.python, answer.torch, answer.port_in_use

    assert probe(str(tmp_path / "train.py"), python, "0001") == ("r", True, True, False)
    assert probe(str(tmp_path / "gone.py"), "/nowhere/bin/python", "") == ("", False, False, None)
    assert parse_probes(json.dumps({"not": "an answer"})) == []


@pytest.mark.parametrize(("answer", "script"), [("-", None), ("0", ""), ("n", "-"), ("r", "r"), ("rx", "rx")])
def test_probe_tells_an_unreadable_script_from_a_missing_one(answer: str, script: str | None):
    (probe,) = parse_probes(f"dalsegno-probe n1 script={answer} python=- torch=- port=- containers=0 gpus=0")
    assert probe.script == script
