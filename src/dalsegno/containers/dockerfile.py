"""Build images from Dockerfiles with the builder of this machine: buildah, Podman or Docker."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dalsegno.containers.sources import saved_by_daemon
from dalsegno.errors import CommandFailed, DalsegnoError, NotThere, UsageError
from dalsegno.image_name import ImageKind, ImageName
from dalsegno.system.live_output import run_showing
from dalsegno.system.machine import program
from dalsegno.system.processes import Runner

BUILDERS = ("buildah", "podman", "docker")  # in order of preference: buildah needs no daemon
FILES = ("Containerfile", "Dockerfile")  # in the order in which buildah and Podman look for them
_PACKAGES = {"docker": "docker.io"}
_ROOT_FOLDERS = ("bin", "etc")  # a root file system has both
_DAEMONS = {"podman": ImageKind.PODMAN, "docker": ImageKind.DOCKERD}
# In OCI's format, SHELL and HEALTHCHECK are ignored. Without --layers, buildah repeats all steps each time.
_LIKE_DOCKER = {"buildah": ("--format", "docker", "--layers"), "podman": ("--format", "docker"), "docker": ()}


def find_dockerfile(folder: Path, file: Path | None) -> Path | None:
    """Return the Dockerfile to build, or None if the folder is packed as a root file system.

    Raise UsageError if `folder` is a file. Also raise it if a folder with a Dockerfile looks like a root file system,
    because both could be meant.
    """
    if folder.is_file():
        also = "" if folder.name in FILES else f" --file {folder}"
        raise UsageError(
            f"{folder} is a file, and a folder is built",
            hint=f"to build a Dockerfile, give its folder: `dalsegno image build {folder.parent}{also}`",
        )
    if file is not None:
        if not file.is_file():
            raise NotThere(f"no file {file}", hint="name the Dockerfile; the path is relative to the working folder")
        return file
    found = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if found and all((folder / name).is_dir() for name in _ROOT_FOLDERS):
        raise UsageError(
            f"{folder} has a {found.name}, and the folders of a root file system",
            hint=f"`--file {found}` builds the {found.name}; `--rootfs` packs the folder as it is",
        )
    return found


def find_builder(name: str | None = None) -> str:
    """Return the path of the builder with this name, or of the first one that is installed."""
    for each in [name] if name else BUILDERS:
        if found := program(each):
            return found
    if name:
        raise DalsegnoError(f"`{name}` is not installed", hint=f"install the package {_PACKAGES.get(name, name)}")
    raise DalsegnoError(
        f"no builder for Dockerfiles is installed: {', '.join(BUILDERS[:-1])} or {BUILDERS[-1]}",
        hint="install the package buildah, which needs no daemon: `apt-get install buildah` or `dnf install buildah`",
    )


@dataclass(frozen=True)
class DockerfileBuild:
    """A Dockerfile, the inputs of its build, and the builder's program."""

    program: str
    folder: Path  # the build context
    file: Path
    build_args: tuple[str, ...] = ()  # NAME=VALUE, or NAME for a value from the environment; may be secret
    target: str = ""
    show: Callable[[str], None] = field(default=lambda _: None)  # called with each line that the builder prints

    @property
    def name(self) -> ImageName:
        """The name of the image in the store: the path of the folder, or of a Dockerfile with another name."""
        folder, name = os.path.split(os.path.abspath(self.file))
        path = folder if name in FILES and folder == os.path.abspath(self.folder) else f"{folder}/{name}"
        return ImageName(ImageKind.PATH, path=f"{path}:{self.target}" if self.target else path)

    @property
    def builder(self) -> str:
        return os.path.basename(self.program)

    def argv(self, id_file: Path) -> list[str]:
        # Without --force-rm, builders keep the container of a step that failed.
        options = ["--force-rm", "--file", os.path.abspath(self.file), "--iidfile", str(id_file)]
        options += [word for each in self.build_args for word in ("--build-arg", each)]
        options += ["--target", self.target] if self.target else []
        return [self.program, "build", *_LIKE_DOCKER[self.builder], *options, os.path.abspath(self.folder)]

    def save(self, archive: Path, runner: Runner) -> ImageName:
        """Build the image, write it to the archive, and return the archive's image name.

        The image itself stays in the builder's cache, without a name.
        """
        if self.builder != "docker" and ":" in str(archive):  # buildah reads a tag there, podman refuses it
            raise DalsegnoError(
                f"{self.builder} cannot save images in {archive.parent}, because the path contains `:`",
                hint="set DALSEGNO_IMAGES to another folder, or use `--builder docker`",
            )
        image = self._build(archive.with_suffix(".id"))
        self.show("saving the image")
        # Only this user may read the archive, because the image's history contains the build arguments.
        os.close(os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        if kind := _DAEMONS.get(self.builder):
            return saved_by_daemon(ImageName(kind, repository=image), runner, archive)
        name = ImageName(ImageKind.ARCHIVE, path=str(archive))
        runner.run([self.program, "push", "--quiet", image, str(name)]).checked(
            hint=f"`{self.program} images` lists it"
        )
        return name

    def _build(self, id_file: Path) -> str:
        """Run the builder and return the image's id."""
        try:
            done = run_showing(self.argv(id_file), self.show)
            if done.exit_code == 0 and id_file.exists():
                return id_file.read_text().strip()
        finally:
            id_file.unlink(missing_ok=True)
        names = tuple(each.partition("=")[0] for each in self.build_args)  # the error must not contain values
        shown = replace(self, build_args=names).argv(id_file)
        hint = "fix what it complains about and build again; finished steps are not repeated"
        if done.exit_code == 0:
            hint = "it wrote no id of the image; use another builder with `--builder`, or install a newer version"
        raise CommandFailed(shown, done.exit_code, done.stdout, hint=hint)
