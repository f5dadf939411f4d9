"""What is wrong with containers on a cluster's hosts, each in a sentence and with what mends it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dalsegno.containers.plugstack.choice import AS_USER, choose, line_for, reads_as_root, slurm_version, wrong_lines
from dalsegno.containers.plugstack.facts import HostFacts, Kind

ENABLE = "`containers: {enabled: true}` in the cluster file, then `dalsegno up`"
INSTALL = "`dalsegno containers check --repair`, as root, installs Dal Segno's own plugin"
SETTINGS = "put the cluster's slurm.conf at /etc/slurm/slurm.conf there, or have SLURM_CONF name it in users' profile"
AGAIN = "it is off, or not to be reached from here; when it is back, run the same again: what is done stays done"
SSH_SAYS = {  # what ssh says last -> what to do about it
    "Host key verification failed": (
        "log in once by hand and compare the host's key with what it shows, or `--ssh-option "
        "StrictHostKeyChecking=accept-new` to take it as it is"
    ),
    "Permission denied (": (
        "`ssh` must get there without a password; `--ssh-option User=NAME` and `--ssh-option IdentityFile=FILE`, or "
        "~/.ssh/config, say who and with which key"
    ),
    "Could not resolve hostname": "give its address: `HostName` in ~/.ssh/config, or `ssh: hosts:` in a cluster file",
    "Connection refused": "is sshd running there? `--ssh-option Port=N`, or ~/.ssh/config, names another port",
    "timed out": AGAIN,
    "No route to host": AGAIN,
    "not responding": AGAIN,
    "Too many authentication failures": "name the key: `--ssh-option IdentityFile=FILE`, and `IdentitiesOnly=yes`",
    "onfiguration option": "`man ssh_config` has what can be written: `--ssh-option Port=2222`",
}


@dataclass(frozen=True)
class Finding:
    host: str
    what: str
    fix: str


def judge(hosts: Sequence[HostFacts], own: bool = False) -> list[Finding]:
    """`own`: a cluster of ours, which its file describes."""
    return [finding for host in hosts for finding in _judge_host(host, hosts, own)]


def _judge_host(host: HostFacts, hosts: Sequence[HostFacts], own: bool) -> Iterator[Finding]:
    if host.silent:
        yield Finding(host.host, f"could not be asked: {host.silent}", _unasked(host))
        return
    if "srun" not in host.knows:
        yield Finding(host.host, _unknown(host, hosts), _registering(host, hosts, own))
        return
    if len({line.kind for line in host.registered if host.is_there(line.plugin)}) > 1:
        what = f"{host.stack} names both Pyxis and Dal Segno's plugin, which have the same options"
        yield Finding(host.host, what, "keep one of the two lines: Pyxis's")
    elif host.working and host.working.kind is not choose(hosts):
        what = f"has {_title(host.working.kind)} where other hosts have Pyxis: neither takes the other's options"
        yield Finding(host.host, what, _registering(host, hosts, own))
    elif unsafe := reads_as_root(host, own):
        what = f"{unsafe.file} has Dal Segno's plugin without `{AS_USER}`: root's kernel mounts the images of all users"
        fix = f"`dalsegno containers check --repair`, as root, or add `{AS_USER}` to its line"
        yield Finding(host.host, what, fix)
    if "sbatch" not in host.knows:
        what = "sbatch does not know --container-image, only srun does: this Pyxis is older than 0.12"
        yield Finding(host.host, what, "use `srun --container-image` inside the script, or install a newer Pyxis")
    if host.working and not host.login:
        yield from _judge_needs(host, host.working.kind)


def _title(kind: Kind | None) -> str:
    return kind.title if kind else "another plugin"


def _unasked(host: HostFacts) -> str:
    if "Plugin initialization failed" in host.silent:
        return "its plugstack.conf requires a plugin that does not load; slurmd's log on the node names it"
    if known := next((fix for said, fix in SSH_SAYS.items() if said in host.silent.rpartition("ssh: ")[2]), None):
        return known
    if host.login and host.silent.startswith("ssh: "):
        return f"`ssh {host.host} true`, with the options of the cluster file, must work first"
    if host.login:
        return "Slurm's commands must work here first: `sinfo`"
    return f"`sinfo -n {host.host}` tells its state; a node that is full or down can be asked later, or over ssh"


def _unknown(host: HostFacts, hosts: Sequence[HostFacts]) -> str:
    why = f"does not know --container-image: {_reason(host)}"
    here = next((each for each in hosts if each.login), None)
    if any(line.text.startswith("required") for line in host.missing):
        return f"{why}, so that {'no job can be handed in' if host.login else 'no job starts there'}"
    if host.login or here is None or "srun" not in here.knows:
        return why
    return (
        f'{why}; inside sbatch, srun fails there with "unrecognized option", and a step that is started from '
        f"{here.host} runs on the bare node, outside its container"
    )


def _reason(host: HostFacts) -> str:
    if not host.slurm and not host.commands:
        return "Slurm's own commands are not found there, nor by a log-in shell"
    if not host.conf:
        return "Slurm's commands are there, but no slurm.conf that they could read"
    if not host.slurm:
        return f"Slurm's commands give up over {host.conf}: {host.fatal or 'they do not say why'}"
    if not host.files:
        return f"there is no {host.stack}"
    if host.missing:
        return f"{host.missing[0].file} names {host.missing[0].plugin}, which is not there"
    if not host.registered:
        return f"{host.stack} names no plugin for containers"
    if host.errors:
        return f"{host.registered[0].plugin} does not load ({host.errors[0]})"
    return f"{host.registered[0].file} names {host.registered[0].plugin}, but srun does not read it"


def _registering(host: HostFacts, hosts: Sequence[HostFacts], own: bool) -> str:
    kind, line = choose(hosts), line_for(host, hosts)
    if host.commands and not host.conf:
        return SETTINGS
    if host.commands and not host.slurm:
        return f"`scontrol --version` must work there first, with {host.conf}"
    if host.configless and not any(each.kind is Kind.OURS for each in host.missing):
        return "its files come from slurmctld: mend plugstack.conf there, then `scontrol reconfigure`"
    wrong = wrong_lines(host, hosts, own)
    away = [f"take `{each.text}` out of {each.file}" for each in wrong]
    named = any(line.split()[1] == each.plugin for each in host.registered if each not in wrong) if line else False
    if named and not wrong:
        return f"build {line.split()[1]} anew, for the Slurm that is there"
    if line:
        return ", and ".join([*away, *([] if named else [f"add `{line}` to {host.stack}"])])
    if any(each.kind is None for each in wrong):
        return ", and ".join(away)
    if kind is Kind.PYXIS:
        model = next(each for each in hosts if each.installed(Kind.PYXIS))
        return f"install Pyxis and Enroot there, as on {model.host}"
    if host.slurm != slurm_version(hosts) and not own:
        return f"bring its Slurm ({host.slurm or 'missing'}) to the version that others have: {slurm_version(hosts)}"
    return ENABLE if own else INSTALL


def _judge_needs(host: HostFacts, kind: Kind | None) -> Iterator[Finding]:
    """What a container is made with, on a node."""
    if kind is Kind.PYXIS:
        yield from _judge_enroot(host)
    elif kind is Kind.OURS and "overlay" not in host.has:
        yield Finding(host.host, "its kernel has no overlay file system", "`modprobe overlay`")
    elif kind is Kind.OURS and not host.has & {"squashfs", "squashfuse", "unsquashfs"}:
        what = "images cannot be opened: neither squashfs in the kernel, nor squashfuse, nor unsquashfs"
        yield Finding(host.host, what, "install squashfs-tools")


def _judge_enroot(host: HostFacts) -> Iterator[Finding]:
    if host.enroot is None:
        yield Finding(host.host, "Pyxis is registered, but Enroot, which it needs, is not installed", "install Enroot")
        return
    if "namespaces" not in host.has:
        yield Finding(
            host.host,
            "users may make no namespaces, so Enroot starts nothing",
            "`sysctl user.max_user_namespaces=65536`",
        )
    if "unsquashfs" not in host.has:
        yield Finding(host.host, "Enroot cannot unpack images: there is no unsquashfs", "install squashfs-tools")
    for each in host.closed:
        what = f"users cannot write to ENROOT_{each.name}_PATH: {each.there} is closed to them"
        yield Finding(host.host, what, f"`mkdir -p {each.common}` and `chmod 1777 {each.common}`")
