"""Measure what a container adds to `srun`: bare and contained steps in turn, and the difference of each pair.

A busy machine slows down both, so the median of many pairs is still meaningful.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from quiet import wait_for_quiet
from stage import ROOT, Failed, Shape, Stage
from table import Row

LIMIT_S = 0.025
BIG_MIB = 1024
PAIRS = """
import json, subprocess, sys, time
pairs, option = int(sys.argv[1]), sys.argv[2]

def took(*more):
    started = time.monotonic()
    subprocess.run(["srun", "-N1", *more, "true"], check=True, stderr=subprocess.DEVNULL)
    return time.monotonic() - started

took(), took(option)
print(json.dumps([(took(), took(option)) for _ in range(pairs)]))
"""
ONCE = """
import json, subprocess, sys, time
option, *command = sys.argv[1:]
started = time.monotonic()
subprocess.run(["srun", "-N1", option, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(json.dumps(time.monotonic() - started))
"""


def start_rows(runs: int) -> Iterator[Row]:
    """Start a cluster, yield the rows, and remove the cluster, even after an error."""
    stage = Stage()
    try:
        folder = stage.home / "images"
        images = {"1 MB": make_image(folder, 0), f"{BIG_MIB >> 10} GB": make_image(folder, BIG_MIB)}
        file = stage.home / "cluster.yaml"
        file.write_text(Shape(1, accounting=False).file() + "users: [{name: ada}]\ncontainers: {enabled: true}\n")
        stage.dalsegno("up", str(file))
        for user in ("root", "ada"):
            for size, image in images.items():
                yield _row(
                    f"srun in a .sqsh of {size}, over bare srun, as {_user_label(user)}", stage, user, image, runs
                )
        yield _row("srun in a folder, over bare srun, as root", stage, "root", folder / "tree", runs)
        yield from _own_rows(stage, images, runs)
    finally:
        stage.close()


def _own_rows(stage: Stage, images: Mapping[str, Path], runs: int) -> Iterator[Row]:
    """Measure a user's own file, which the kernel does not mount: with squashfuse, and unpacked without /dev/fuse."""
    size, big = list(images.items())[-1]
    user = int(_as_user(stage, "ada", "id", "import os; print(os.getuid())"))
    own = {name: _owned(image, user) for name, image in images.items()}
    with _fuse_for(stage, 0o666):
        for name, image in own.items():
            yield _row(f"the same, in the user's own .sqsh of {name}, with squashfuse", stage, "ada", image, runs, None)
        yield _once(f"reading {size} in the user's own .sqsh, with squashfuse", stage, own[size], "md5sum", "/padding")
    yield _once(f"reading {size} in root's .sqsh, mounted by the kernel", stage, big, "md5sum", "/padding")
    with _fuse_for(stage, 0o600):
        yield _once(f"the first srun in the user's own .sqsh of {size}, which unpacks it", stage, own[size], "true")
        yield _row("srun in the unpacked image, over bare srun", stage, "ada", own[size], runs, None)


def _owned(image: Path, user: int) -> Path:
    copy = image.with_name(f"own-{image.name}")
    shutil.copy(image, copy)
    os.chown(copy, user, user)
    return copy


@contextmanager
def _fuse_for(stage: Stage, mode: int) -> Iterator[None]:
    """Replace /dev/fuse on the node: with mode 0666 all users can open it, as usual; with 0600 only root can."""
    device, node = stage.home / "fuse", "train-1"
    os.mknod(device, stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
    device.chmod(mode)
    stage.dalsegno("shell", "-w", node, "--", "mount", "--bind", str(device), "/dev/fuse")
    try:
        yield
    finally:
        stage.dalsegno("shell", "-w", node, "--", "umount", "/dev/fuse")
        device.unlink()


def _once(what: str, stage: Stage, image: Path, *command: str) -> Row:
    busy = wait_for_quiet(20)
    took = json.loads(_as_user(stage, "ada", what, ONCE, f"--container-image={image}", *command))
    return Row(what, None, (took,), busy)


def _user_label(user: str) -> str:
    return "root" if user == "root" else "another user"


def _as_user(stage: Stage, user: str, what: str, script: str, *args: str) -> str:
    who = [] if user == "root" else ["--user", user]
    argv = [str(ROOT / "dalsegno"), "shell", *who, "--", "/usr/bin/python3", "-c", script, *args]
    done = subprocess.run(argv, env=stage.env, cwd="/", capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Failed(f"{what}: {done.stderr.strip()}")
    return done.stdout


def _row(what: str, stage: Stage, user: str, image: Path, runs: int, limit_s: float | None = LIMIT_S) -> Row:
    busy = wait_for_quiet(20)
    pairs = json.loads(_as_user(stage, user, what, PAIRS, str(runs), f"--container-image={image}"))
    bare = sorted(pair[0] for pair in pairs)[len(pairs) // 2]
    added = tuple(max(contained - plain, 0.0) for plain, contained in pairs)
    return Row(what, limit_s, added, busy, note=f"bare {bare * 1000:.0f} ms")


def make_image(folder: Path, padding_mib: int) -> Path:
    """Create an image of busybox and incompressible padding."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Failed("busybox is not installed: `./dalsegno setup --dev` installs busybox-static")
    tree = folder / ("big" if padding_mib else "tree")
    (tree / "bin").mkdir(parents=True)
    shutil.copy(busybox, tree / "bin/busybox")
    for name in ("true", "md5sum"):
        (tree / "bin" / name).symlink_to("busybox")
    if padding_mib:
        with open("/dev/urandom", "rb") as source, open(tree / "padding", "wb") as target:
            for _ in range(padding_mib):
                target.write(source.read(1 << 20))
    image = folder / f"{tree.name}.sqsh"
    argv = ["mksquashfs", str(tree), str(image), "-quiet", "-no-progress", "-all-root", "-noD", "-noF"]
    if subprocess.run(argv, stdout=sys.stderr).returncode != 0:
        raise Failed("mksquashfs failed")
    (tree / "padding").unlink(missing_ok=True)
    return image
