"""Plan the shell commands that fix the problems found: on which hosts they run, and in which order. Pure.

A plugin's files are copied to all hosts before any line requires them, because a host whose plugstack.conf requires a
missing plugin starts no jobs, and hosts may share that file. Every command can be repeated.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from posixpath import basename, dirname

from dalsegno.containers.native import BUILD_FLAGS, HELPER, PARTS
from dalsegno.containers.plugstack.check import (
    AS_USER,
    ContainerFinding,
    choose_plugin,
    line_for,
    slurm_version,
    unsafe_line,
    wrong_lines,
)
from dalsegno.containers.plugstack.facts import PluginFacts, PluginKind, StackLine
from dalsegno.hostlist import compress

FOLDER = "/var/lib/dalsegno/containers"  # the plugin's folder on clusters that Dal Segno did not create
HEADERS = '"$(dirname "$(readlink -f "$(command -v scontrol)")")/../include"'  # headers of a Slurm outside /usr
REST_OF_LINE = r"[[:space:]]*\(#.*\)\{0,1\}$"  # optional blanks and an optional comment
CHECK_LOGIN = (
    "srun --help | grep -q -- --container-image || echo 'srun does not load the plugin: remove its line again'"
)


@dataclass(frozen=True)
class PluginBuild:
    """The host that compiles Dal Segno's plugin, the folder with its sources, and the folder to install it in."""

    host: str
    sources: str
    key: str  # the build's folder name, which changes with the sources and the Slurm version
    folder: str = FOLDER

    @property
    def target(self) -> str:
        return f"{self.folder}/{self.key}"


@dataclass(frozen=True)
class CommandStep:
    """Commands to run as root on each of `hosts`, before the next step."""

    hosts: tuple[str, ...]
    purpose: str
    commands: tuple[str, ...]
    caution: str = ""


@dataclass(frozen=True)
class _OurPlugin:
    """Dal Segno's plugin on a cluster that Dal Segno did not create: its line in plugstack.conf, and the host that has
    the plugin's files or compiles them."""

    line: str
    source: str
    build: PluginBuild | None = None

    @property
    def path(self) -> str:
        return self.line.split()[1]

    @property
    def folders(self) -> list[str]:
        kept = [word.partition("=")[2] for word in self.line.split()[2:] if word.startswith(("data=", "cache="))]
        return [dirname(self.path), *kept]


@dataclass(frozen=True)
class _Edit:
    """A change to one host's plugstack.conf."""

    host: PluginFacts
    add: str = ""
    drop: tuple[StackLine, ...] = ()
    restart: bool = False  # whether to restart slurmd, because Pyxis creates its folders when slurmd starts


def plan_commands(
    hosts: Sequence[PluginFacts],
    findings: Sequence[ContainerFinding],
    own: bool = False,
    asleep: Sequence[str] = (),
    build: PluginBuild | None = None,
) -> list[CommandStep]:
    """Return the steps in order. `asleep` contains the nodes that were not checked because they are powered down."""
    needs = _group([(each.host, each.fix, each.commands, "") for each in findings if each.commands])
    if blocked := [edit for host in hosts if (edit := _unblock(host, hosts, own))]:
        # If plugstack.conf requires a missing plugin, srun loads no plugin at all. Other problems are visible only
        # after that line is removed.
        purpose = "comment out plugins that do not exist; then check again, as more problems may show"
        return [*_group([(edit.host.host, purpose, tuple(_edit_commands(edit)), "") for edit in blocked]), *needs]
    ours = _our_plugin(hosts, own, build)
    edits = [edit for host in hosts if (edit := _edit(host, hosts, own, ours))]
    receivers = _receivers(hosts, edits, ours, own) if ours else []
    steps = list(_bring_files(ours, receivers, hosts)) if ours and receivers else []
    steps += _register(edits, hosts, asleep, {each.host for each in receivers})
    if any(each.configless and ("srun" not in each.knows or unsafe_line(each, own)) for each in hosts):
        steps += _reconfigure(hosts, edits)
    return [*steps, *needs]


# Files of Dal Segno's plugin


