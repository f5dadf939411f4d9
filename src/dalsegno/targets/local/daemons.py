"""Define the services of a local cluster, start them, and wait until they answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dalsegno import __version__
from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.health.telemetry import VARIABLE as TELEMETRY
from dalsegno.log import LEVEL
from dalsegno.programs import launcher
from dalsegno.slurm import versions
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster
from dalsegno.system.children import MARK
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.hosts import HostPlan, Service, host_process, reload, revision, service_facts, write_plan
from dalsegno.system.machine import MachineFacts, program
from dalsegno.system.processes import Runner
from dalsegno.targets.accounting import mariadbd_options
from dalsegno.targets.local.directory import directory_files, slapd_command
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.monitoring import monitor_services
from dalsegno.targets.local.placement import AGENTS, AGENTS_PORT, LOOPBACK, OBSERVER, OBSERVER_PORT, ROOM, Placement
from dalsegno.wire.cloud_notice import CLOUD_FILE

BOOT_ID = "DALSEGNO_BOOT_ID"  # environment variable with the path of the boot id's file
# slurmctld gets `-i` if it was killed before it first saved the usage of associations. Without `-i` it would not start.
START = 'test -e "$0/clustername" && ! test -e "$0/assoc_usage" && set -- "$@" -i; exec "$@"'
NODE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def slurm_env(folder: Folder) -> dict[str, str]:
    """Return the variables that Slurm's commands need to reach this cluster."""
    return {"SLURM_CONF": str(folder.slurm_conf)}


def daemon_env(folder: Folder) -> dict[str, str]:
    return {"PATH": f"{folder.bin}:{NODE_PATH}", "LC_ALL": "C.UTF-8", MARK: str(folder.root), **slurm_env(folder)}


def node_env(folder: Folder, node: str) -> dict[str, str]:
    """Return the variables of a node's own services: the paths of its telemetry and of its boot id."""
    return {TELEMETRY: str(folder.telemetry(node)), BOOT_ID: str(folder.boot_id(node))}


class Services:
    """Defines the services of each host. `structure` is a hash of all settings whose change needs a restart of Slurm's
    daemons."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Folder,
        placement: Placement,
        machine: MachineFacts,
        structure: str,
        log_level: str = "",
    ) -> None:
        self.cluster, self.folder, self.machine, self.structure = cluster, folder, machine, structure
        self.log_env = {LEVEL: log_level} if log_level not in ("", "info") else {}
        self.placement = placement
        head = placement.addresses[cluster.head]
        self.agents_address = f"{head}:{placement.ports.get(AGENTS, AGENTS_PORT)}"
        self.observer_address = f"{head}:{placement.ports.get(OBSERVER, OBSERVER_PORT)}"
        self.monitor = monitor_services(cluster, folder, placement, {**daemon_env(folder), "PATH": NODE_PATH})

    def head(self) -> list[Service]:
        """Return the services of the head in the order in which they start."""
        database = [self.mariadbd(), self.slurmdbd()] if self.cluster.slurm.accounting else []
        observers = [self.observer()] if self.cluster.monitoring.enabled else []
        monitor = [*observers, *(self.monitor.head() if self.monitor else [])]
        directory = [self.slapd()] if self.cluster.directory.ldap else []
        return [self.munged(), *directory, *database, self.slurmctld(self.cluster.head), self.controller(), *monitor]

    def compute(self, node: str, host: str) -> list[Service]:
        """Return the services of a node. If health checks are off, there is no node agent."""
        watched = self.cluster.health.mode != "off"
        monitor = self.monitor.compute(node, host) if self.monitor else []
        cloud = [self.metadata_service(node)] if self.on_cloud else []
        return [self.slurmd(node, host), *cloud, *([self.node_agent(node, host)] if watched else []), *monitor]

    @property
    def on_cloud(self) -> bool:
        """Return whether nodes appear to be on a cloud. This needs virtual hosts, because each has its own network."""
        return self.cluster.local.cloud != "none" and self.placement.hosts != LOOPBACK

    def metadata_service(self, node: str) -> Service:
        env = daemon_env(self.folder)
        return self._own("metadata-service", [str(self.folder.telemetry(node))], env, node)

    def munged(self) -> Service:
        run, secret = self.folder.run, self.folder.secret
        # Without --force, munged refuses a path with a parent folder that others may not enter, such as a home of mode
        # 0750. `--force` is safe here, because only the socket's own folder matters, and the cluster owns it.
        return self._service(
            "munged",
            [
                "--foreground", "--force", "--num-threads=10", f"--socket={self.folder.munge_socket}",
                f"--key-file={self.folder.munge_key}", f"--pid-file={run / 'munged.pid'}",
                f"--seed-file={secret / 'munge.seed'}",
                f"--log-file={self.folder.log(self.cluster.head, 'munge-log')}",
            ],
        )  # fmt: skip

    def mariadbd(self) -> Service:
        """Return the service of the database. Its socket is in a folder that only the cluster's owner can enter."""
        secret = self.folder.secret
        options = mariadbd_options(self.machine.user, secret, self.folder.etc / "database.sql", data="db")
        return self._service("mariadbd", options)

    def slapd(self) -> Service:
        """Return the service of slapd, the server of the LDAP directory. slapd reads its settings only when it
        starts."""
        argv, settings = (
            slapd_command(self.cluster, self.folder, self.placement),
            directory_files(self.cluster, self.folder),
        )
        return self._service("slapd", argv[1:], depends=sorted(settings.values()))

    def slurmdbd(self) -> Service:
        return self._service("slurmdbd", ["-D"], {"MYSQL_UNIX_PORT": str(self.folder.database_socket)})

    def slurmctld(self, host: str) -> Service:
        service = self._service("slurmctld", ["-D"], host=host, depends=[self.structure])
        if not (self.cluster.slurm.accounting and versions.NEEDS_ASSOC_USAGE.holds(self._slurm)):
            return service
        return replace(service, argv=("/bin/sh", "-c", START, str(self.folder.slurmctld_state), *service.argv))

    @property
    def _slurm(self) -> Version:
        return Version.parse(self.machine.slurm_version)

    def controller(self) -> Service:
        """Return the service of the controller. A restart is safe at any time, because the coordinators of runs outlive
        the controller."""
        arguments = [str(self.folder.root), "--agents", self.agents_address]
        return self._own("controller", arguments, daemon_env(self.folder), self.cluster.head)

    def observer(self) -> Service:
        """Return the service of the observer, which serves the metrics and the web page. A restart is safe at any
        time."""
        monitoring = self.cluster.monitoring
        arguments = [str(self.folder.root), "--listen", self.observer_address, "--compat", monitoring.compat]
        arguments += ["--interval", str(monitoring.interval_s)]
        arguments += ["--open-metrics"] if monitoring.open_metrics else []
        return self._own("observer", arguments, daemon_env(self.folder), self.cluster.head)

    def machine_room(self) -> Service:
        """Return the service of the machine room, which runs outside the hosts. A restart is safe at any time."""
        return self._own("machine-room", [str(self.folder.root)], {**daemon_env(self.folder), "PATH": NODE_PATH}, ROOM)

    def node_agent(self, node: str, host: str) -> Service:
        """Return the service of the node agent. The agent reads its boot id and its secret from files, so a new id or
        secret does not change the service."""
        boot, secret = str(self.folder.boot_id(node)), str(self.folder.agent_secret(node))
        arguments = ["--node", node, "--controller", self.agents_address, "--secret", secret, "--boot-id", boot]
        if self.cluster.monitoring.enabled:
            arguments += ["--metrics", str(self.folder.node_metrics(node))]
        if self.on_cloud:
            arguments += ["--cloud", str(self.folder.etc / CLOUD_FILE)]
        env = {**daemon_env(self.folder), **node_env(self.folder, node)}
        service = self._own("node-agent", arguments, env, node)
        return service if node == host else replace(service, name=f"node-agent:{node}")

    def slurmrestd(self, host: str) -> Service:
        """Return the service of slurmrestd, which refuses to run as root.

        So root starts slurmrestd as `nobody`, who can read everything in Slurm and change nothing. In a cluster without
        root, slurmrestd runs as the cluster's owner. Its socket (rest_auth/local) accepts only root and this user.
        """
        nobody = versions.user_word("nobody", self._slurm)
        as_root = ["-u", nobody, "-g", str(versions.NOBODY_UID)] if self.machine.is_root else []
        # slurmrestd exits if it loads the API that needs slurmdbd, and there is no accounting.
        api = [] if self.cluster.slurm.accounting else ["-s", versions.rest_api(self._slurm)]
        socket = f"unix:{self.folder.run / 'rest/slurmrestd.sock'}"
        return self._service("slurmrestd", [*as_root, *api, "-a", "rest_auth/local", socket], host=host)

    def slurmd(self, node: str, log_host: str) -> Service:
        argv = ["-D", "-N", node, "-f", str(self.folder.slurm_conf)]
        name = "slurmd" if node == log_host else f"slurmd:{node}"
        return self._service(
            name,
            argv,
            node_env(self.folder, node),
            host=log_host,
            depends=[self.structure],
            log=self.folder.log(node, "slurmd"),
            binary="slurmd",
        )

    def _own(self, name: str, arguments: Sequence[str], env: dict[str, str], host: str) -> Service:
        """Return a service that is a program of Dal Segno. `up` restarts it after an upgrade, and its host restarts it
        if it dies."""
        argv, env = (*launcher(), name, *arguments), {**env, **self.log_env}
        log = str(self.folder.log(host, name))
        return Service(name, argv, env, log, revision(argv, sorted(env.items()), __version__), keep=True)

    def _service(
        self,
        name: str,
        args: Sequence[str],
        env: dict[str, str] | None = None,
        *,
        host: str = "",
        depends: Sequence[str] = (),
        log: object = None,
        binary: str = "",
    ) -> Service:
        argv = (program(binary or name) or (binary or name), *args)
        full = {**daemon_env(self.folder), **(env or {})}
        path = str(log or self.folder.log(host or self.cluster.head, name))
        return Service(name, argv, full, path, revision(argv, sorted(full.items()), *depends))


