"""Judge the facts that hosts report about container jobs: what is wrong on each host, and how to fix it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dalsegno.containers.plugstack.facts import PluginFacts, PluginKind, StackLine

# Without this argument, the kernel mounts squashfs files that users wrote; a malicious file could crash the kernel.
AS_USER = "squashfs=user"
ENABLE = "set `containers: {enabled: true}` in the cluster file, then run `dalsegno up`"
INSTALL = (
    "install a container plugin on every host: Pyxis, or Dal Segno's own; on a login or head node, "
    "`dalsegno containers check` prints the commands for the latter"
)
SETTINGS = "put the cluster's slurm.conf at /etc/slurm/slurm.conf there, or set SLURM_CONF in the profile of users"
AGAIN = "the host is off or cannot be reached from here; run the check again when it is back"
SSH_ERRORS = {  # part of ssh's error message -> hint that says how to fix the error
    "Host key verification failed": (
        "log in once by hand and compare the host's key with the one shown, or accept it unseen with `--ssh-option "
        "StrictHostKeyChecking=accept-new`"
    ),
    "Permission denied (": (
        "`ssh` must work without a password; set the user and the key with `--ssh-option User=NAME` and `--ssh-option "
        "IdentityFile=FILE`, or in ~/.ssh/config"
    ),
    "Could not resolve hostname": "set its address: `HostName` in ~/.ssh/config, or `ssh: hosts:` in a cluster file",
    "Connection refused": "is sshd running there? Set another port with `--ssh-option Port=N` or in ~/.ssh/config",
    "timed out": AGAIN,
    "No route to host": AGAIN,
    "not responding": AGAIN,
    "Too many authentication failures": "name the key: `--ssh-option IdentityFile=FILE`, and `IdentitiesOnly=yes`",
    "onfiguration option": "`man ssh_config` lists the options: for example `--ssh-option Port=2222`",
}
NAMESPACES = (
    "sysctl -w user.max_user_namespaces=65536",
    "sysctl -e -w kernel.unprivileged_userns_clone=1",
    "printf '%s\\n' 'user.max_user_namespaces = 65536' '-kernel.unprivileged_userns_clone = 1'"
    " > /etc/sysctl.d/90-dalsegno-containers.conf",
)
SQUASHFS_TOOLS = (
    "if command -v apt-get >/dev/null; then apt-get install -y squashfs-tools; else dnf install -y squashfs-tools; fi",
)
OVERLAY = ("modprobe overlay", "echo overlay > /etc/modules-load.d/dalsegno-containers.conf")


@dataclass(frozen=True)
class ContainerFinding:
    """One problem on a host."""

    host: str
    what: str
    fix: str
    commands: tuple[str, ...] = ()  # commands for root on the host; `commands.py` adds the edits of plugstack.conf


# The choice of a plugin


def choose_plugin(hosts: Sequence[PluginFacts]) -> PluginKind | None:
    """Return the plugin that all hosts should have: a working Pyxis, otherwise our plugin if it works, otherwise an
    installed Pyxis. Return None if no host has any of these."""
    works = {host.working.kind for host in hosts if host.working}
    if PluginKind.PYXIS in works or (not works and any(host.installed(PluginKind.PYXIS) for host in hosts)):
        return PluginKind.PYXIS
    return PluginKind.OURS if PluginKind.OURS in works else None


def line_for(host: PluginFacts, hosts: Sequence[PluginFacts]) -> str:
    """Return the line that a host's plugstack.conf should have; "" if the plugin is not installed there."""
    kind = choose_plugin(hosts)
    if kind is None:
        return ""
    model = _model_line(hosts, kind)
    if model and host.is_there(model.plugin):
        return " ".join(["required", model.plugin, *model.arguments])
    found = host.installed(kind) if kind is PluginKind.PYXIS else ""
    return " ".join(["required", found, *(model.arguments if model else ())]) if found else ""


def _model_line(hosts: Sequence[PluginFacts], kind: PluginKind) -> StackLine | None:
    """Return a line for this plugin from any host, preferably a working one, to copy to other hosts."""
    working = [host.working for host in hosts if host.working]
    written = [line for host in hosts for line in host.registered]
    return next((line for line in (*working, *written) if line.kind is kind), None)


