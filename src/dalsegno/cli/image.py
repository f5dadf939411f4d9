"""`dalsegno image`: container images as .sqsh files, imported, made, listed and removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import image_verdict, out
from dalsegno.cli.image_progress import ImportBar
from dalsegno.cli.image_verdict import find_image, verdict_of
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.out import json_option, size
from dalsegno.errors import DalsegnoError, NotThere, UsageError

if TYPE_CHECKING:
    from dalsegno.containers.http import Unreachable
    from dalsegno.containers.store import ImageStore

COMPRESSIONS = ("lz4", "zstd", "gzip")
output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write this file, and keep none here."
)
force_option = click.option("-f", "--force", is_flag=True, help="Write over FILE.")
compression_option = click.option(
    "--compression", type=click.Choice(COMPRESSIONS), default="lz4", show_default=True,
    help="lz4 is the quickest to make and to read, zstd a quarter smaller.",
)  # fmt: skip
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Tell nothing while it works.")


@click.group()
def command() -> None:
    """Import, list and remove container images: .sqsh files, as Enroot and Pyxis use them.

    They are kept in $DALSEGNO_IMAGES, else in `containers.folder` of the cluster ($DALSEGNO_CLUSTER, or the only one),
    else in `images` in Dal Segno's home.
    """


@command.command("import")
@click.argument("source")
@output_option
@click.option("-f", "--force", is_flag=True, help="Write over FILE; without `-o`, import again what is kept.")
@click.option("--or-kept", is_flag=True, help="If the registry does not answer, take what it gave before.")
@click.option("-a", "--arch", default="", help="For another kind of machine: `arm64`, `x86_64`.")
@compression_option
@click.option("--plain-http", is_flag=True, help="The registry has no TLS; whoever listens may change what comes.")
@click.option("--own", is_flag=True, help="Import it ourselves where Enroot is installed too.")
@quiet_option
def import_(
    source: str, output: Path | None, force: bool, or_kept: bool, arch: str, compression: str, plain_http: bool,
    own: bool, quiet: bool,
) -> None:  # fmt: skip
    """Make a .sqsh of SOURCE and print where it is. `enroot import`'s arguments are understood.

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
    with _bar(quiet, "what has come is kept, and the same command goes on from there") as bar:
        importer = Importer(
            _store(), bar, arch=architecture(arch), compression=compression, plain_http=plain_http, enroot=enroot,
            or_kept=or_kept,
        )  # fmt: skip
        try:
            if output is not None:
                importer.to_file(name, output, force=force)
            path = output if output is not None else importer.to_store(name, anew=force).path
        except Unreachable as error:
            raise _where_it_can_be_had(error, source) from error
    out.data(str(path))


def _where_it_can_be_had(error: Unreachable, source: str) -> DalsegnoError:
    """Nodes often have no way out, and virtual ones never do: then no other look at the name or the network helps."""
    from dalsegno.system.network import reaches_beyond

    if error.answered or reaches_beyond():
        return error
    hint = (
        "this host reaches its own networks alone, and a virtual node only its machine: "
        f"`dalsegno image import {source}` there first, then srun finds it; "
        "for all users, `containers.images` in the cluster file"
    )
    return DalsegnoError(error.what, hint=hint)


@command.command()
@click.argument("folder", type=click.Path(path_type=Path))
@output_option
@force_option
@compression_option
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable that programs in it have.")
@click.option("--workdir", default="", help="Where programs in it start.")
@click.option("--cmd", default="", help="What runs in it if nothing else is named.")
@quiet_option
def build(
    folder: Path, output: Path | None, force: bool, compression: str, env: tuple[str, ...], workdir: str, cmd: str,
    quiet: bool,
) -> None:  # fmt: skip
    """Make a .sqsh of FOLDER, which holds a root file system."""
    import shlex

    from dalsegno.containers.build import Builder
    from dalsegno.containers.manifest import Config

    for each in env:
        if not each.partition("=")[0].isidentifier() or "=" not in each or "\n" in each:
            raise UsageError(f"{each!r} is no variable", hint="write `--env NAME=VALUE`")
    if workdir and (not workdir.startswith("/") or ".." in workdir.split("/") or not workdir.isprintable()):
        raise UsageError(f"{workdir!r} cannot be the working directory", hint="write a path that begins with `/`")
    with _bar(quiet) as bar:
        config = Config(env=env, workdir=workdir, cmd=tuple(shlex.split(cmd)))
        made = Builder(_store(), bar, compression).of_folder(folder, config, output, force)
    out.data(str(made if isinstance(made, Path) else made.path))