START_TIMEOUT_S = 60.0
STARTED_TIMEOUT_S = 5.0  # time limit for the services that nothing else waits for
LOG_LINES = 12


def check_settings(runner: Runner, folder: Folder) -> None:
    """Make Slurm read its files before any daemon starts, so that unknown keys and values are reported as errors of
    `up`."""
    env = {"PATH": NODE_PATH, **slurm_env(folder)}
    done = runner.run(["scontrol", "show", "hostnames", "a"], env=env, timeout_s=30 * slowness())
    if done.exit_code != 0:
        output = "\n".join(f"  {line}" for line in done.stderr.strip().splitlines()[-LOG_LINES:])
        raise TargetError(
            f"slurmctld could not start: Slurm cannot read its settings\n{output}",
            where=str(folder.slurm_conf),
            hint="fix it in the cluster file, most likely below `extra:`, then run `dalsegno up` again",
        )


def start_services(plan: HostPlan, names: Collection[str]) -> None:
    """Make a host start these services, or restart them with new settings. Its other services do not change."""
    services = tuple(replace(service, hold=service.name not in names) for service in plan.services)
    write_plan(replace(plan, services=services))
    reload(Path(plan.dir))


def hold_all(plan: HostPlan) -> HostPlan:
    """Return the plan of a host that boots without starting its services."""
    return replace(plan, services=tuple(replace(service, hold=True) for service in plan.services))


def start_and_wait(
    plan: HostPlan, names: Collection[str], name: str, ready: Callable[[], bool], timeout_s: float | None = None
) -> None:
    """Make a host start these services, and wait until the service `name` answers.

    Raise an error with the end of a log if the service or its host dies meanwhile, or if the service does not answer in
    time.
    """
    asked_at, timeout_s = time.time(), START_TIMEOUT_S * slowness() if timeout_s is None else timeout_s
    start_services(plan, names)
    service = next(service for service in plan.services if service.name == name)
    until = time.monotonic() + timeout_s
    pause_s = 0.005
    while not (_is_current(plan, service) and _answers(ready)):
        raise_if_dead(plan, service, asked_at)
        if time.monotonic() > until:
            raise TargetError(
                f"{name} on {plan.name} does not answer after {timeout_s:.0f} s; the end of its log:\n"
                f"{log_tail(service.log)}",
                where=service.log,
                hint="a loaded machine may need longer: run `dalsegno up` again",
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, 0.1)


def wait_until_started(hosts: Iterable[HostPlan]) -> None:
    """Wait until every service of these hosts runs, so that the status does not report a starting service as a fault.
    After a time limit, return anyway; the status then reports the service."""
    until = time.monotonic() + STARTED_TIMEOUT_S * slowness()
    for host in hosts:
        for service in host.services:
            while not _is_current(host, service) and time.monotonic() < until:
                time.sleep(0.02)


def _answers(ready: Callable[[], bool]) -> bool:
    """Return whether the daemon answers. A failed request counts as no answer: if the daemon never answers, its log is
    reported instead."""
    try:
        return ready()
    except DalsegnoError:
        return False


def _is_current(plan: HostPlan, service: Service) -> bool:
    """Return whether the service runs with its present settings. During a restart, the old process may still answer."""
    fact = service_facts(Path(plan.dir)).get(service.name)
    return fact is not None and fact.running and fact.revision == service.revision


def raise_if_dead(plan: HostPlan, service: Service, since: float) -> None:
    """Raise an error if the host does not run, or if the service died after `since`. An earlier death is not an error,
    because this `up` restarts the service."""
    if host_process(Path(plan.dir)) is None:
        raise TargetError(
            f"host {plan.name} is gone\n{log_tail(plan.log)}", where=plan.log, hint="run `dalsegno up` again"
        )
    fact = service_facts(Path(plan.dir)).get(service.name)
    # A process with older settings was stopped on purpose, so its end is not a fault.
    current = fact is not None and fact.revision == service.revision
    if fact is not None and current and fact.exit_code is not None and fact.ended_at >= since:
        why = fact.error or f"ended with code {fact.exit_code}"
        raise TargetError(
            f"{service.name} on {plan.name} {why}; the end of its log:\n{log_tail(service.log)}",
            where=service.log,
            hint="fix the setting named above in the cluster file, then run `dalsegno up` again",
        )


def log_tail(path: str, lines: int = LOG_LINES) -> str:
    """Return the last lines of a log, indented."""
    try:
        text = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in text[-lines:]) or "  (its log is empty)"


def socket_answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


def port_answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1.0):
            return True
    except OSError:
        return False
