"""The daemons of the head, the login nodes and the compute nodes, with the distribution's paths and users. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dalsegno.setup.node_plan import HostParts, PlannedCommand, PlannedFolder, PlannedService
from dalsegno.slurm.versions import NOBODY_UID, Version, rest_api, user_word
from dalsegno.spec.facts import Cluster
from dalsegno.system.children import MARK
from dalsegno.system.hosts import revision
from dalsegno.targets.accounting import mariadbd_options
from dalsegno.targets.folder import LOGS
from dalsegno.targets.ssh.folder import SshFolder

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AGENTS_PORT, OBSERVER_PORT = 6820, 6821
HEAD_PORTS = (6817, 6819, AGENTS_PORT, OBSERVER_PORT)  # ports of slurmctld, slurmdbd, the controller and the observer
NODE_PORTS = (6818,)  # port of slurmd
MUNGE_ANSWERS = ("/bin/sh", "-c", "munge -n | unmunge")
SLURMCTLD_ANSWERS = ("/bin/sh", "-c", "scontrol ping | grep -q 'is UP'")
SLURMDBD_ANSWERS = ("sacctmgr", "-n", "list", "cluster")


@dataclass(frozen=True)
class ServiceSite:
    """The values that the services of one host depend on. `code` is the folder of our code there. `structure` is a hash
    of the Slurm settings whose change needs a restart."""

    cluster: Cluster
    folder: SshFolder  # the cluster's folder on the head
    head_address: str
    python: str
    code: str
    structure: str
    key_digest: str


def munge(site: ServiceSite) -> PlannedService:
    user = ("/usr/bin/setpriv", "--reuid=munge", "--regid=munge", "--init-groups")
    return _system("munge", (*user, "/usr/sbin/munged", "--foreground"), "munge", MUNGE_ANSWERS, [site.key_digest])


def head_services(site: ServiceSite, dbd_conf: str) -> list[PlannedService]:
    """Return the services of the head, in the order in which they start."""
    cluster, folder = site.cluster, site.folder
    database = [_mariadb(site), _slurmdbd(site, dbd_conf)] if cluster.slurm.accounting else []
    slurmctld = _system("slurmctld", ("/usr/sbin/slurmctld", "-D"), "slurmctld", SLURMCTLD_ANSWERS, [site.structure])
    agents = f"{site.head_address}:{AGENTS_PORT}"
    answers = ("/usr/bin/test", "-S", str(folder.controller_socket))
    controller = _own(site, "controller", [str(folder.root), "--agents", agents], ready=answers)
    observer = [_own(site, "observer", _observer_arguments(site))] if cluster.monitoring.enabled else []
    return [munge(site), *database, slurmctld, controller, *observer]


def rest_parts(site: ServiceSite, slurm: Version, package: str, *, systemd: bool) -> HostParts:
    """Return the parts for slurmrestd, which runs as `nobody`, who can read everything in Slurm and change nothing.

    Its socket accepts only root and `nobody`. The package's own unit is disabled: it would start a second slurmrestd at
    the next boot, on our controller's port.
    """
    socket = site.folder.run / "rest/slurmrestd.sock"
    # slurmrestd exits if it loads the API that needs slurmdbd, and there is no accounting.
    api = () if site.cluster.slurm.accounting else ("-s", rest_api(slurm))
    user = ("-u", user_word("nobody", slurm), "-g", str(NOBODY_UID))
    argv = ("/usr/sbin/slurmrestd", *user, *api, "-a", "rest_auth/local", f"unix:{socket}")
    disable = PlannedCommand(
        "disabling the unit of slurmrestd's package",
        ("systemctl", "disable", "--quiet", "slurmrestd.service"),
        unless=("/bin/sh", "-c", "! systemctl is-enabled --quiet slurmrestd.service"),
    )
    return HostParts(
        (package,),
        (PlannedFolder(str(socket.parent), 0o755, "nobody", "nogroup" if package == "slurmrestd" else "nobody"),),
        commands=(disable,) if systemd else (),
        services=(_system("slurmrestd", argv, "", ("/usr/bin/test", "-S", str(socket)), [site.structure], keep=True),),
    )


def _observer_arguments(site: ServiceSite) -> list[str]:
    monitoring = site.cluster.monitoring
    arguments = [str(site.folder.root), "--listen", f"{site.head_address}:{OBSERVER_PORT}"]
    arguments += ["--compat", monitoring.compat, "--interval", str(monitoring.interval_s)]
    return [*arguments, *(["--open-metrics"] if monitoring.open_metrics else [])]


def compute_services(site: ServiceSite, node: str, secret_digest: str) -> list[PlannedService]:
    """Return the services of a compute node. If health checks are off, there is no node agent."""
    slurmd = _system("slurmd", ("/usr/sbin/slurmd", "-D"), "slurmd", (), [site.structure])
    if site.cluster.health.mode == "off":
        return [munge(site), slurmd]
    secret, boot = str(site.folder.agent_secret(node)), "/proc/sys/kernel/random/boot_id"
    controller = f"{site.head_address}:{AGENTS_PORT}"
    arguments = ["--node", node, "--controller", controller, "--secret", secret, "--boot-id", boot]
    if site.cluster.monitoring.prometheus:
        arguments += ["--metrics", str(site.folder.node_metrics)]
    return [munge(site), slurmd, _own(site, "node-agent", arguments, depends=[secret_digest])]


def _mariadb(site: ServiceSite) -> PlannedService:
    """Return the service of the cluster's own database server. The server runs as user slurm, and only that user can
    reach its socket."""
    folder = site.folder
    argv = ("/usr/sbin/mariadbd", *mariadbd_options("slurm", folder.database, folder.root / "database.sql"))
    ready = ("mariadb-admin", "--no-defaults", f"--socket={folder.database_socket}", "ping")
    return _system("mariadb", argv, "", ready, [], keep=True)


def _slurmdbd(site: ServiceSite, conf: str) -> PlannedService:
    env = {"MYSQL_UNIX_PORT": str(site.folder.database_socket)}
    return _system("slurmdbd", ("/usr/sbin/slurmdbd", "-D"), "slurmdbd", SLURMDBD_ANSWERS, [conf], env)


def head_commands(site: ServiceSite) -> list[PlannedCommand]:
    """Return the commands that set up accounting once: create the database, and register the cluster's name in it."""
    if not site.cluster.slurm.accounting:
        return []
    data, name = str(site.folder.database / "data"), site.cluster.name
    install = (
        "mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=slurm", "--skip-test-db",
        "--auth-root-authentication-method=normal",
    )  # fmt: skip
    known = f"sacctmgr -n list cluster {name} format=cluster | grep -q ."
    return [
        PlannedCommand("creating the accounting database", install, creates=f"{data}/mysql"),
        PlannedCommand(
            "registering the cluster with slurmdbd",
            ("sacctmgr", "-i", "add", "cluster", name),
            unless=("/bin/sh", "-c", known),
            after="slurmdbd",
        ),
    ]


def _system(
    name: str,
    argv: Sequence[str],
    unit: str,
    ready: Sequence[str],
    depends: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    keep: bool = False,
) -> PlannedService:
    full = {"PATH": PATH, "LC_ALL": "C.UTF-8", **(env or {})}
    stamp = revision(tuple(argv), sorted(full.items()), *depends)
    log = f"{LOGS}/{name}.log"
    return PlannedService(name, tuple(argv), log, full, stamp, f"{unit}.service" if unit else "", tuple(ready), keep)


def own_env(folder: SshFolder) -> dict[str, str]:
    """Return the environment of our own daemons."""
    return {"PATH": PATH, "LC_ALL": "C.UTF-8", MARK: str(folder.root), "SLURM_CONF": str(folder.slurm_conf)}


def _own(
    site: ServiceSite, name: str, arguments: Sequence[str], ready: Sequence[str] = (), depends: Sequence[str] = ()
) -> PlannedService:
    argv = (site.python, "-I", f"{site.code}/dalsegno/programs.py", name, *arguments)
    env = own_env(site.folder)
    stamp = revision(argv, sorted(env.items()), *depends)
    return PlannedService(name, argv, f"{LOGS}/{name}.log", env, stamp, "", tuple(ready), keep=True)