def wrong_lines(host: PluginFacts, hosts: Sequence[PluginFacts], own: bool) -> tuple[StackLine, ...]:
    """Return the lines to remove: unsafe lines, and lines for plugins that are missing or that the cluster does not
    use."""
    kind = choose_plugin(hosts)
    missing, unsafe = host.missing, unsafe_line(host, own)
    return tuple(
        line for line in host.lines if line in missing or line == unsafe or (kind and line.kind not in (None, kind))
    )


def unsafe_line(host: PluginFacts, own: bool) -> StackLine | None:
    """Return the line for our plugin if it lacks AS_USER, without which the kernel mounts users' images.

    With `own`, return None, because `dalsegno up` wrote the line.
    """
    line = host.working
    return line if line and line.kind is PluginKind.OURS and AS_USER not in line.arguments and not own else None


def slurm_version(hosts: Sequence[PluginFacts]) -> str:
    """Return the Slurm version to compile the plugin for: the version on the first host that answered, login hosts
    first."""
    return next((host.slurm for host in sorted(hosts, key=lambda host: not host.login) if not host.silent), "")


# Problems that are found on the hosts


def judge(hosts: Sequence[PluginFacts], own: bool = False) -> list[ContainerFinding]:
    """Return all problems on the hosts. `own` says whether `dalsegno up` created the cluster."""
    return [finding for host in hosts for finding in _judge_host(host, hosts, own)]


def _judge_host(host: PluginFacts, hosts: Sequence[PluginFacts], own: bool) -> Iterator[ContainerFinding]:
    if host.silent:
        yield ContainerFinding(host.host, f"did not answer: {host.silent}", _fix_silent(host))
        return
    if "srun" not in host.knows:
        yield ContainerFinding(host.host, _describe_unknown(host, hosts), _fix_plugstack(host, hosts, own))
        return
    if len({line.kind for line in host.registered if host.is_there(line.plugin)}) > 1:
        what = f"{host.stack} names both Pyxis and Dal Segno's plugin, which have the same options"
        yield ContainerFinding(host.host, what, "keep only the line of Pyxis")
    elif host.working and host.working.kind is not choose_plugin(hosts):
        title = host.working.kind.title if host.working.kind else "another plugin"
        what = f"has {title} where other hosts have Pyxis: neither accepts the other's options"
        yield ContainerFinding(host.host, what, _fix_plugstack(host, hosts, own))
    elif unsafe := unsafe_line(host, own):
        what = f"{unsafe.file} has Dal Segno's plugin without `{AS_USER}`: root's kernel mounts the images of all users"
        yield ContainerFinding(host.host, what, f"install the plugin again, and add `{AS_USER}` to its line")
    if "sbatch" not in host.knows:
        what = "sbatch does not know --container-image, only srun does: this Pyxis is older than 0.12"
        yield ContainerFinding(
            host.host, what, "use `srun --container-image` inside the script, or install a newer Pyxis"
        )
    if host.working and not host.login:
        yield from _judge_needs(host, host.working.kind)


def _fix_silent(host: PluginFacts) -> str:
    if "Plugin initialization failed" in host.silent:
        return "its plugstack.conf requires a plugin that does not load; the log of slurmd on the node names it"
    if known := next((fix for text, fix in SSH_ERRORS.items() if text in host.silent), None):
        return known
    if host.login and host.tried == ("ssh",):
        return f"`ssh {host.host} true`, with the options of the cluster file, must work first"
    if host.login:
        return "Slurm's commands must work here first: `sinfo`"
    return f"`sinfo -n {host.host}` shows its state; if it is full or down, check again later, or allow ssh to it"


def _describe_unknown(host: PluginFacts, hosts: Sequence[PluginFacts]) -> str:
    why = f"does not know --container-image: {_reason(host)}"
    login = next((each for each in hosts if each.login), None)
    if any(line.text.startswith("required") for line in host.missing):
        return f"{why}, so {'no job can be submitted' if host.login else 'no job starts there'}"
    if host.login or login is None or "srun" not in login.knows:
        return why
    return (
        f'{why}; inside sbatch, srun fails there with "unrecognized option", and a step that is started from '
        f"{login.host} runs on the bare node, outside its container"
    )


