"""A folder with a Dockerfile, and settings with which buildah and Podman keep their images in a folder of the test."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dalsegno.system.machine import program

NEEDS_BUILDER = pytest.mark.skipif(
    os.geteuid() != 0 or program("buildah") is None,
    reason="needs root, and buildah: `./dalsegno setup --dev` installs it",
)
DOCKERFILE = """
FROM scratch AS base
COPY bin /bin
ARG WHO=nobody OF
SHELL ["/bin/sh", "-e", "-c"]
RUN echo "hello $WHO of $OF" > /greeting
ENV A=1 B="two words"
WORKDIR /work
ENTRYPOINT ["/bin/sh", "-e"]
CMD ["-c", "cat /greeting"]
FROM base AS failing
ARG SECRET
RUN echo about to fail; (while true; do busybox sleep 1; done) & exit 3
FROM base AS slow
RUN busybox sleep 4321
"""


def write_context(folder: Path, dockerfile: str = DOCKERFILE) -> Path:
    found = program("busybox")
    assert found, "busybox-static is not installed"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(found, folder / "bin/busybox")
    (folder / "bin/sh").symlink_to("busybox")
    (folder / "Dockerfile").write_text(dockerfile)
    return folder


def builder_env(folder: Path) -> dict[str, str]:
    """Return variables for builders. Their own folders stay unchanged, and a RUN needs no namespaces."""
    folder.mkdir()
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n'
    )
    (folder / "registries.conf").write_text('[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n')
    return {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }
