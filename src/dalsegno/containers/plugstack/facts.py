"""The facts that a host reports about its container plugins."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from posixpath import basename


class PluginKind(enum.Enum):
    """The plugins that provide `--container-image`; the value is the file name."""

    PYXIS = "spank_pyxis.so"
    OURS = "dalsegno_container.so"

    @property
    def title(self) -> str:
        return "Pyxis" if self is PluginKind.PYXIS else "Dal Segno's plugin"


@dataclass(frozen=True)
class StackLine:
    """One line of plugstack.conf, or of a file that it includes."""

    file: str
    text: str

    @property
    def plugin(self) -> str:
        """The plugin's file name or path, as written in the line; "" if the line loads no plugin."""
        words = self.text.split()
        return words[1] if words[:1] in (["required"], ["optional"]) and len(words) > 1 else ""

    @property
    def kind(self) -> PluginKind | None:
        return kind_of(self.plugin)

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(self.text.split()[2:])


@dataclass(frozen=True)
class ClosedFolder:
    """An Enroot folder that users cannot write to."""

    name: str  # Enroot's name for the folder: RUNTIME, CACHE, DATA or TEMP
    common: str  # the part of its path that all users share
    there: str  # the part of its path that exists


@dataclass(frozen=True)
class PluginFacts:
    """The facts that one host reports."""

    host: str
    login: bool = False  # whether users submit jobs on this host; otherwise it is a node
    silent: str = ""  # why the host did not answer
    tried: tuple[str, ...] = ()  # names of the routes that failed
    commands: bool = False  # whether Slurm's commands are installed
    slurm: str = ""  # version of Slurm
    fatal: str = ""  # the fatal error that Slurm's commands print
    conf: str = ""  # path of slurm.conf
    stack: str = ""  # path that plugstack.conf has or would have
    files: tuple[str, ...] = ()  # plugstack.conf and the files that it includes, if they exist
    lines: tuple[StackLine, ...] = ()
    plugins: tuple[str, ...] = ()  # plugin files that exist
    knows: frozenset[str] = frozenset()  # commands that accept --container-image, such as srun
    errors: tuple[str, ...] = ()  # messages from srun about plugins
    enroot: str | None = None  # version of Enroot; None if it is not installed
    closed: tuple[ClosedFolder, ...] = ()
    has: frozenset[str] = frozenset()  # kernel features and tools: squashfs, overlay, namespaces, unsquashfs, …
    dalsegno: str = ""  # path of the command that imports images by name
    open: str = ""  # the part of the path of `dalsegno` that other users can write to

    @property
    def registered(self) -> tuple[StackLine, ...]:
        """The lines for container plugins."""
        return tuple(line for line in self.lines if line.kind)

    @property
    def missing(self) -> tuple[StackLine, ...]:
        """The lines of plugins that do not exist: container plugins, and required ones that cause an error in srun."""
        away = [line for line in self.lines if line.plugin and not self.is_there(line.plugin)]
        return tuple(line for line in away if line.kind or self._fails_on(line))

    def _fails_on(self, line: StackLine) -> bool:
        return line.text.startswith("required") and any(line.plugin in error for error in self.errors)

    def is_there(self, plugin: str) -> bool:
        return plugin in self.plugins if "/" in plugin else any(basename(each) == plugin for each in self.plugins)

    def installed(self, kind: PluginKind) -> str:
        """Return the path of a plugin on this host; "" if it is not installed."""
        return next((path for path in self.plugins if kind_of(path) is kind), "")

    @property
    def working(self) -> StackLine | None:
        """The line that provides `--container-image` on this host; None if there is none or srun rejects the option."""
        if "srun" not in self.knows:
            return None
        return next((line for line in self.registered if self.is_there(line.plugin)), None)

    @property
    def configless(self) -> bool:
        """Return whether this host gets Slurm's files from slurmctld, which overwrites local changes."""
        return self.conf.startswith("/run/slurm/conf/") or "/conf-cache/" in self.conf


def kind_of(plugin: str) -> PluginKind | None:
    return next((kind for kind in PluginKind if basename(plugin) == kind.value), None)


def parse_answer(host: str, text: str) -> PluginFacts | None:
    """Parse a host's answer; None if it is incomplete. Other output of a login shell is ignored."""
    answers: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key.startswith("ds:"):
            answers.setdefault(key[3:], []).append(value)
    if "end" not in answers:
        return None
    return PluginFacts(
        host,
        commands="commands" in answers,
        slurm=_first(answers, "slurm"),
        fatal=_first(answers, "fatal"),
        conf=_first(answers, "conf"),
        stack=_first(answers, "stack"),
        files=tuple(answers.get("file", ())),
        lines=tuple(_line(each) for each in answers.get("line", ())),
        plugins=tuple(dict.fromkeys(answers.get("plugin", ()))),
        knows=frozenset(answers.get("knows", ())),
        errors=tuple(answers.get("error", ())),
        enroot=answers["enroot"][0] if "enroot" in answers else None,
        closed=tuple(closed for each in answers.get("closed", ()) if (closed := _closed(each))),
        has=frozenset(answers.get("has", ())),
        dalsegno=_first(answers, "dalsegno"),
        open=_first(answers, "open"),
    )


def plugins_in_use(hosts: Sequence[PluginFacts]) -> tuple[str, ...]:
    """Return the container plugins that any host's plugstack.conf names."""
    return tuple(dict.fromkeys(line.plugin for host in hosts for line in host.registered))


def _first(answers: dict[str, list[str]], key: str) -> str:
    return answers.get(key, [""])[0]


def _line(text: str) -> StackLine:
    file, _, rest = text.partition("\t")
    return StackLine(file, rest)


def _closed(text: str) -> ClosedFolder | None:
    parts = text.split("\t")
    return ClosedFolder(*parts) if len(parts) == 3 else None
