"""Build the srun options for a run in a container. Both Pyxis and Dal Segno's plugin accept them.

The run agent, its warm parent and the workers all run in the container, with the image's Python. The files of the
package and of the run that they need are mounted at the same paths as outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from posixpath import basename, dirname, join, normpath

from dalsegno.errors import UsageError
from dalsegno.image_name import parse_name
from dalsegno.runs.submit.request import RunRequest
from dalsegno.runs.submit.values import shown
from dalsegno.slurm.parse.srun import INSIDE

PYTHON = "python3"  # name of the Python in the image
GUARD = (
    f"[ -e {INSIDE} ] || {{ "
    'echo "$SLURMD_NODENAME: the container did not start; run \\`dalsegno containers check\\` for the reason" >&2; '
    'exit 1; }; exec "$@"'
)
OPTIONS_ARGV = ("srun", "--help")


def takes_containers(help_text: str) -> bool:
    """Return whether a plugin has added `--container-image` to srun.

    Slurm's own `--container` is a different option.
    """
    return "--container-image" in help_text


def container_options(request: RunRequest, folder: str, launcher: tuple[str, ...]) -> list[str]:
    """Return the container options for the srun that starts the agents or processes; empty without an image."""
    if not request.container_image:
        return []
    own = [request.chdir or "/", dirname(join(request.chdir, request.script)), folder]
    mounts = [f"{path}:{path}" for path in _outermost(own)]
    if _is_script(launcher):
        mounts += [f"{dirname(launcher[-1])}:{target}:ro" for target in (dirname(launcher[-1]), INSIDE)]
    return [
        f"--container-image={_image(request)}",
        f"--container-mounts={','.join([*mounts, *request.container_mounts])}",
        *([f"--container-workdir={request.chdir}"] if request.chdir else []),
    ]


def launcher_inside(request: RunRequest, launcher: tuple[str, ...]) -> tuple[str, ...]:
    """Return the launcher for use in the container. The image's Python can run it, because it needs no packages."""
    if not request.container_image or not _is_script(launcher):
        return launcher
    return (PYTHON, *launcher[1:-1], join(INSIDE, basename(launcher[-1])))


def wrap_guard(request: RunRequest, launcher: tuple[str, ...], command: list[str]) -> list[str]:
    """Return the command. If the run has a container, a guard ensures that the command runs in it or not at all."""
    return ["sh", "-c", GUARD, "sh", *command] if request.container_image and _is_script(launcher) else command


def _is_script(launcher: tuple[str, ...]) -> bool:
    """Return whether the launcher consists of a Python and a file of the package.

    Any other command may be missing in the image.
    """
    return len(launcher) > 1 and launcher[-1].startswith("/")


def check_container(request: RunRequest, folder: str, takes_containers: bool = True) -> None:
    """Raise UsageError if options contradict each other, a path cannot be mounted, or srun cannot start containers."""
    if not request.container_image:
        if request.container_mounts:
            raise UsageError("mounts need a container", hint="name the image with `--container-image`")
        return
    parse_name(request.container_image)
    if not takes_containers:
        hint = (
            "run `dalsegno containers check` for the reason and the fix; on a local cluster, `dalsegno plan` "
            "shows what is missing, unless the file has `containers: {enabled: false}`"
        )
        raise UsageError(
            "srun has no --container-image option here: neither Pyxis nor Dal Segno's plugin is set up", hint=hint
        )
    for path in (request.chdir, dirname(join(request.chdir, request.script)), folder):
        if set(path) & set(":,"):
            hint = "use a folder without `:` and `,`, which Pyxis's options cannot express"
            raise UsageError(f"{shown(path)} cannot be mounted into a container", hint=hint)


def check_mounts(text: str) -> tuple[str, ...]:
    """Parse comma-separated mounts of the form `SRC:DST[:FLAGS]`; raise UsageError if one is invalid."""
    mounts = tuple(text.split(","))
    for each in mounts:
        source, _, rest = each.partition(":")
        known = source in ("tmpfs", "umount") or source.startswith(("/", "./", "../"))
        if not known or not (rest or source).startswith("/") or each.count(":") > 2:
            hint = "write `/folder:/folder`, or `/folder:/folder:ro` for read-only"
            raise UsageError(f"invalid mount {shown(each)}", hint=hint)
    return mounts


def _image(request: RunRequest) -> str:
    """Return the image, with a relative path resolved from the run's working folder."""
    image = request.container_image
    return normpath(join(request.chdir, image)) if image.startswith(".") else image


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are not below any of the other paths."""
    plain = list(dict.fromkeys(normpath(path) for path in paths if path))
    return [path for path in plain if not any(path != other and f"{path}/".startswith(f"{other}/") for other in plain)]


# MPI types that srun supports


MPI_LIST_ARGV = ("srun", "--mpi=list")
_WORD = re.compile(r"\b(none|openmpi|cray_shasta|pmi2|pmix(?:_v\d+)?)\b")


def parse_mpi_types(text: str) -> tuple[str, ...]:
    """Return the types in the output of `srun --mpi=list` in any Slurm version. Older versions print it to stderr."""
    listed = (_WORD.findall(line.partition("versions available:")[2] or line) for line in text.splitlines())
    return tuple(dict.fromkeys(name for names in listed for name in names))


def choose_mpi(types: Sequence[str]) -> str:
    """Return the newest PMIx type, or PMI-2 if there is none. Most MPI implementations support only these two.

    Raise if both are missing.
    """
    if "pmix" in types:
        return "pmix"
    versions = sorted((name for name in types if name.startswith("pmix_v")), key=lambda name: int(name[6:]))
    if versions:
        return versions[-1]
    if "pmi2" in types:
        return "pmi2"
    known = f"`srun --mpi=list` lists only {', '.join(types)}" if types else "`srun --mpi=list` lists no type"
    raise UsageError(f"this Slurm cannot start MPI programs: {known}", hint="install Slurm's pmix or pmi2 plugin")
