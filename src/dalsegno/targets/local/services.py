"""The daemons of a local cluster: how each is started, and on what its restart depends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dalsegno import __version__
from dalsegno.health.telemetry import VARIABLE as TELEMETRY
from dalsegno.programs import launcher
from dalsegno.slurm import versions
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster
from dalsegno.system.children import MARK
from dalsegno.system.hosts import Service, revision
from dalsegno.system.machine import Machine, program
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import AGENTS, AGENTS_PORT, ROOM, Placement

BOOT_ID = "DALSEGNO_BOOT_ID"  # the file that holds it
# A slurmctld that was killed before it first saved the usage of associations must be told that this is all right.
START = 'test -e "$0/clustername" && ! test -e "$0/assoc_usage" && set -- "$@" -i; exec "$@"'
NODE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def slurm_env(folder: Folder) -> dict[str, str]:
    """What a shell needs to speak to this cluster, beside its own environment."""
    return {"SLURM_CONF": str(folder.slurm_conf)}


def daemon_env(folder: Folder) -> dict[str, str]:
    return {"PATH": f"{folder.bin}:{NODE_PATH}", "LC_ALL": "C.UTF-8", MARK: str(folder.root), **slurm_env(folder)}


def node_env(folder: Folder, node: str) -> dict[str, str]:
    """What tells a node's own services of the node: files that say what its hardware tells, and which boot it is."""
    return {TELEMETRY: str(folder.telemetry(node)), BOOT_ID: str(folder.boot_id(node))}


class Services:
    """Makes service definitions; `structure` names all that a running Slurm daemon cannot take up by `reconfigure`."""

    def __init__(
        self, cluster: Cluster, folder: Folder, placement: Placement, machine: Machine, structure: str
    ) -> None:
        self.cluster, self.folder, self.machine, self.structure = cluster, folder, machine, structure
        self.door = f"{placement.addresses[cluster.head]}:{placement.ports.get(AGENTS, AGENTS_PORT)}"  # for node agents

    def head(self) -> list[Service]:
        """In the order in which they need each other."""
        database = [self.mariadbd(), self.slurmdbd()] if self.cluster.slurm.accounting else []
        return [self.munged(), *database, self.slurmctld(self.cluster.head), self.controller()]

    def compute(self, node: str, host: str) -> list[Service]:
        """Of a node. An agent is of no use where nobody cares for what it finds."""
        watched = self.cluster.health.mode != "off"
        return [self.slurmd(node, host), *([self.node_agent(node, host)] if watched else [])]

    def munged(self) -> Service:
        run, secret = self.folder.run, self.folder.secret
        # --force: munged refuses folders that others may not enter, such as a home of mode 0750; only the socket's
        # own folder matters, and that one is ours.
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
        """Reached only through a socket in a 0700 folder: no network, hence no passwords to keep."""
        secret = self.folder.secret
        return self._service(
            "mariadbd",
            [
                "--no-defaults", f"--user={self.machine.user}", f"--datadir={self.folder.database}",
                f"--socket={self.folder.database_socket}", f"--pid-file={secret / 'db.pid'}",
                f"--init-file={self.folder.etc / 'database.sql'}", f"--tmpdir={secret}",
                "--skip-networking", "--skip-grant-tables", "--skip-log-bin", "--performance-schema=OFF",
                "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=64M", "--innodb-lock-wait-timeout=900",
                "--innodb-flush-log-at-trx-commit=2", "--max-allowed-packet=16M",
            ],
        )  # fmt: skip

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
        """It keeps the coordinators of runs. They outlive it, so it may be killed and started at any time."""
        arguments = [str(self.folder.root), "--agents", self.door]
        return self._own("controller", arguments, daemon_env(self.folder), self.cluster.head)

    def machine_room(self) -> Service:
        """Outside the hosts: it boots and replaces them. It may be killed and started at any time."""
        return self._own("machine-room", [str(self.folder.root)], {**daemon_env(self.folder), "PATH": NODE_PATH}, ROOM)

    def node_agent(self, node: str, host: str) -> Service:
        """It tells the controller how the node is. Its boot id and secret are in files: they change, this does not."""
        boot, secret = str(self.folder.boot_id(node)), str(self.folder.agent_secret(node))
        arguments = ["--node", node, "--controller", self.door, "--secret", secret, "--boot-id", boot]
        env = {**daemon_env(self.folder), **node_env(self.folder, node)}
        service = self._own("node-agent", arguments, env, node)
        return service if node == host else replace(service, name=f"node-agent:{node}")

    def slurmrestd(self, host: str) -> Service:
        """It refuses to run as root or as SlurmUser: as root it becomes `nobody`, and asks Slurm with nobody's rights,
        which see all and change nothing. Its socket (rest_auth/local) takes callers that are root or itself."""
        nobody = versions.user_word("nobody", self._slurm)
        as_root = ["-u", nobody, "-g", str(versions.NOBODY_UID)] if self.machine.is_root else []
        # Without accounting the part of the API that needs slurmdbd ends slurmrestd.
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
        """A service of ours: another version of us restarts it, and its host does should it die."""
        argv = (*launcher(), name, *arguments)
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