@command.command("from-venv", short_help="Make a .sqsh of a Python environment.")
@click.argument("path", type=click.Path(path_type=Path))
@output_option
@force_option
@compression_option
@click.option("--add", multiple=True, type=click.Path(path_type=Path), help="A folder that it shall hold too.")
@quiet_option
def from_venv(
    path: Path, output: Path | None, force: bool, compression: str, add: tuple[Path, ...], quiet: bool
) -> None:
    """Make a .sqsh of the Python environment at PATH: with its Python and libraries, and little else."""
    from dalsegno.containers import build
    from dalsegno.containers.build import Builder
    from dalsegno.system.processes import LocalRunner

    runner, extra = LocalRunner(), [Path(os.path.abspath(each)) for each in add]
    with _bar(quiet) as bar:
        bar.stage(f"looking through {path}")
        python = build.ask(Path(os.path.abspath(path)), runner)
        for each in python.outside:
            if each not in extra:
                bar.warn(f"{each} is on its path but not in it, and is left out; `--add {each}` takes it along")
        layer = build.layer_of_venv(python, extra, runner)
        builder = Builder(_store(), bar, compression)
        made = builder.build(layer, build.config_of(python), str(python.prefix), output, force)
    out.data(str(made if isinstance(made, Path) else made.path))


@command.command()
@json_option
def ls(json_: bool) -> None:
    """List the images that are kept here, the newest first."""
    found = _store().all()
    if json_:
        out.as_json([image_verdict.as_json(each) for each in found])
    elif not found:
        out.talk("no images yet; `dalsegno image import ubuntu:24.04` brings one")
    else:
        out.table(image_verdict.HEADERS, [row for each in found for row in image_verdict.rows(each)])


@command.command(short_help="Show what is known of an image.")
@click.argument("image")
@json_option
def show(image: str, json_: bool) -> None:
    """Show what is known of IMAGE: a name, the first digits of a digest, or a .sqsh file."""
    if image.endswith(".sqsh") and Path(image).is_file():
        _show_file(Path(image), json_)
        return
    found = find_image(_store(), image)
    if json_:
        out.as_json(image_verdict.as_json(found))
    else:
        out.data("\n".join(image_verdict.lines(found)))


def _show_file(path: Path, json_: bool) -> None:
    from dalsegno.containers.image_metadata import look_inside
    from dalsegno.system.processes import LocalRunner

    inside = look_inside(path, LocalRunner())
    if json_:
        out.as_json(image_verdict.inside_as_json(str(path), inside))
    else:
        out.data("\n".join(image_verdict.inside_lines(str(path), inside)))


@command.command()
@click.argument("images", nargs=-1, required=True)
def rm(images: tuple[str, ...]) -> None:
    """Remove IMAGES. Jobs that have one mounted keep it; its layers go with the next `gc`.

    Of an image with several names one goes, and the image with the last; by its digest all of it goes at once.
    """
    store = _store()
    for each in images:
        store.find(each)  # all of them, before any goes
    for each in images:
        try:
            found = store.find(each)
        except NotThere:
            continue  # it went with one before it
        if left := store.take_name(each, found):
            out.talk(f"removed the name {each}; the image is still {', '.join(left)}")
        else:
            store.remove(found)
            out.talk(f"removed {', '.join(found.names) or found.record.hex[:12]}")


@command.command(short_help="Remove what no name leads to.")
@click.option("--layers", is_flag=True, help="Remove all layers: the next import fetches them again.")
@json_option
def gc(layers: bool, json_: bool) -> None:
    """Remove what no name leads to: images whose tag has moved on, layers of no image, what was cut short.

    And images that jobs had to unpack, where they cannot be mounted, if the image is gone and no job uses them.
    """
    from dalsegno.cluster import unpacked_homes
    from dalsegno.containers.named import sweep_unpacked

    swept = _store().sweep(layers)
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
    """Read every byte of IMAGES, or of all that are kept. Exits 1 if one is not what was imported.

    A .sqsh file elsewhere can be named too: it is compared with what was written there, or is kept here; one of which
    nothing is known is unpacked, to nowhere.
    """
    store = _store()
    with _bar(quiet=json_) as bar:
        verdicts = [verdict_of(each, store, bar) for each in images or [str(each.path) for each in store.all()]]
    if json_:
        out.as_json([{**verdict.facts, "fault": verdict.fault} for verdict in verdicts])
    else:
        for verdict in verdicts:
            out.data(f"{verdict.title}: {verdict.fault or verdict.praise}")
    if any(verdict.fault for verdict in verdicts):
        raise SystemExit(1)


def _store() -> ImageStore:
    """The one at hand. Where that is another's: a place of our own, and theirs to read."""
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
        raise DalsegnoError(f"{error.strerror or error}: {error.filename}", hint="look at that path") from error
    finally:
        bar.close()
