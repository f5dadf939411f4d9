"""A run inside a container: what srun is told, in the words that Pyxis and our own plugin take alike. Pure.

The run agent, its warm parent and the workers all live in it, in the image's own Python; what they need of us and of
the run is mounted at the path it has outside.
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

PYTHON = "python3"  # the image's
GUARD = (
    f"[ -e {INSIDE} ] || {{ "
    'echo "$SLURMD_NODENAME started no container: \\`dalsegno containers check\\` says why" >&2; exit 1; }; exec "$@"'
)
OPTIONS_ARGV = ("srun", "--help")


def takes_containers(help_text: str) -> bool:
    """Whether a plugin has given srun the option; Slurm's own `--container` is another thing."""
    return "--container-image" in help_text


def container_words(request: RunRequest, folder: str, launcher: tuple[str, ...]) -> list[str]:
    """Options for the srun that starts the agents, or the processes themselves; none where there is no image."""
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
    """Our programs need a Python and no library: the image's will do."""
    if not request.container_image or not _is_script(launcher):
        return launcher
    return (PYTHON, *launcher[1:-1], join(INSIDE, basename(launcher[-1])))


def guarded(request: RunRequest, launcher: tuple[str, ...], words: list[str]) -> list[str]:
    """A program that starts in its container, or not at all."""
    return ["sh", "-c", GUARD, "sh", *words] if request.container_image and _is_script(launcher) else words


def _is_script(launcher: tuple[str, ...]) -> bool:
    """A Python and a file of our package, rather than a command that the image may or may not have."""
    return len(launcher) > 1 and launcher[-1].startswith("/")


def check_container(request: RunRequest, folder: str, takes_containers: bool = True) -> None:
    """Raises UsageError for what cannot be meant, could not be mounted, or is not known to this cluster's srun."""
    if not request.container_image:
        if request.container_mounts:
            raise UsageError("there is nothing to mount into", hint="`--container-image` names the image")
        return
    parse_name(request.container_image)
    if not takes_containers:
        hint = (
            "`dalsegno containers check` says why and how to fix it; on a local cluster, `dalsegno plan` "
            "says what is missing, unless the file has `containers: {enabled: false}`"
        )
        raise UsageError(
            "srun knows no --container-image here: neither Pyxis nor Dal Segno's plugin is set up", hint=hint
        )
    for path in (request.chdir, dirname(join(request.chdir, request.script)), folder):
        if set(path) & set(":,"):
            hint = "use a folder without `:` and `,`: Pyxis's options cannot name such"
            raise UsageError(f"{shown(path)} cannot be mounted into a container", hint=hint)


def parse_mounts(text: str) -> tuple[str, ...]:
    """`SRC:DST[:FLAGS]`, or several with commas."""
    mounts = tuple(text.split(","))
    for each in mounts:
        source, _, rest = each.partition(":")
        known = source in ("tmpfs", "umount") or source.startswith(("/", "./", "../"))
        if not known or not (rest or source).startswith("/") or each.count(":") > 2:
            hint = "write it as `/folder:/folder`, with `:ro` after it to keep it from being written to"
            raise UsageError(f"{shown(each)} is no mount", hint=hint)
    return mounts


def _image(request: RunRequest) -> str:
    """A relative path is one below the run's folder, wherever srun is called from."""
    image = request.container_image
    return normpath(join(request.chdir, image)) if image.startswith(".") else image


def _outermost(paths: Iterable[str]) -> list[str]:
    """Without those that lie below another."""
    plain = list(dict.fromkeys(normpath(path) for path in paths if path))
    return [path for path in plain if not any(path != other and f"{path}/".startswith(f"{other}/") for other in plain)]


# ---- How srun and an MPI library find each other: one of the types that `srun --mpi=list` prints.


MPI_LIST_ARGV = ("srun", "--mpi=list")
_WORD = re.compile(r"\b(none|openmpi|cray_shasta|pmi2|pmix(?:_v\d+)?)\b")


def parse_mpi_types(text: str) -> tuple[str, ...]:
    """The types in that list, whichever of Slurm's layouts it has; older ones print it to stderr."""
    listed = (_WORD.findall(line.partition("versions available:")[2] or line) for line in text.splitlines())
    return tuple(dict.fromkeys(name for names in listed for name in names))


def choose_mpi(types: Sequence[str]) -> str:
    """PMIx, the newest there is, else PMI-2. Open MPI 5 and most others know nothing else."""
    if "pmix" in types:
        return "pmix"
    versions = sorted((name for name in types if name.startswith("pmix_v")), key=lambda name: int(name[6:]))
    if versions:
        return versions[-1]
    if "pmi2" in types:
        return "pmi2"
    known = f"`srun --mpi=list` knows only {', '.join(types)}" if types else "`srun --mpi=list` names no type"
    raise UsageError(f"this Slurm cannot start MPI programs: {known}", hint="it needs its pmix or pmi2 plugin")
