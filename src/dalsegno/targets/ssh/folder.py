"""The state folders of a cluster on ssh hosts: one on the operator's machine, and one on the head."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.observe.monitor_layout import USER
from dalsegno.setup.inspect import HostFacts
from dalsegno.spec.facts import SshAccess, facts_from_json, facts_to_json
from dalsegno.system.files import damaged, make_folder, read_json, read_text, write_atomic
from dalsegno.system.passwords import draw_web_login
from dalsegno.system.ssh import make_key_pair
from dalsegno.targets.folder import ClusterFolder, ClusterRole, read_facts
from dalsegno.targets.ssh.people import AssignedIds

HEAD_HOME = Path("/var/lib/dalsegno")


@dataclass(frozen=True)
class SshFolder(ClusterFolder):
    """The paths of a cluster on ssh hosts, on the operator's machine and on the head."""

    def agent_secret(self, node: str) -> Path:
        return self.secret / "agents" / node

    @property
    def repair_key(self) -> Path:
        """The SSH key with which the head resets and reboots nodes."""
        return self.secret / "repair-key"

    @property
    def power(self) -> Path:
        """The file with the commands that switch nodes off and on. The file is on the head, and may contain a
        password."""
        return self.secret / "power.json"

    @property
    def metrics_token(self) -> Path:
        return self.secret / "metrics-token"

    @property
    def seen(self) -> Path:
        """The file with the last known facts of each host.

        slurm.conf is rendered from these facts for a host that does not answer, so that the host stays in Slurm.
        """
        return self.root / "hosts.json"

    @property
    def monitor(self) -> Path:
        """The folder for the settings of Prometheus and Alertmanager on the head, and of node_exporter on the head and
        on every node."""
        return self.root / "monitor"

    @property
    def node_metrics(self) -> Path:
        """The folder where a compute node's agent writes metrics, which node_exporter serves."""
        return self.root / "metrics"

    @property
    def ids(self) -> Path:
        """The file with the uids and gids of users and groups, including removed ones."""
        return self.root / "ids.json"

    @property
    def database(self) -> Path:
        return self.root / "db"

    @property
    def database_socket(self) -> Path:
        return self.database / "db.sock"


def head_folder(cluster: str) -> SshFolder:
    """Return the cluster's state folder on its head."""
    return SshFolder(HEAD_HOME / "clusters" / cluster)


class SshStage(Enum):
    """The stage that the last `up` or `down` reached."""

    MAKING = "making"
    UP = "up"
    REMOVING = "removing"


@dataclass(frozen=True)
class SshState:
    """The content of the state file. `ssh` has all machines on which the cluster may have left something. `failed` has
    those that the last `up` could not complete, and `skipped` those that it did not get to."""

    phase: SshStage
    cluster_id: str
    head: str
    ssh: SshAccess = field(default_factory=SshAccess)
    failed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    slurm_version: str = ""
    role: ClusterRole = ClusterRole.OPERATOR
    operator: str = ""  # user and machine that created the cluster
    new_key: bool = False  # whether munge's key must be replaced, because a host that has left still knows it
    target: str = "ssh"


def read_ssh_state(folder: ClusterFolder) -> SshState | None:
    return read_facts(SshState, folder.state)


def write_ssh_state(folder: ClusterFolder, state: SshState) -> None:
    make_folder(folder.root)
    write_atomic(folder.state, state_text(state))


def state_text(state: SshState) -> str:
    return json.dumps(facts_to_json(state), indent=1)


@dataclass(frozen=True)
class ClusterSecrets:
    """The secrets that only the cluster's machines may know."""

    munge_key: str
    metrics_token: str
    agents: Mapping[str, str] = field(default_factory=dict)  # node -> the secret of its agent
    # The passwords of Prometheus and the exporters, and the web configurations with which these programs check them.
    # All four are empty if there is no Prometheus.
    monitor_password: str = ""
    monitor_web: str = ""
    exporter_password: str = ""
    exporter_web: str = ""
    repair_key: str = ""  # the private SSH key with which the head orders repairs on nodes
    repair_public: str = ""

    def __repr__(self) -> str:
        return "ClusterSecrets(…)"


