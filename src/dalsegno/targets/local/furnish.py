"""Folders, devices, keys and files of a local cluster, put in place before anything starts."""

from __future__ import annotations

import os
import secrets

from dalsegno.slurm.versions import NOBODY_UID
from dalsegno.system.files import make_folder, write_atomic
from dalsegno.targets.local.breaking.hardware import tell
from dalsegno.targets.local.desired import File
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import LOOPBACK
from dalsegno.targets.local.plan import LocalPlan
from dalsegno.targets.local.rebuilding import draw_secret


def make_folders(folder: Folder, plan: LocalPlan) -> None:
    """Every folder a daemon expects to find."""
    for path in (folder.root, folder.etc, folder.run, folder.pids, folder.bin, folder.devices, folder.homes):
        make_folder(path)
    make_folder(folder.secret, 0o700)
    make_folder(folder.slurmctld_state, 0o700)
    make_folder(folder.run / "rest")
    if os.geteuid() == 0:
        os.chown(folder.run / "rest", NOBODY_UID, -1)  # slurmrestd, as nobody, makes its socket there
    for host in plan.desired.hosts:
        make_folder(folder.host(host) / "pid")
    for node in plan.cluster.nodes:
        make_folder(folder.spool(node.name))
    if plan.cluster.containers.enabled:
        for path in (folder.unpacked, *(folder.host(node.name) / "containers" for node in plan.cluster.nodes)):
            make_folder(path)


def make_devices(folder: Folder, plan: LocalPlan) -> None:
    """A file for each simulated GPU, from whose number Slurm makes CUDA_VISIBLE_DEVICES."""
    if not plan.placement.gpus_simulated:
        return
    for index in range(max((node.gpus for node in plan.cluster.nodes), default=0)):
        device = folder.devices / f"nvidia{index}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")  # Slurm wants a character device, and this one needs no rights to make


def make_key(folder: Folder) -> None:
    if not folder.munge_key.exists():
        write_atomic(folder.munge_key, secrets.token_hex(64), 0o600)


def make_secrets(folder: Folder, plan: LocalPlan) -> None:
    """By which nodes' agents are known; and, on loopback ports, which boot of a node this is: hosts say so of
    themselves."""
    for node in plan.cluster.nodes:
        if not folder.agent_secret(node.name).exists():
            draw_secret(folder, node.name)
        if plan.placement.hosts == LOOPBACK and not folder.boot_id(node.name).exists():
            write_atomic(folder.boot_id(node.name), secrets.token_hex(8), durable=False)


def make_identity(folder: Folder) -> None:
    if not folder.identity.exists():
        write_atomic(folder.identity, secrets.token_hex(8))


def make_homes(folder: Folder, plan: LocalPlan) -> None:
    """Home folders of the users that exist only inside the cluster."""
    for name, uid in plan.placement.uids.items():
        home = folder.homes / name
        if not home.exists():
            make_folder(home)
            os.chown(home, uid, uid)


def write_files(folder: Folder, plan: LocalPlan) -> None:
    for name in plan.write:
        write_file(folder, name, plan.desired.files[name])
    for node in plan.cluster.nodes:
        if f"hosts/{node.name}/telemetry.json" in plan.write and folder.machine(node.name).exists():
            tell(folder, node, plan.placement.gpus_simulated)  # another machine, with GPUs of its own


def write_file(folder: Folder, name: str, file: File) -> None:
    path = folder.root / name
    make_folder(path.parent)
    write_atomic(path, file.text, file.mode)
