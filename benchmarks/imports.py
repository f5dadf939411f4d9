"""Measure the import of a 240 MB image from a registry to a .sqsh, in turns with three usual tools.

The image has files of this machine's /usr in two gzip layers. The second layer removes some files of the first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from quiet import wait_for_quiet
from stage import ROOT, Failed
from table import Row

SIZE = 240_000_000
MOST = 1.3  # maximum import time, as a multiple of the other tools' median
PROGRAMS = ("docker-registry", "skopeo", "umoci", "mksquashfs", "sqfstar")


def import_rows(runs: int) -> Iterator[Row]:
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        yield Row("import of a 240 MB image", None, (), note=f"needs {', '.join(missing)}", required=f"≤ {MOST} x")
        return
    with tempfile.TemporaryDirectory(prefix="dsb-images-") as name:
        folder = Path(name)
        with registry(folder) as address:
            make_image(folder, address)
            yield from compare(folder, address, runs)


def compare(folder: Path, address: str, runs: int) -> Iterator[Row]:
    theirs: list[float] = []
    ours: list[float] = []
    busy = wait_for_quiet(20)
    for number in range(runs):
        work = folder / f"run-{number}"
        work.mkdir()
        theirs.append(timed(lambda: usual_tools(address, work)))  # noqa: B023 - called at once
        ours.append(timed(lambda: our_import(address, work, "ours")))  # noqa: B023
        again = timed(lambda: our_import(address, work, "ours"))  # noqa: B023
        shutil.rmtree(work)
    what = "`skopeo copy` + `umoci unpack` + `mksquashfs -comp lz4` of a 240 MB image"
    yield Row(what, None, tuple(theirs), busy)
    ratio = f"{median(ours) / median(theirs):.2f} x the time of the three tools"
    yield Row("`dalsegno image import` of the same image", round(MOST * median(theirs), 1), tuple(ours), busy, ratio)
    yield Row("the same again, already imported", None, (again,), busy)


def usual_tools(address: str, work: Path) -> None:
    run(
        [
            "skopeo",
            "--insecure-policy",
            "copy",
            "-q",
            "--src-tls-verify=false",
            f"docker://{address}/app:x",
            "oci:oci:x",
        ],
        work,
    )
    run(["umoci", "unpack", *rootless(), "--image", "oci:x", "bundle"], work)
    run(["mksquashfs", "bundle/rootfs", "x.sqsh", "-comp", "lz4", "-no-progress", "-quiet"], work)


def our_import(address: str, work: Path, store: str) -> None:
    env = {**os.environ, "DALSEGNO_IMAGES": str(work / store), "PYTHONPATH": str(ROOT / "src")}
    python = ROOT / ".venv/bin/python"
    start = [str(python) if python.exists() else sys.executable, "-m", "dalsegno"]
    run([*start, "image", "import", "--own", "-q", f"{address}#app:x"], work, env)


def timed(action: object) -> float:
    began = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - began


# Image and registry


def make_image(folder: Path, address: str) -> None:
    """Create and push the image with the usual tools."""
    work = folder / "work"
    work.mkdir()
    run(["umoci", "init", "--layout", "oci"], work)
    run(["umoci", "new", "--image", "oci:x"], work)
    run(["umoci", "unpack", *rootless(), "--image", "oci:x", "bundle"], work)
    root = work / "bundle/rootfs"
    copied = fill(root, SIZE)
    run(["umoci", "repack", "--image", "oci:x", "bundle"], work)
    shutil.rmtree(work / "bundle")
    run(["umoci", "unpack", *rootless(), "--image", "oci:x", "bundle"], work)
    for number, path in enumerate(copied[:400]):
        (root / path).unlink() if number % 2 else (root / path).write_text("changed\n")
    run(["umoci", "repack", "--image", "oci:x", "bundle"], work)
    push = [
        "skopeo",
        "--insecure-policy",
        "copy",
        "-q",
        "--dest-tls-verify=false",
        "oci:oci:x",
        f"docker://{address}/app:x",
    ]
    run(push, work)
    shutil.rmtree(work)


def fill(root: Path, size: int) -> list[str]:
    """Copy this many bytes of plain files of this machine and return their paths."""
    copied, done = [], 0
    for folder, folders, names in os.walk("/usr"):
        folders.sort()
        for name in sorted(names):
            source = Path(folder, name)
            if source.is_symlink() or not source.is_file() or source.stat().st_size > 30_000_000:
                continue
            inside = str(source)[1:]
            (root / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, root / inside)
            copied.append(inside)
            done += source.stat().st_size
            if done >= size:
                return copied
    return copied


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (folder / "registry.yml").write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    process = subprocess.Popen(
        ["docker-registry", "serve", folder / "registry.yml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(address)
        yield address
    finally:
        process.kill()
        process.wait()


def _wait_for(address: str) -> None:
    host, port = address.split(":")
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), 1).close()
            return
        time.sleep(0.05)
    raise Failed("the registry does not start")


def rootless() -> list[str]:
    return [] if os.geteuid() == 0 else ["--rootless"]


def run(argv: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"`{' '.join(map(str, argv))}` ended with {done.returncode}: {done.stderr[-500:]}")