def read_secrets(
    folder: SshFolder, nodes: Iterable[str], *, prometheus: bool = False, new_key: bool = False
) -> ClusterSecrets:
    """Return the secrets in the folder. For missing ones, return new values, which are not written yet. With `new_key`,
    the key of munge is new too."""
    monitor = _web_login(folder, "monitor") if prometheus else ("", "")
    exporter = _web_login(folder, "exporter") if prometheus else ("", "")

    def kept(path: Path, size: int) -> str:
        return (read_text(path) or "").strip() or secrets.token_hex(size)

    return ClusterSecrets(
        secrets.token_hex(64) if new_key else kept(folder.munge_key, 64),
        kept(folder.metrics_token, 32),
        {node: kept(folder.agent_secret(node), 32) for node in nodes},
        *monitor,
        *exporter,
        *_repair_key(folder),
    )


def _repair_key(folder: SshFolder) -> tuple[str, str]:
    private, public = read_text(folder.repair_key) or "", read_text(folder.repair_key.with_suffix(".pub")) or ""
    return (private, public.strip()) if private and public else make_key_pair(f"dalsegno-{folder.name}")


def _web_login(folder: SshFolder, name: str) -> tuple[str, str]:
    """Return the password of a monitoring program, and the web configuration with its hash. An existing hash is reused:
    a new one would differ, even for the same password, and cause a restart."""
    password, web = (read_text(folder.secret / f"{name}-{part}") or "" for part in ("password", "web.yml"))
    if password and web:
        return password, web
    return draw_web_login(USER)


def write_secrets(folder: SshFolder, held: ClusterSecrets) -> None:
    """Write the secrets. Delete those of nodes that have left, so that a new machine with the same name gets a new
    secret."""
    make_folder(folder.secret, 0o700)
    make_folder(folder.secret / "agents", 0o700)
    write_atomic(folder.munge_key, held.munge_key, 0o600)
    write_atomic(folder.metrics_token, held.metrics_token, 0o600)
    write_atomic(folder.repair_key, held.repair_key, 0o600)
    write_atomic(folder.repair_key.with_suffix(".pub"), f"{held.repair_public}\n", 0o600)
    if held.monitor_password:
        write_atomic(folder.secret / "monitor-password", held.monitor_password, 0o600)
        write_atomic(folder.secret / "monitor-web.yml", held.monitor_web, 0o600)
        write_atomic(folder.secret / "exporter-password", held.exporter_password, 0o600)
        write_atomic(folder.secret / "exporter-web.yml", held.exporter_web, 0o600)
    for node, secret in held.agents.items():
        write_atomic(folder.agent_secret(node), secret, 0o600)
    for path in (folder.secret / "agents").iterdir():
        if path.name not in held.agents:
            path.unlink()


@dataclass(frozen=True)
class PowerCommands:
    """The commands that switch each node off and on."""

    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_ids(folder: SshFolder) -> AssignedIds:
    return read_facts(AssignedIds, folder.ids) or AssignedIds()


def write_ids(folder: SshFolder, ids: AssignedIds) -> None:
    write_atomic(folder.ids, json.dumps(facts_to_json(ids), indent=1))


def read_seen(folder: SshFolder) -> dict[str, HostFacts]:
    """Return the last known facts of each host."""
    value = read_json(folder.seen)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise damaged(folder.seen, "not a JSON object")
    found = {}
    for name, facts in value.items():
        try:
            found[name] = facts_from_json(HostFacts, facts)  # type: ignore[arg-type]  # checked by the function
        except (DalsegnoError, TypeError, AttributeError):
            continue  # another version of Dal Segno wrote it; the host is asked again anyway
    return found


def write_seen(folder: SshFolder, seen: Mapping[str, HostFacts]) -> None:
    write_atomic(folder.seen, json.dumps({name: facts_to_json(facts) for name, facts in seen.items()}, indent=1))
