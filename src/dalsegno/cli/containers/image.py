"""`dalsegno image`: import, build, list and remove container images (.sqsh files)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.containers import image_report
from dalsegno.cli.containers.image_report import ImportBar, find_image, verdict_of
from dalsegno.cli.interrupts import interruptible, stoppable
from dalsegno.cli.out import json_option, size
from dalsegno.errors import DalsegnoError, NotThere, UsageError

if TYPE_CHECKING:
    from dalsegno.containers.dockerfile import DockerfileBuild
    from dalsegno.containers.http import Unreachable
    from dalsegno.containers.store import ImageStore

COMPRESSIONS = ("lz4", "zstd", "gzip")
BUILDERS = ("buildah", "podman", "docker")  # also in `containers.dockerfile`, which this module imports only when used
output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write to FILE instead of the image store."
)
force_option = click.option("-f", "--force", is_flag=True, help="Overwrite FILE.")
compression_option = click.option(
    "--compression", type=click.Choice(COMPRESSIONS), default="lz4", show_default=True,
    help="Compression: lz4 is the fastest to write and read, zstd is a quarter smaller.",
)  # fmt: skip
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print no progress.")


@click.group()
def command() -> None:
    """Import, build, list and remove container images: .sqsh files, as Enroot and Pyxis use them.

    The image store is $DALSEGNO_IMAGES, else `containers.folder` of the cluster ($DALSEGNO_CLUSTER, or the only one),
    else `images` in Dal Segno's home.
    """


@command.command("import")
@click.argument("source")
@output_option
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE; without `-o`, import a stored image again.")
@click.option("--or-kept", is_flag=True, help="If the registry does not answer, use the stored image.")
@click.option("-a", "--arch", default="", help="Architecture, if not this machine's: `arm64`, `x86_64`.")
@compression_option
@click.option("--plain-http", is_flag=True, help="Use HTTP without TLS. Others on the network can change the image.")
@click.option("--own", is_flag=True, help="Do not use Enroot, even if it is installed.")
@quiet_option
def import_(
    source: str, output: Path | None, force: bool, or_kept: bool, arch: str, compression: str, plain_http: bool,
    own: bool, quiet: bool,
) -> None:  # fmt: skip
    """Import SOURCE as a .sqsh file and print its path. Accepts the arguments of `enroot import`.

    \b
    dalsegno image import ubuntu:24.04
    dalsegno image import nvcr.io#nvidia/pytorch:24.01-py3 -o /fsx/pytorch.sqsh
    dalsegno image import oci:LAYOUT:TAG | docker-archive:FILE | dockerd://IMAGE | podman://IMAGE
    """
    from dalsegno.containers import parse_name
    from dalsegno.containers.http import Unreachable
    from dalsegno.containers.import_image import Importer
    from dalsegno.containers.manifest import architecture
    from dalsegno.system.machine import program

    name = parse_name(source)
    enroot = "" if own else program("enroot") or ""
    with _bar(quiet, "what was downloaded is kept; run the same command again to continue") as bar:
        importer = Importer(
            _open_store(), bar, arch=architecture(arch), compression=compression, plain_http=plain_http, enroot=enroot,
            or_kept=or_kept,
        )  # fmt: skip
        try:
            if output is not None:
                importer.to_file(name, output, force=force)
            path = output if output is not None else importer.to_store(name, force=force).path
        except Unreachable as error:
            raise _explain_unreachable(error, source) from error
    out.data(str(path))


def _explain_unreachable(error: Unreachable, source: str) -> DalsegnoError:
    """Return the error. On a host without internet access, such as a virtual host, the hint says where to import."""
    from dalsegno.system.network import reaches_beyond

    if error.answered or reaches_beyond():
        return error
    stored = f"{error.hint}; " if error.stored else ""
    hint = (
        f"{stored}this host has no route to the internet, and a virtual host reaches only its own machine; "
        f"run `dalsegno image import {source}` on that machine first, then srun finds the image; "
        "to have it for all users, set `containers.images` in the cluster file"
    )
    return DalsegnoError(error.what, hint=hint)


@command.command(short_help="Make a .sqsh file from a Dockerfile or a root file system.")
@click.argument("folder", type=click.Path(path_type=Path))
@output_option
@click.option("--force", is_flag=True, help="Overwrite the file of `-o`.")
@compression_option
@click.option(
    "-f", "--file", type=click.Path(path_type=Path), help="Build this Dockerfile, with FOLDER as its context."
)
@click.option(
    "--build-arg", "build_args", multiple=True, metavar="NAME=VALUE",
    help="Value of an ARG; NAME alone takes it from the environment; may be repeated.",
)  # fmt: skip
@click.option("--target", default="", metavar="STAGE", help="Build up to this stage of the Dockerfile.")
@click.option("--builder", type=click.Choice(BUILDERS), help="Builder. Default: the first of these that is installed.")
@click.option("--rootfs", is_flag=True, help="Pack FOLDER as it is, even if it has a Dockerfile.")
@click.option(
    "--env", multiple=True, metavar="NAME=VALUE",
    help="Environment variable set in the container of a root file system; may be repeated.",
)  # fmt: skip
@click.option("--workdir", default="", help="Working directory in the container of a root file system.")
@click.option("--cmd", default="", help="Default command of the container of a root file system.")
@quiet_option
def build(
    folder: Path, output: Path | None, force: bool, compression: str, file: Path | None, build_args: tuple[str, ...],
    target: str, builder: str | None, rootfs: bool, env: tuple[str, ...], workdir: str, cmd: str, quiet: bool,
) -> None:  # fmt: skip
    """Make a .sqsh file from FOLDER: from its Dockerfile, or from all of it as a root file system.

    \b
    dalsegno image build . -o /fsx/train.sqsh
    dalsegno image build . -f nccl-tests.Dockerfile --build-arg NCCL_VERSION=v2.27.7-1 -o /fsx/nccl-tests.sqsh
    dalsegno image build ROOTFS --cmd "python train.py"

    A Containerfile or Dockerfile in FOLDER is built with buildah, podman or docker. Any other folder is packed as it
    is. A folder with a Dockerfile and with `bin` and `etc` could be both: choose `--file` or `--rootfs`.
    """
    from dalsegno.containers.dockerfile import DockerfileBuild, find_builder, find_dockerfile

    if not all(each.partition("=")[0].isidentifier() for each in build_args):
        raise UsageError("invalid build argument", hint="write `--build-arg NAME=VALUE`")  # the value may be secret
    if rootfs and file:
        raise UsageError("`--rootfs` packs a folder, and `--file` builds a Dockerfile", hint="use one of the two")
    dockerfile = None if rootfs else find_dockerfile(folder, file)
    kind = f"{folder} is packed as it is" if dockerfile is None else f"{dockerfile} is built"
    for_others = {"--env": env, "--workdir": workdir, "--cmd": cmd}
    hint = "write ENV, WORKDIR and CMD in it"
    if dockerfile is None:
        for_others = {"--build-arg": build_args, "--target": target, "--builder": builder or ""}
        hint = "name the Dockerfile with `--file`, or leave the option out"
    if given := next((option for option, value in for_others.items() if value), None):
        raise UsageError(f"`{given}` has no effect: {kind}", hint=hint)
    if dockerfile is None:
        made = _pack_folder(folder, output, force, compression, env, workdir, cmd, quiet)
    else:
        recipe = DockerfileBuild(find_builder(builder), folder, dockerfile, build_args, target)
        made = _build_dockerfile(recipe, output, force, compression, quiet)
    out.data(str(made))


def _pack_folder(
    folder: Path, output: Path | None, force: bool, compression: str, env: tuple[str, ...], workdir: str, cmd: str,
    quiet: bool,
) -> Path:  # fmt: skip
    import shlex

    from dalsegno.containers.build import Builder
    from dalsegno.containers.manifest import Config

    for each in env:
        if not each.partition("=")[0].isidentifier() or "=" not in each or "\n" in each:
            raise UsageError(f"invalid variable {each!r}", hint="write `--env NAME=VALUE`")
    if workdir and (not workdir.startswith("/") or ".." in workdir.split("/") or not workdir.isprintable()):
        raise UsageError(f"invalid working directory {workdir!r}", hint="write a path that starts with `/`")
    with _bar(quiet) as bar:
        config = Config(env=env, workdir=workdir, cmd=tuple(shlex.split(cmd)))
        made = Builder(_open_store(), bar, compression).build_folder(folder, config, output, force)
    return made if isinstance(made, Path) else made.path


def _build_dockerfile(recipe: DockerfileBuild, output: Path | None, force: bool, compression: str, quiet: bool) -> Path:
    from dataclasses import replace

    from dalsegno.containers.import_image import Importer

    with _bar(quiet) as bar, stoppable():
        build = replace(recipe, show=bar.line)
        importer = Importer(_open_store(), bar, compression=compression, build=build)
        if output is None:
            return importer.to_store(build.name).path
        importer.to_file(build.name, output, force=force)
        return output


@command.command("from-venv", short_help="Make a .sqsh file from a Python environment.")
@click.argument("path", type=click.Path(path_type=Path))
@output_option
@force_option
@compression_option
@click.option(
    "--add", multiple=True, type=click.Path(path_type=Path), help="Further folder to include; may be repeated."
)
@quiet_option
def from_venv(
    path: Path, output: Path | None, force: bool, compression: str, add: tuple[Path, ...], quiet: bool
) -> None:
    """Make a .sqsh file from the Python environment at PATH, with its interpreter and libraries and little else."""
    from dalsegno.containers import build
    from dalsegno.containers.build import Builder
    from dalsegno.system.processes import LocalRunner

    runner, extra = LocalRunner(), [Path(os.path.abspath(each)) for each in add]
    with _bar(quiet) as bar:
        bar.stage(f"reading {path}")
        python = build.inspect_python(Path(os.path.abspath(path)), runner)
        for each in python.outside:
            if each not in extra:
                bar.warn(
                    f"{each} is on sys.path but outside the environment, so it is left out; add it: `--add {each}`"
                )
        layer = build.make_venv_layer(python, extra, runner)
        builder = Builder(_open_store(), bar, compression)
        made = builder.build(layer, build.make_venv_config(python), str(python.prefix), output, force)
    out.data(str(made if isinstance(made, Path) else made.path))


@command.command()
@json_option
def ls(json_: bool) -> None:
    """List the images in the store, newest first."""
    found = _open_store().all()
    if json_:
        out.as_json([image_report.as_json(each) for each in found])
    elif not found:
        out.talk("no images yet; import one: `dalsegno image import ubuntu:24.04`")
    else:
        out.table(image_report.HEADERS, [row for each in found for row in image_report.rows(each)])


@command.command(short_help="Show the details of an image.")
@click.argument("image")
@json_option
def show(image: str, json_: bool) -> None:
    """Show the details of IMAGE: a name, the first digits of a digest, or a .sqsh file."""
    if image.endswith(".sqsh") and Path(image).is_file():
        _show_file(Path(image), json_)
        return
    found = find_image(_open_store(), image)
    if json_:
        out.as_json(image_report.as_json(found))
    else:
        out.data("\n".join(image_report.lines(found)))


def _show_file(path: Path, json_: bool) -> None:
    from dalsegno.containers.image_metadata import inspect_image
    from dalsegno.system.processes import LocalRunner

    inside = inspect_image(path, LocalRunner())
    if json_:
        out.as_json(image_report.inside_as_json(str(path), inside))
    else:
        out.data("\n".join(image_report.inside_lines(str(path), inside)))


@command.command()
@click.argument("images", nargs=-1, required=True)
def rm(images: tuple[str, ...]) -> None:
    """Remove IMAGES. Jobs that have an image mounted keep it. The next `image gc` removes its layers.

    If an image has several names, only the given name is removed. The image is removed with its last name. Give the
    digest to remove all names at once.
    """
    store = _open_store()
    for each in images:
        store.find(each)  # raise an error before anything is removed
    for each in images:
        try:
            found = store.find(each)
        except NotThere:
            continue  # removed with an earlier argument
        if left := store.remove_name(each, found):
            out.talk(f"removed the name {each}; the image keeps the name {', '.join(left)}")
        else:
            store.remove(found)
            out.talk(f"removed {', '.join(found.names) or found.record.hex[:12]}")


@command.command(short_help="Remove unused images, layers and partial downloads.")
@click.option("--layers", is_flag=True, help="Remove all layers; the next import downloads them again.")
@json_option
def gc(layers: bool, json_: bool) -> None:
    """Remove images without a name, layers without an image, and partial downloads.

    Where images cannot be mounted, jobs use unpacked copies. A copy is removed if its image is gone and no job uses it.
    """
    from dalsegno.cluster import unpacked_homes
    from dalsegno.containers.named import sweep_unpacked

    swept = _open_store().sweep(layers)
    with _bar(quiet=True):
        unpacked = [sweep_unpacked(folder) for folder in unpacked_homes()]
    folders, freed = sum(each.files for each in unpacked), sum(each.size for each in unpacked)
    if json_:
        out.as_json({"files": swept.files, "size": swept.size, "unpacked": folders, "unpacked_size": freed})
    else:
        out.talk(f"removed {_count(swept.files, 'file')}, {size(swept.size)}")
        if folders:
            out.talk(f"removed {_count(folders, 'unpacked image')}, {size(freed)}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@command.command()
@click.argument("images", nargs=-1)
@json_option
def verify(images: tuple[str, ...], json_: bool) -> None:
    """Read every byte of IMAGES, or of all images in the store. Exits 1 if one differs from what was imported.

    A .sqsh file outside the store is compared with the record of its import and with the images in the store. If its
    origin is unknown, it is only checked for damage.
    """
    store = _open_store()
    with _bar(quiet=json_) as bar:
        verdicts = [verdict_of(each, store, bar) for each in images or [str(each.path) for each in store.all()]]
    if json_:
        out.as_json([{**verdict.facts, "fault": verdict.fault} for verdict in verdicts])
    else:
        for verdict in verdicts:
            out.data(f"{verdict.title}: {verdict.fault or verdict.confirmation}")
    if any(verdict.fault for verdict in verdicts):
        raise SystemExit(1)


def _open_store() -> ImageStore:
    """Return the image store. If the store belongs to another user, return one that reads both stores and writes to
    this user's own."""
    from dalsegno.cluster import home, images_home
    from dalsegno.containers.store import open_store

    own = {key: value for key, value in os.environ.items() if key != "DALSEGNO_HOME"}
    return open_store(images_home(), home(own) / "images")


@contextmanager
def _bar(quiet: bool, if_interrupted: str = "") -> Iterator[ImportBar]:
    bar = ImportBar(quiet)
    try:
        with interruptible():
            yield bar
    except KeyboardInterrupt:
        bar.close()
        if if_interrupted:
            out.talk(if_interrupted)
        raise
    except OSError as error:
        raise DalsegnoError(f"{error.strerror or error}: {error.filename}", hint="check that path") from error
    finally:
        bar.close()
