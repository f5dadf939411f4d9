"""What a host says of its container plugins, read once."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from posixpath import basename


class Kind(enum.Enum):
    """The plugins that bring `--container-image`; the value is the file's name."""

    PYXIS = "spank_pyxis.so"
    OURS = "dalsegno_container.so"

    @property
    def title(self) -> str:
        return "Pyxis" if self is Kind.PYXIS else "Dal Segno's plugin"


@dataclass(frozen=True)
class StackLine:
    """A line of plugstack.conf, or of a file that it includes."""

    file: str
    text: str

    @property
    def plugin(self) -> str:
        """The plugin's file, as it is written."""
        words = self.text.split()
        return words[1] if words[:1] in (["required"], ["optional"]) and len(words) > 1 else ""

    @property
    def kind(self) -> Kind | None:
        return kind_of(self.plugin)

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(self.text.split()[2:])


@dataclass(frozen=True)
class Closed:
    """A folder of Enroot's that users cannot write to: `common` is the part of it that all users share, and `there` how
    much of it is there already."""

    name: str  # RUNTIME, CACHE, DATA, TEMP
    common: str
    there: str


@dataclass(frozen=True)
class HostFacts:
    """One host's answers. `silent`: why it gave none."""

    host: str
    login: bool = False  # here, where jobs are handed in; else a node
    silent: str = ""
    uid: int = -1
    commands: bool = False  # Slurm's are there
    slurm: str = ""  # its version
    fatal: str = ""  # why Slurm's commands give up
    conf: str = ""  # slurm.conf
    stack: str = ""  # where plugstack.conf is, or would be
    place: str = ""  # which file that is: the same where hosts share it
    file_system: str = ""  # that it is on
    files: tuple[str, ...] = ()  # that one and what it includes, as far as they are there
    lines: tuple[StackLine, ...] = ()
    plugins: tuple[str, ...] = ()  # files that are there
    knows: frozenset[str] = frozenset()  # commands that have the option
    errors: tuple[str, ...] = ()  # that srun has with plugins
    enroot: str | None = None  # its version
    closed: tuple[Closed, ...] = ()
    has: frozenset[str] = frozenset()  # squashfs, overlay, namespaces, unsquashfs, …
    dalsegno: str = ""  # our command, which imports images by name
    open: str = ""  # what others could write to, on the way to our command

    @property
    def registered(self) -> tuple[StackLine, ...]:
        """Lines that name a plugin for containers."""
        return tuple(line for line in self.lines if line.kind)

    @property
    def missing(self) -> tuple[StackLine, ...]:
        """Lines that name a plugin that is not there: one for containers, or any other without which srun gives up."""
        away = [line for line in self.lines if line.plugin and not self.is_there(line.plugin)]
        return tuple(line for line in away if line.kind or self._stumbles_over(line))

    def _stumbles_over(self, line: StackLine) -> bool:
        return line.text.startswith("required") and any(line.plugin in error for error in self.errors)

    def is_there(self, plugin: str) -> bool:
        return plugin in self.plugins if "/" in plugin else any(basename(each) == plugin for each in self.plugins)

    def installed(self, kind: Kind) -> str:
        """Where the plugin is on this host; "" if it is not."""
        return next((path for path in self.plugins if kind_of(path) is kind), "")

    @property
    def working(self) -> StackLine | None:
        """The line that brings the option here."""
        if "srun" not in self.knows:
            return None
        return next((line for line in self.registered if self.is_there(line.plugin)), None)

    @property
    def kept(self) -> str:
        """What plugstack.conf was before a repair, if there was one and it was changed."""
        folder, _, name = self.stack.rpartition("/")
        return f"{folder}/.{name}.before-dalsegno"

    @property
    def configless(self) -> bool:
        """Its files come from slurmctld: what is written here is written over."""
        return self.conf.startswith("/run/slurm/conf/") or "/conf-cache/" in self.conf


def kind_of(plugin: str) -> Kind | None:
    return next((kind for kind in Kind if basename(plugin) == kind.value), None)


def parse_answer(host: str, text: str) -> HostFacts | None:
    """None if the host did not answer to the end; what else its log-in prints is passed over."""
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key.startswith("ds:"):
            said.setdefault(key[3:], []).append(value)
    if "end" not in said:
        return None
    return HostFacts(
        host,
        uid=_number(_first(said, "uid")),
        commands="commands" in said,
        slurm=_first(said, "slurm"),
        fatal=_first(said, "fatal"),
        conf=_first(said, "conf"),
        stack=_first(said, "stack"),
        place=_first(said, "place"),
        file_system=_first(said, "fs"),
        files=tuple(said.get("file", ())),
        lines=tuple(_line(each) for each in said.get("line", ())),
        plugins=tuple(dict.fromkeys(said.get("plugin", ()))),
        knows=frozenset(said.get("knows", ())),
        errors=tuple(said.get("error", ())),
        enroot=said["enroot"][0] if "enroot" in said else None,
        closed=tuple(closed for each in said.get("closed", ()) if (closed := _closed(each))),
        has=frozenset(said.get("has", ())),
        dalsegno=_first(said, "dalsegno"),
        open=_first(said, "open"),
    )


def plugins_in_use(hosts: Sequence[HostFacts]) -> tuple[str, ...]:
    """That some host's plugstack.conf names: to be looked for on the others."""
    return tuple(dict.fromkeys(line.plugin for host in hosts for line in host.registered))


def _first(said: dict[str, list[str]], key: str) -> str:
    return said.get(key, [""])[0]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def _line(text: str) -> StackLine:
    file, _, rest = text.partition("\t")
    return StackLine(file, rest)


def _closed(text: str) -> Closed | None:
    parts = text.split("\t")
    return Closed(*parts) if len(parts) == 3 else None
