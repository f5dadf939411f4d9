"""Read a batch script without running it: its options, and the commands that start training. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Short options of sbatch and their long names.
_SHORT = {
    "N": "nodes", "n": "ntasks", "p": "partition", "t": "time", "c": "cpus-per-task", "J": "job-name", "o": "output",
    "e": "error", "A": "account", "q": "qos", "C": "constraint", "w": "nodelist", "G": "gpus", "D": "chdir",
}  # fmt: skip
SLURM_OPTIONS = frozenset(
    {*_SHORT.values(), "gres", "gpus-per-node", "gpus-per-task", "ntasks-per-node", "mem", "mem-per-gpu", "mem-per-cpu",
     "exclusive", "exclude", "container-image", "container-mounts", "array", "dependency", "requeue", "reservation"}
)  # fmt: skip
_CONTINUED = re.compile(r"\\[ \t]+$")
_ARGUMENTS = re.compile(r"\$(@|\*|\{[@*1-9]|[1-9])")
_ENDS_COMMAND = re.compile(r"[|&;<>]|\d?>")  # the text from here on belongs to another command, or is a redirection
_MOVES = {"cd", "pushd", "git", "tar", "unzip", "cp", "mv", "rsync", "wget", "curl", "ln"}
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class BatchLine:
    """A command of a script, joined from its continued lines, and the number of its first line."""

    line: int
    words: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class ScriptRun:
    """A Python script that a command of a batch script starts, and the arguments after its name."""

    line: BatchLine
    path: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class BatchFacts:
    """A batch script. `options` maps the long names of `#SBATCH` lines to their values."""

    path: str
    options: dict[str, str]
    option_lines: dict[str, int]
    late: tuple[BatchLine, ...] = ()  # #SBATCH lines after the first command, which Slurm ignores
    commands: tuple[BatchLine, ...] = ()
    broken: tuple[BatchLine, ...] = ()  # lines with spaces after their last backslash, so that the command ends there
    takes_arguments: bool = False  # whether the script uses `$@` or `$1`

    @property
    def scripts(self) -> list[tuple[BatchLine, str]]:
        """Return the Python scripts that are started, with their commands."""
        return [(each, word) for each in self.commands for word in each.words if _is_script(word)]

    @property
    def calls(self) -> list[ScriptRun]:
        """Return the scripts that Python or torchrun starts, with their arguments."""
        found = []
        for line in self.commands:
            at = next((at for at, word in enumerate(line.words) if _is_script(word)), None)
            if at is not None and any(_starts_scripts(word) for word in line.words[:at]):
                rest = line.words[at + 1 :]
                end = next((end for end, word in enumerate(rest) if _ENDS_COMMAND.match(word)), len(rest))
                found.append(ScriptRun(line, line.words[at], rest[:end]))
        return found

    def may_create(self, call: ScriptRun) -> bool:
        """Return whether an earlier command may create the script, or change the working folder."""
        name = call.path.rpartition("/")[2]
        earlier = [each for each in self.commands if each.line < call.line.line]
        programs = {word.rpartition("/")[2] for each in earlier for word in each.words}
        return bool(programs & _MOVES) or any(name in each.text for each in earlier)

    @property
    def launchers(self) -> list[BatchLine]:
        return [each for each in self.commands if _launcher_at(each.words) is not None]

    def launcher_paths(self) -> list[tuple[BatchLine, str]]:
        """Return the calls that name torchrun by a path, each with that path."""
        words = [(each, word) for each in self.launchers for word in each.words if word.endswith("/torchrun")]
        return [(each, word) for each, word in words if "$" not in word and not word.startswith("-")]

    def without_script(self) -> list[BatchLine]:
        """Return calls of torchrun without a script. Calls that use shell variables are left out."""
        return [each for each in self.launchers if not _names_script(each)]

    def container_lines(self) -> list[BatchLine]:
        in_options = [
            BatchLine(self.option_lines[name], (f"--{name}={value}",), f"#SBATCH --{name}={value}")
            for name, value in self.options.items()
            if name.startswith("container-")
        ]
        return in_options + [
            each for each in self.commands if any(word.startswith("--container-") for word in each.words)
        ]

    def environment(self) -> tuple[int, str]:
        """Return the line that activates a Python environment, and the environment; (0, "") if no line does."""
        for each in self.commands:
            found = _activated(each.words) or _prefix_of_program(each.words)
            if found and "$" not in found:
                return each.line, found
        return 0, ""

    def variable(self, name: str) -> tuple[int, str]:
        for each in reversed(self.commands):
            for word in each.words:
                if word.startswith(f"{name}="):
                    return each.line, word.partition("=")[2]
        return 0, ""

    def conda_lines(self) -> list[BatchLine]:
        """Return commands that create environments from Anaconda's channels without accepting the terms of use."""
        accepts = any("tos" in each.words and "accept" in each.words for each in self.commands)
        creates = [each for each in self.commands if _creates_conda(each.words)]
        return [] if accepts else creates

    @property
    def requests_gpus(self) -> bool:
        words = [*self.options, *(word for each in self.commands for word in each.words if word.startswith("--"))]
        return any(word.lstrip("-").startswith(("gpus", "gres")) for word in words)


def is_batch(text: str) -> bool:
    """Return whether a text starts with `#!` and is not a Python script."""
    return text.startswith("#!") and "python" not in text.partition("\n")[0]