def _reason(host: PluginFacts) -> str:
    if not host.slurm and not host.commands:
        return "Slurm's commands are not found there, not even by a login shell"
    if not host.conf:
        return "Slurm's commands are there, but they find no slurm.conf"
    if not host.slurm:
        return f"Slurm's commands fail with {host.conf}: {host.fatal or 'they give no reason'}"
    if not host.files:
        return f"there is no {host.stack}"
    if host.missing:
        return f"{host.missing[0].file} names {host.missing[0].plugin}, which does not exist"
    if not host.registered:
        return f"{host.stack} names no plugin for containers"
    if host.errors:
        return f"{host.registered[0].plugin} does not load ({host.errors[0]})"
    return f"{host.registered[0].file} names {host.registered[0].plugin}, but srun does not read it"


def _fix_plugstack(host: PluginFacts, hosts: Sequence[PluginFacts], own: bool) -> str:
    kind, line = choose_plugin(hosts), line_for(host, hosts)
    if host.commands and not host.conf:
        return SETTINGS
    if host.commands and not host.slurm:
        return f"`scontrol --version` must work there first, with {host.conf}"
    if host.configless and not any(each.kind is PluginKind.OURS for each in host.missing):
        return (
            f"slurmctld distributes its plugstack.conf: on the host of slurmctld, add `{line or 'its line'}` to that "
            "file, then run `scontrol reconfigure`"
        )
    wrong = wrong_lines(host, hosts, own)
    away = [f"remove `{each.text}` from {each.file}" for each in wrong]
    named = any(line.split()[1] == each.plugin for each in host.registered if each not in wrong) if line else False
    if named and not wrong:
        return f"rebuild {line.split()[1]} for the Slurm version installed there"
    if line:
        return ", and ".join([*away, *([] if named else [f"add `{line}` to {host.stack}"])])
    if any(each.kind is None for each in wrong):
        return ", and ".join(away)
    if kind is PluginKind.PYXIS:
        model = next(each for each in hosts if each.installed(PluginKind.PYXIS))
        return f"install Pyxis and Enroot there, as on {model.host}"
    if host.slurm != slurm_version(hosts) and not own:
        return f"change its Slurm ({host.slurm or 'missing'}) to the version of the others: {slurm_version(hosts)}"
    return ENABLE if own else INSTALL


def _judge_needs(host: PluginFacts, kind: PluginKind | None) -> Iterator[ContainerFinding]:
    """Yield findings about software and kernel features that a node needs to start containers and does not have."""
    if kind is PluginKind.PYXIS:
        yield from _judge_enroot(host)
    elif kind is PluginKind.OURS and "overlay" not in host.has:
        yield ContainerFinding(
            host.host, "its kernel has no overlay file system", "load the kernel module `overlay`", OVERLAY
        )
    elif kind is PluginKind.OURS and not host.has & {"squashfs", "squashfuse", "unsquashfs"}:
        what = "images cannot be opened: there is no squashfs in the kernel, no squashfuse and no unsquashfs"
        yield ContainerFinding(host.host, what, "install squashfs-tools", SQUASHFS_TOOLS)


def _judge_enroot(host: PluginFacts) -> Iterator[ContainerFinding]:
    if host.enroot is None:
        what = "Pyxis is registered, but Enroot, which it needs, is not installed"
        yield ContainerFinding(host.host, what, "install Enroot: https://github.com/NVIDIA/enroot/releases")
        return
    if "namespaces" not in host.has:
        what = "users cannot create namespaces, so Enroot cannot start containers"
        yield ContainerFinding(host.host, what, "allow user namespaces", NAMESPACES)
    if "unsquashfs" not in host.has:
        what = "Enroot cannot unpack images: there is no unsquashfs"
        yield ContainerFinding(host.host, what, "install squashfs-tools", SQUASHFS_TOOLS)
    for each in host.closed:
        what = f"users cannot write to ENROOT_{each.name}_PATH: {each.there} is closed to them"
        if "enroot" in each.common:
            command = f"install -d -m 1777 {shlex.quote(each.common)}"
            yield ContainerFinding(host.host, what, f"open {each.common} to users", (command,))
        else:  # other programs may use this folder too, so do not open it to everyone
            fix = f"set ENROOT_{each.name}_PATH in enroot.conf to a folder that users can write to"
            yield ContainerFinding(host.host, what, fix)