def _our_plugin(hosts: Sequence[PluginFacts], own: bool, build: PluginBuild | None) -> _OurPlugin | None:
    """Return Dal Segno's plugin if the cluster should use it; otherwise None.

    If the plugin already works safely on a host, its files are copied from there. Otherwise `build` compiles them.
    """
    if own or choose_plugin(hosts) is PluginKind.PYXIS:
        return None
    for host in hosts:
        line = host.working
        if line and line.plugin.startswith("/") and host.slurm == slurm_version(hosts) and not unsafe_line(host, own):
            return _OurPlugin(" ".join(["required", line.plugin, *line.arguments]), host.host)
    if build is None:
        return None
    unsafe = next((line for host in hosts if (line := unsafe_line(host, own))), None)
    arguments = [*unsafe.arguments, AS_USER] if unsafe else _our_arguments(hosts, build)
    return _OurPlugin(" ".join(["required", f"{build.target}/{PluginKind.OURS.value}", *arguments]), build.host, build)


def _our_arguments(hosts: Sequence[PluginFacts], build: PluginBuild) -> list[str]:
    """Return the arguments of the plugin's line. Hosts may share plugstack.conf, so the line names `dalsegno` only if
    all hosts have it at the same path."""
    paths = {host.dalsegno for host in hosts if not host.silent}
    path = paths.pop() if len(paths) == 1 else ""
    importing = [f"import={path}"] if basename(path) == "dalsegno" else []
    return [f"data={build.folder}/kept", f"cache={build.folder}/unpacked", AS_USER, *importing]


def _receivers(hosts: Sequence[PluginFacts], edits: Sequence[_Edit], ours: _OurPlugin, own: bool) -> list[PluginFacts]:
    """Return the hosts that need the plugin's files.

    Such a host lacks the files, could read a plugstack.conf that names the plugin, and has the Slurm version for which
    the plugin is compiled.
    """
    named = any(edit.add == ours.line for edit in edits) or any(
        line.plugin == ours.path for host in hosts for line in host.missing
    )
    fine = [host for host in hosts if host.working and not unsafe_line(host, own)]
    return [
        host
        for host in hosts
        if (named or host.configless) and host not in fine and not host.silent
        and host.slurm == slurm_version(hosts) and not host.is_there(ours.path)
    ]  # fmt: skip


def _bring_files(
    ours: _OurPlugin, receivers: Sequence[PluginFacts], hosts: Sequence[PluginFacts]
) -> Iterator[CommandStep]:
    folders = shlex.join(ours.folders)
    if ours.build:
        yield CommandStep(
            (ours.source,),
            "compile Dal Segno's plugin (needs gcc, the C library's headers and Slurm's headers)",
            tuple(_compile_commands(ours, ours.build)),
            _import_caution(ours, hosts),
        )
    others = [host.host for host in receivers if host.host != ours.source]
    if others:
        folder = shlex.quote(dirname(ours.path))
        unpack = f"install -d -m 755 {folders} && tar -C {folder} -xof - && ldd {shlex.quote(ours.path)} >/dev/null"
        copy = (
            f"for host in {' '.join(others)}; do tar -C {folder} -cf - {basename(ours.path)} {HELPER} | "
            f'ssh "$host" {shlex.quote(unpack)} || '
            'echo "$host cannot load the plugin: do not register it there" >&2; done'
        )
        yield CommandStep((ours.source,), f"copy Dal Segno's plugin to {compress(others)}", (copy,))


def _compile_commands(ours: _OurPlugin, build: PluginBuild) -> Iterator[str]:
    yield f"install -d -m 755 {shlex.join(ours.folders)}"
    for name, words in PARTS.items():
        output = shlex.quote(f"{build.target}/{name}")
        flags = shlex.join([*BUILD_FLAGS, *words])
        yield f"(cd {shlex.quote(build.sources)} && gcc -idirafter {HEADERS} {flags} -o {output} && chmod 755 {output})"


def _import_caution(ours: _OurPlugin, hosts: Sequence[PluginFacts]) -> str:
    if "import=" in ours.line:
        return ""
    unsafe = [f"on {host.host} other users can write to {host.open}" for host in hosts if host.open]
    why = unsafe[0] if unsafe else "`dalsegno` is not installed at the same path on all hosts"
    return f"Images must be files, because the plugin imports none by name: {why}."


# Lines of plugstack.conf


