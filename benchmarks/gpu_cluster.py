#!/usr/bin/env python3
"""Measure a cluster whose node has one real GPU: start, container, health checks, worker restart, Xid.

    sudo benchmarks/gpu_cluster.py            about two minutes; prints a table, exits 1 if a row failed
    sudo benchmarks/gpu_cluster.py --write    also writes the table to docs/performance.md

Needs one NVIDIA GPU, its driver, root, and a PyTorch with CUDA in .venv. The Xid is a line in the kernel log, in the
driver's format. Detection, drain, evidence and the return to service are real.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from rivals import Ours, kill
from stage import ROOT, Failed, Stage
from steps import lives, wait_for_restart
from table import Row, render, write

PAGE = ROOT / "docs/performance.md"
NODE = "gpu-1"
LIMIT_S = 120.0
FILE = """\
name: bench
target: local
local: {{gpus: real}}
partitions:
  - {{name: gpu, nodes: 1, gpus: 1, gpu_type: {gpu_type}, cpus: 6, memory: 24G, default: true}}
  - {{name: cpu, nodes: 1, cpus: 2, memory: 2G}}
slurm: {{accounting: false}}
users: [{{name: ada}}]
health: {{mode: auto, max_out: 50%, per_hour: 1000}}
containers: {{enabled: true}}
"""
# The driver's library, called from inside a container: a context, an allocation and a copy there and back.
CUDA = """\
#include <cuda.h>
#include <stdio.h>
#include <string.h>
int main(void) {
    char name[80], out[16] = "", in[16] = "from the GPU";
    CUdevice device; CUcontext context; CUdeviceptr memory;
    if (cuInit(0) || cuDeviceGet(&device, 0) || cuDeviceGetName(name, sizeof name, device)) return 1;
    if (cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context) || cuMemAlloc(&memory, 16)) return 2;
    if (cuMemcpyHtoD(memory, in, 16) || cuMemcpyDtoH(out, memory, 16) || strcmp(in, out)) return 3;
    printf("%s\\n", name);
    return 0;
}
"""


def main() -> int:
    options = parse_options()
    if os.geteuid() != 0:
        sys.exit("error: virtual hosts need root\nhint: run it with sudo")
    name, driver, bus = gpu()
    stage, rows, code = Stage(), list[Row](), 0
    try:
        for row in measure(stage, name, bus):
            print(f"{row.what}: {row.verdict} {row.times_s}", file=sys.stderr, flush=True)
            rows.append(row)
            code = code or int("**missed**" in row.verdict or not row.times_s)
    except (KeyboardInterrupt, Failed) as error:
        print(f"stopped: {str(error) or 'interrupted'}", file=sys.stderr)
        code = 1
    finally:
        left = stage.close()
    print(render(rows))
    for thing in left:
        print(f"left behind: {thing}", file=sys.stderr)
    if options.write and not code and not left:
        on = f"Measured on {time.strftime('%Y-%m-%d')} with one {name}, driver {driver}, Linux {os.uname().release}."
        write(PAGE, f"{on}\n\n{render(rows)}", "gpu_cluster")
    return code or (1 if left else 0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md")
    return parser.parse_args()


def gpu() -> tuple[str, str, str]:
    """Return name, driver version and PCI address of the first GPU."""
    argv = ["nvidia-smi", "--query-gpu=name,driver_version,pci.bus_id", "--format=csv,noheader"]
    try:
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        name, driver, bus = said.splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        sys.exit("error: nvidia-smi shows no GPU on this machine")
    return name, driver, bus


# Measurements


def measure(stage: Stage, name: str, bus: str) -> Iterator[Row]:
    yield up(stage, name)
    yield gpu_in_step(stage, name)
    yield health(stage)
    yield from worker_killed(stage)
    yield container(stage, name)
    yield from xid(stage, bus)


def up(stage: Stage, name: str) -> Row:
    match = re.search(r"[ABHL]\d+", name)
    file = stage.home / "cluster.yaml"
    file.write_text(FILE.format(gpu_type=match.group().lower() if match else "gpu"))
    return Row("`up`, two virtual hosts, one with the GPU", None, (stage.dalsegno("up", str(file)),))


def gpu_in_step(stage: Stage, name: str) -> Row:
    """Check that a step that requests the GPU sees it, and that the devices cgroup refuses it to other steps."""
    with_gpu, took = step(stage, "--gpus=1", "nvidia-smi", "-L")
    without, _ = step(stage, "sh", "-c", "head -c 0 /dev/nvidia0 2>&1 || true")
    held = name in with_gpu and "not permitted" in without
    note = f"without `--gpus`: {without.strip().splitlines()[-1] if without.strip() else 'the device can be opened'}"
    required = "the GPU, only for steps that request it"
    return Row("`srun --gpus=1 nvidia-smi -L`", None, (took,), note=note, required=required, held=held)


def health(stage: Stage) -> Row:
    argv = [str(ROOT / "dalsegno"), "health", "--node", NODE, "--context", "validation", "--json"]
    began = time.monotonic()
    done = subprocess.run(argv, env=stage.env, capture_output=True, text=True, check=False)
    took = time.monotonic() - began
    found = Counter(each["verdict"] for each in json.loads(done.stdout)["findings"])
    note = ", ".join(f"{number} {verdict}" for verdict, number in sorted(found.items()))
    return Row(
        "health checks before service", None, (took,), note=note, required="none fails", held=done.returncode == 0
    )


def worker_killed(stage: Stage) -> Iterator[Row]:
    run, folder = Ours(stage, "-N", "1", "-p", "gpu", "--gpus-per-node", "1"), steps_folder(stage)
    began = time.time()
    run.start(folder)
    first = wait_for_restart(folder, set(), began, LIMIT_S)
    if first >= LIMIT_S:
        raise Failed(f"training did not start: {logs(stage, run.run)}")
    yield Row("training over NCCL: command to first step", None, (first,))
    found = tuple(again(folder, lambda: kill(run.worker(0))) for _ in range(6))
    yield Row("worker killed to next step over NCCL", 1.5, found)
    run.stop()


def container(stage: Stage, name: str) -> Row:
    """Run a program that calls the driver, in an image without the driver, as a plain user."""
    image = make_image(stage)
    said, took = step(stage, "--gpus=1", f"--container-image={image}", "/cuda", user="ada")
    smi, _ = step(stage, "--gpus=1", f"--container-image={image}", "nvidia-smi", "-L", user="ada")
    held = name in said and name in smi
    return Row("CUDA program in a container, as a plain user", None, (took,), required="runs on the GPU", held=held)


def xid(stage: Stage, bus: str) -> Iterator[Row]:
    """Inject Xid 79 during training: the node is drained, its evidence saved, and it returns after validation."""
    run, folder = Ours(stage, "-N", "1", "-p", "gpu", "--gpus-per-node", "1"), steps_folder(stage)
    run.start(folder)
    if wait_for_restart(folder, set(), time.time(), LIMIT_S) >= LIMIT_S:
        raise Failed(f"training did not start: {logs(stage, run.run)}")
    began = time.time()
    address = bus[-12:].rpartition(".")[0].lower()  # 00000000:00:05.0 is 0000:00:05 in the log
    with open("/dev/kmsg", "w") as log:
        log.write(f"NVRM: Xid (PCI:{address}): 79, pid=1, name=test, GPU has fallen off the bus.\n")
    drained = wait_until(lambda: "dalsegno:" in node_state(stage), began)
    yield Row("Xid 79 in the kernel's log: drained", 2.0, (drained,), note=node_state(stage)[:60])
    run.stop()  # ended here, because a run cannot leave the only node with a GPU
    left = time.time()
    back = wait_until(lambda: node_state(stage).split()[0] == "idle", left)
    yield Row("… from its last job's end to validated and back in service", None, (back,))
    said, _ = step(stage, "--gpus=1", "nvidia-smi", "-L")
    yield Row("… the GPU usable in a step again", None, (time.time() - left,), required="the GPU", held="GPU 0" in said)


# Helpers


def step(stage: Stage, *argv: str, user: str = "root") -> tuple[str, float]:
    who = [] if user == "root" else ["--user", user]
    began = time.monotonic()
    command = [str(ROOT / "dalsegno"), "shell", *who, "--", "srun", "-p", "gpu", *argv]
    done = subprocess.run(command, env=stage.env, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"srun {' '.join(argv)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout, time.monotonic() - began


def make_image(stage: Stage) -> Path:
    """Create a root file system with a C library, a shell and the CUDA program, without the driver."""
    tree, source = stage.home / "image", stage.home / "cuda.c"
    (tree / "bin").mkdir(parents=True)
    source.write_text(CUDA)
    cuda = next((path for path in sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))), None)
    if cuda is None:
        raise Failed("cuda.h is not in /usr/local/cuda*/include")
    argv = ["gcc", f"-I{cuda.parent}", "-o", str(tree / "cuda"), str(source), *libcuda()]
    subprocess.run(argv, check=True)
    shutil.copy("/bin/sh", tree / "bin/sh")
    for program in (tree / "cuda", tree / "bin/sh"):
        said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", said):
            if "libcuda" not in library and "nvidia" not in library:
                (tree / library[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, tree / library[1:])
    # nvidia-smi and libcuda load these by name.
    for name in ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libc.so.6"):
        for library in Path("/lib/x86_64-linux-gnu").glob(name):
            target = tree / "lib/x86_64-linux-gnu" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy(library, target)
    image = stage.home / "cuda.sqsh"
    subprocess.run([str(ROOT / "dalsegno"), "image", "build", str(tree), "-o", str(image)], env=stage.env, check=True)
    image.chmod(0o644)
    return image


def libcuda() -> list[str]:
    said = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"libcuda\.so\.1 .*=> (\S+)", said)
    beside = next((str(each) for each in Path("/usr/local/nvidia").glob("lib*/libcuda.so.1")), "")
    path = found.group(1) if found else beside
    if not path:
        raise Failed("libcuda.so.1 is not installed")
    return [path]


def steps_folder(stage: Stage) -> Path:
    return Path(tempfile.mkdtemp(prefix="steps-", dir=stage.home))


def again(folder: Path, fault: Callable[[], float]) -> float:
    before = lives(folder)
    took = wait_for_restart(folder, before, fault(), LIMIT_S)
    time.sleep(0.5)  # let the run complete some steps before the next fault
    return took


def logs(stage: Stage, run: str) -> str:
    argv = [str(ROOT / "dalsegno"), "logs", run]
    return subprocess.run(argv, env=stage.env, capture_output=True, text=True, check=False).stdout[-2000:]


def node_state(stage: Stage) -> str:
    argv = ["sinfo", "--noheader", "--nodes", NODE, "--format=%T %E"]
    return subprocess.run(argv, env=stage.slurm_env, capture_output=True, text=True, check=True).stdout.strip()


def wait_until(true: Callable[[], bool], since: float) -> float:
    """Wait until `true` returns True, and return the seconds since `since`; raise Failed after LIMIT_S."""
    while not true():
        if time.time() > since + LIMIT_S:
            raise Failed(f"not within {LIMIT_S:.0f} s")
        time.sleep(0.02)
    return time.time() - since


if __name__ == "__main__":
    sys.exit(main())