def read_batch(text: str, path: str) -> BatchFacts:
    """Return the options and commands of a batch script."""
    options: dict[str, str] = {}
    option_lines: dict[str, int] = {}
    late, commands, broken = list[BatchLine](), list[BatchLine](), list[BatchLine]()
    for number, line in _joined(text):
        stripped = line.strip()
        if stripped.startswith("#SBATCH"):
            if commands:
                late.append(BatchLine(number, tuple(_words(stripped)), stripped))
                continue
            for name, value in parse_options(_words(stripped)[1:]):
                options[name], option_lines[name] = value, number
        elif stripped and not stripped.startswith("#"):
            commands.append(BatchLine(number, tuple(_words(stripped)), stripped))
    for number, line in enumerate(text.splitlines(), 1):
        if _CONTINUED.search(line) and not line.lstrip().startswith("#"):
            broken.append(BatchLine(number, tuple(_words(line.rstrip().rstrip("\\"))), line.rstrip()))
    return BatchFacts(
        path, options, option_lines, tuple(late), tuple(commands), tuple(broken), bool(_ARGUMENTS.search(text))
    )


def parse_options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of an sbatch command line by their long names, up to the first word that is not an option."""
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "--":
        word, index = words[index], index + 1
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            name, value, equals = _SHORT.get(word[1:2], word[1:2]), word[2:], word[2:]
        if not equals and index < len(words) and not words[index].startswith("-"):
            value, index = words[index], index + 1
        yield name, value


def misplaced_options(words: Sequence[str]) -> list[str]:
    """Return the arguments of a script that are long options of Slurm, each with its value: `--nodes 2`."""
    found = list[str]()
    for word, after in zip(words, (*words[1:], ""), strict=False):
        name, equals, _ = word[2:].partition("=")
        if word.startswith("--") and name in SLURM_OPTIONS:
            has_value = not equals and name not in _FLAGS and after and not after.startswith("-")
            found.append(f"{word} {after}" if has_value else word)
    return found


def option_name(option: str) -> str:
    """Return the name of an option such as `--nodes=2` or `--nodes 2`."""
    return re.split("[= ]", option, maxsplit=1)[0]


@dataclass(frozen=True)
class SubmitLine:
    """A command line of sbatch: its options, the script, and the arguments of the script."""

    options: dict[str, str] = field(default_factory=dict)
    script: str = ""
    arguments: tuple[str, ...] = ()


def read_submit_line(line: str) -> SubmitLine | None:
    """Read a command line such as `sbatch -N 2 job.sh --time 5`; return None if the command is not sbatch.
    srun and salloc have a program in the place of the script. The arguments of that program are not examined."""
    words = _words(line)
    if not words or words[0].rpartition("/")[2] != "sbatch":
        return None
    index = 1
    while index < len(words) and words[index].startswith("-"):
        name = words[index].lstrip("-").partition("=")[0]
        long = words[index].startswith("--")
        takes_next = "=" not in words[index] and name not in _FLAGS and (long or len(words[index]) == 2)
        index += 2 if takes_next else 1
    return SubmitLine(dict(parse_options(words[1:index])), words[index] if index < len(words) else "",
                      tuple(words[index + 1 :]))  # fmt: skip


_FLAGS = {"exclusive", "requeue", "no-requeue", "parsable", "hold", "H", "wait", "W", "test-only", "overcommit", "O",
          "contiguous", "oversubscribe", "s", "verbose", "v", "quiet", "Q", "spread-job", "k", "no-kill"}  # fmt: skip


def _joined(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines. A line that ends with a backslash is joined to the next one."""
    first, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        first = first or number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            parts.append(line[:-1])
            continue
        yield first, " ".join([*parts, line])
        first, parts = 0, []
    if parts:
        yield first, " ".join(parts)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=line[:1] != "#")
    except ValueError:  # the quoted text ends on another line
        return line.split()


def _launcher_at(words: Sequence[str]) -> int | None:
    return next((at for at, word in enumerate(words) if word.rpartition("/")[2] in _LAUNCHERS), None)


def _names_script(line: BatchLine) -> bool:
    at = _launcher_at(line.words)
    rest = line.words[at + 1 :] if at is not None else ()
    unclear = any("$" in word or "`" in word for word in rest)
    named = any(_is_script(word) or word in ("-m", "--module", "--no-python", "--no_python", "--help") for word in rest)
    # A word after an option may be its value. A word after another word, or after `--option=value`, is a script.
    bare = [before for before, word in zip(("", *rest), rest, strict=False) if not word.startswith("-")]
    return unclear or named or any(not before.startswith("-") or "=" in before for before in bare)


def _starts_scripts(word: str) -> bool:
    return word.rpartition("/")[2].startswith("python") or word.rpartition("/")[2] in _LAUNCHERS


def _is_script(word: str) -> bool:
    return word.endswith(".py") and not word.startswith("-")


def _activated(words: Sequence[str]) -> str:
    if len(words) > 1 and words[0] in ("source", ".") and words[1].endswith("/bin/activate") and len(words) == 2:
        return words[1].removesuffix("/bin/activate")
    if len(words) > 2 and words[:2] in (("conda", "activate"), ("source", "activate")) and "/" in words[2]:
        return words[2].rstrip("/")
    return ""


def _prefix_of_program(words: Sequence[str]) -> str:
    """Return the folder of the environment whose program is started by its path, such as `./venv/bin/torchrun`."""
    names = ("/bin/torchrun", "/bin/python", "/bin/python3")
    found = [word for word in words if word.endswith(names) and not word.startswith(("/usr/", "/bin/", "-"))]
    return found[0].rpartition("/bin/")[0] if found else ""


def _creates_conda(words: Sequence[str]) -> bool:
    name = words[0].rpartition("/")[2] if words else ""
    free = any(word == "--override-channels" for word in words)
    return name == "conda" and len(words) > 1 and words[1] in ("create", "install") and not free