def _unblock(host: PluginFacts, hosts: Sequence[PluginFacts], own: bool) -> _Edit | None:
    """Return the edit that removes the lines of missing plugins other than container plugins.

    Such a line keeps srun from starting. Return None if there are no such lines, or if this plan also gives the host a
    line for a container plugin.
    """
    if not _is_editable(host) or "srun" in host.knows or line_for(host, hosts):
        return None
    foreign = tuple(line for line in wrong_lines(host, hosts, own) if line.kind is None)
    return _Edit(host, drop=foreign) if foreign else None


def _edit(host: PluginFacts, hosts: Sequence[PluginFacts], own: bool, ours: _OurPlugin | None) -> _Edit | None:
    drop = wrong_lines(host, hosts, own)
    if not _is_editable(host) or ("srun" in host.knows and not drop):
        return None
    if ours and host.slurm != slurm_version(hosts):
        return None  # a plugin that was built for another Slurm version would not load on this host
    line = ours.line if ours else line_for(host, hosts)
    kept = [each for each in host.registered if each not in drop or each.text == line]
    drop = tuple(each for each in drop if each not in kept)
    if not line or any(each.plugin == line.split()[1] for each in kept):
        return _Edit(host, drop=drop) if line and drop else None
    return _Edit(host, line, drop, restart=choose_plugin(hosts) is PluginKind.PYXIS and not own)


def _is_editable(host: PluginFacts) -> bool:
    return not host.silent and not host.configless and host.stack.startswith("/")


def _edit_commands(edit: _Edit) -> Iterator[str]:
    for line in edit.drop:
        script = f"s/^[[:space:]]*{_escape(line.text)}{REST_OF_LINE}/# &/"
        yield f"sed -i --follow-symlinks {shlex.quote(script)} {shlex.quote(line.file)}"
    if edit.add:
        added, file = shlex.quote(edit.add), shlex.quote(edit.host.stack)
        if not edit.host.files:
            yield f"install -d -m 755 {shlex.quote(dirname(edit.host.stack))}"
        yield f"grep -qsxF -- {added} {file} || printf '\\n%s\\n' {added} >> {file}"
    if edit.restart:
        yield "systemctl try-restart slurmd"  # running jobs continue
    if edit.add and edit.host.login:
        yield CHECK_LOGIN


def _escape(text: str) -> str:
    """Escape text for a basic regular expression between slashes."""
    return re.sub(r"([\\/.*\[\]^$])", r"\\\1", text)


def _register(
    edits: Sequence[_Edit], hosts: Sequence[PluginFacts], asleep: Sequence[str], served: set[str]
) -> list[CommandStep]:
    """Return the steps that edit plugstack.conf. Login hosts come first, so that a plugin that fails there is not
    registered on nodes."""
    return _group(
        [
            (
                edit.host.host,
                f"{'register the plugin in' if edit.add else 'remove wrong lines from'} {edit.host.stack}",
                tuple(_edit_commands(edit)),
                _line_caution(edit, hosts, asleep, served),
            )
            for edit in sorted(edits, key=lambda edit: not edit.host.login)
        ]
    )


def _line_caution(edit: _Edit, hosts: Sequence[PluginFacts], asleep: Sequence[str], served: set[str]) -> str:
    if not edit.add:
        return ""
    plugin = edit.add.split()[1]
    lacking = [
        each.host for each in hosts if each.host not in served and not each.working and not each.is_there(plugin)
    ]
    if not lacking and not asleep:
        return ""
    return (
        f"{compress([*lacking, *asleep])}: no {plugin}, or not checked. A host that shares this plugstack.conf and "
        "lacks the plugin starts no jobs. Install it there first, or drain the node."
    )


def _reconfigure(hosts: Sequence[PluginFacts], edits: Sequence[_Edit]) -> list[CommandStep]:
    edited = {edit.host.host for edit in edits}
    sources = [each for each in hosts if each.login and not each.configless and (each.working or each.host in edited)]
    purpose = "distribute plugstack.conf to the hosts that get it from slurmctld"
    return [CommandStep((each.host,), purpose, ("scontrol reconfigure",)) for each in sources[:1]]


def _group(items: Sequence[tuple[str, str, tuple[str, ...], str]]) -> list[CommandStep]:
    """Group hosts that need the same commands. The groups are in the order of their first hosts."""
    groups: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for host, purpose, commands, caution in items:
        groups.setdefault((purpose, commands, caution), []).append(host)
    return [CommandStep(tuple(names), *key) for key, names in groups.items()]
