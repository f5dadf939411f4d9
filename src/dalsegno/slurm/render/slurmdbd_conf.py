"""slurmdbd.conf: the accounting daemon. Write it 0600 and owned by SlurmUser, or slurmdbd refuses it."""

from __future__ import annotations

from dalsegno.errors import DalsegnoError
from dalsegno.slurm.layout import Dbd, Layout, Storage
from dalsegno.slurm.render.lines import Settings, header, lines
from dalsegno.slurm.version import Version
from dalsegno.spec.facts import Cluster


def render_slurmdbd_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    if layout.dbd is None:
        raise DalsegnoError(
            f"cluster {cluster.name} has no place for slurmdbd",
            hint="`slurm: {accounting: false}` does without; with accounting the target must say where it runs",
        )
    settings = {**_daemon(layout, layout.dbd), **_storage(layout.dbd.storage)}
    return header("slurmdbd.conf", cluster.name, layout.spec) + lines(settings)


def _daemon(layout: Layout, dbd: Dbd) -> Settings:
    socket = layout.paths.munge_socket
    return {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={socket}" if socket else "",
        "DbdHost": dbd.host.name,
        "DbdAddr": dbd.host.address,
        "DbdPort": str(dbd.port),
        "SlurmUser": layout.slurm_user,
        "LogFile": layout.paths.slurmdbd_log,
        "PidFile": layout.paths.slurmdbd_pid,
    }


def _storage(storage: Storage) -> Settings:
    """slurmdbd.conf has no setting for a socket: `localhost` means "through a socket", MYSQL_UNIX_PORT says which."""
    where = {"StorageHost": "localhost"} if storage.socket else _over_tcp(storage)
    return {
        "StorageType": "accounting_storage/mysql",
        **where,
        "StorageUser": storage.user,
        "StoragePass": storage.password,
        "StorageLoc": storage.database,
    }


def _over_tcp(storage: Storage) -> Settings:
    return {"StorageHost": storage.host, "StoragePort": str(storage.port)}
