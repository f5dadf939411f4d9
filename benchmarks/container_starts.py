"""What a container adds to `srun`: bare and contained steps in turn, and the difference of each pair.

A busy machine slows both alike, and now one, now the other; of many pairs the median still tells.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
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


def start_rows(runs: int) -> Iterator[Row]:
    """The cluster comes and goes here, whatever happens."""
    stage = Stage()
    try:
        folder = stage.home / "images"
        images = {"1 MB": make_image(folder, 0), f"{BIG_MIB >> 10} GB": make_image(folder, BIG_MIB)}
        file = stage.home / "cluster.yaml"
        file.write_text(Shape(1, accounting=False).file() + "users: [{name: ada}]\ncontainers: {enabled: true}\n")
        stage.dalsegno("up", str(file))
        for user in ("root", "ada"):
            for size, image in images.items():
                yield _row(f"srun in a .sqsh of {size}, over bare srun, as {_whom(user)}", stage, user, image, runs)
        yield _row("srun in a folder, over bare srun, as root", stage, "root", folder / "tree", runs)
    finally:
        stage.close()


def _whom(user: str) -> str:
    return "root" if user == "root" else "another user"


def _row(what: str, stage: Stage, user: str, image: Path, runs: int) -> Row:
    busy = wait_for_quiet(20)
    who = [] if user == "root" else ["--user", user]
    inner = ["/usr/bin/python3", "-c", PAIRS, str(runs), f"--container-image={image}"]
    argv = [str(ROOT / "dalsegno"), "shell", *who, "--", *inner]
    done = subprocess.run(argv, env=stage.env, cwd="/", capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Failed(f"{what}: {done.stderr.strip()}")
    pairs = json.loads(done.stdout)
    bare = sorted(pair[0] for pair in pairs)[len(pairs) // 2]
    added = tuple(max(contained - plain, 0.0) for plain, contained in pairs)
    return Row(what, LIMIT_S, added, busy, note=f"bare {bare * 1000:.0f} ms")


def make_image(folder: Path, padding_mib: int) -> Path:
    """busybox, and as much that no one reads and nothing compresses."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Failed("busybox is not on this machine: `./dalsegno setup --dev` installs busybox-static")
    tree = folder / ("big" if padding_mib else "tree")
    (tree / "bin").mkdir(parents=True)
    shutil.copy(busybox, tree / "bin/busybox")
    (tree / "bin/true").symlink_to("busybox")
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
