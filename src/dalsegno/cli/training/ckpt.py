"""`dalsegno ckpt`: list, verify and convert checkpoints."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli.out import size

if TYPE_CHECKING:
    from dalsegno.train.disk.verify import Checked

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option
from dalsegno.errors import DalsegnoError, NotThere, UsageError

if TYPE_CHECKING:
    from dalsegno.train.disk.verify import Checked


HEADERS = ["STEP", "AGE", "SIZE", "RANKS", "RUN", "STATE"]


def row(checked: Checked) -> list[str]:
    manifest = checked.manifest
    if manifest is None:
        return [checked.path.name, "-", "-", "-", "-", _state(checked)]
    return [
        str(manifest.step),
        _age(manifest.time),
        size(manifest.bytes),
        str(manifest.world),
        manifest.run,
        _state(checked),
    ]


def _state(checked: Checked) -> str:
    if checked.faults:
        return f"damaged: {'; '.join(checked.faults)}"
    return "whole, latest" if _is_latest(checked.path) else "whole"


def verdict(checked: Checked) -> str:
    if checked.faults or checked.manifest is None:
        return f"{checked.path}: damaged: {'; '.join(checked.faults)}"
    return f"{checked.path}: whole, {len(checked.manifest.files) + 1} files, {size(checked.manifest.bytes)}"


def as_json(checked: Checked) -> dict[str, object]:
    manifest = checked.manifest
    return {
        "path": str(checked.path),
        "whole": not checked.faults,
        "faults": list(checked.faults),
        "latest": _is_latest(checked.path),
        "step": manifest.step if manifest else None,
        "time": manifest.time if manifest else None,
        "bytes": manifest.bytes if manifest else None,
        "world": manifest.world if manifest else None,
        "run": manifest.run if manifest else None,
        "generation": manifest.generation if manifest else None,
        "torch": manifest.torch if manifest else None,
    }


def _is_latest(path: Path) -> bool:
    try:
        return os.readlink(path.parent / "latest") == path.name
    except OSError:
        return False


def _age(time: str) -> str:
    try:
        seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(time)).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


TORCH_FILES = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"
WHERE = "give the folder that the script passed to Checkpointer, or one of its step-… folders"
path_argument = click.argument("path", type=click.Path(path_type=Path))


@click.group()
def command() -> None:
    """List, verify and convert checkpoints."""


@command.command()
@path_argument
@json_option
def ls(path: Path, json_: bool) -> None:
    """List the checkpoints in PATH, newest first. Only manifests and file sizes are read."""
    found = [_check(each, every_byte=False) for each in _checkpoints(path)]
    if json_:
        out.as_json([as_json(each) for each in found])
    elif not found:
        out.talk(f"no checkpoints in {path}")
    else:
        out.table(HEADERS, [row(each) for each in found])


@command.command()
@path_argument
@json_option
def verify(path: Path, json_: bool) -> None:
    """Read every byte of the checkpoints in PATH. Exits 1 and names the files if one is damaged."""
    found = _read_all(path)
    if json_:
        out.as_json([as_json(each) for each in found])
    else:
        out.data("\n".join(verdict(each) for each in found))
    if any(each.faults for each in found):
        raise SystemExit(1)


@command.command(short_help="Convert a checkpoint to one file, or back.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--step", type=click.IntRange(min=0), help="Step of the new checkpoint. Default: the step of the file, else 0."
)
@click.option("--under", default="", metavar="NAME", help="Store the file's content under this key, e.g. `model`.")
@click.option("--trust", is_flag=True, help="Also load pickled objects. This runs code from the file.")
def convert(source: Path, target: Path, step: int | None, under: str, trust: bool) -> None:
    """Convert a checkpoint to one file (.pt for torch.load, .safetensors), or such a file to a checkpoint.

    \b
    dalsegno ckpt convert /ckpt/gpt gpt.pt             # the newest checkpoint
    dalsegno ckpt convert gpt.safetensors /ckpt/new
    """
    if _is_file_name(source) == _is_file_name(target):
        raise UsageError(
            f"one of {source} and {target} must be a file, the other a folder of checkpoints",
            hint=f"files end in {', '.join((*TORCH_FILES, SAFETENSORS))}",
        )
    with _translate_errors():
        if _is_file_name(target):
            _to_file(source, target, trust)
        else:
            out.data(str(_from_file(source, target, step, under, trust)))


def _to_file(source: Path, target: Path, trust: bool) -> None:
    from dalsegno.train.disk import convert as way
    from dalsegno.train.disk.load import find_newest, open_checkpoint

    if target.exists():
        raise UsageError(f"{target} already exists", hint="remove it, or name another file")
    is_one = _is_checkpoint(source)
    found = open_checkpoint(source, trust=trust) if is_one else find_newest(source, out.warn, trust)
    if found is None:
        raise NotThere(f"no checkpoints in {source}", hint=WHERE)
    with found:
        lost = way.to_safetensors(found, target) if target.suffix == SAFETENSORS else way.to_torch_file(found, target)
    for each in lost:
        out.talk(f"not converted: {each}")
    out.data(str(target))


def _from_file(source: Path, target: Path, step: int | None, under: str, trust: bool) -> Path:
    from dalsegno.train.disk import convert as way

    if not source.is_file():
        raise NotThere(f"no file {source}", hint="give a checkpoint, a torch.save file or a .safetensors file")
    if source.suffix == SAFETENSORS:
        return way.from_safetensors(source, target, step, under)
    return way.from_torch_file(source, target, step, under, trust)


def _read_all(path: Path) -> list[Checked]:
    found = []
    with out.progress() as say:
        for each in _checkpoints(path):
            say(f"reading {each}")
            found.append(_check(each, every_byte=True))
    if not found:
        raise NotThere(f"no checkpoints in {path}", hint=WHERE)
    return found


def _checkpoints(path: Path) -> list[Path]:
    from dalsegno.train.disk.verify import list_steps

    if not path.exists():
        raise NotThere(f"no folder {path}", hint=WHERE)
    return [path.resolve()] if _is_checkpoint(path) else list_steps(path)


def _is_checkpoint(path: Path) -> bool:
    from dalsegno.train.disk.format import MANIFEST, parse_step

    return (path / MANIFEST).exists() or parse_step(path.name) is not None


def _is_file_name(path: Path) -> bool:
    return path.suffix in (*TORCH_FILES, SAFETENSORS)


def _check(path: Path, every_byte: bool) -> Checked:
    from dalsegno.train.disk.verify import check

    return check(path, every_byte)


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    from dalsegno.train.errors import CheckpointError

    try:
        yield
    except CheckpointError as error:
        raise DalsegnoError(error.what, hint=error.hint) from error
    except ModuleNotFoundError as error:
        raise DalsegnoError(f"{error.name} is not installed", hint="pip install 'dalsegno[torch]'") from error
