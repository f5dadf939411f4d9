"""Folders, devices, keys and files of a local cluster, put in place before anything starts."""

from __future__ import annotations

import os
import secrets

from dalsegno.system.files import make_folder, write_atomic, write_in_place
from dalsegno.targets.local.desired import File
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.people import new_users
from dalsegno.targets.local.plan import LocalPlan


def make_folders(folder: Folder, plan: LocalPlan) -> None:
    """Every folder a daemon expects to find."""
    for path in (folder.root, folder.etc, folder.run, folder.pids, folder.bin, folder.devices, folder.homes):
        make_folder(path)
    make_folder(folder.secret, 0o700)
    make_folder(folder.slurmctld_state, 0o700)
    make_folder(folder.run / "rest", 0o777 if os.geteuid() == 0 else 0o755)
    for host in plan.desired.hosts:
        make_folder(folder.host(host) / "pid")
    for node in plan.cluster.nodes:
        make_folder(folder.host(node.name) / "spool")


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


def make_homes(folder: Folder, plan: LocalPlan, machine_passwd: str) -> None:
    """Home folders of the users that exist only inside the cluster."""
    for user, uid in new_users(machine_passwd, plan.cluster.users):
        home = folder.homes / user.name
        if os.geteuid() == 0 and not home.exists():
            make_folder(home)
            os.chown(home, uid, uid)


def write_files(folder: Folder, plan: LocalPlan) -> None:
    for name in plan.write:
        write_file(folder, name, plan.desired.files[name])


def write_file(folder: Folder, name: str, file: File) -> None:
    path = folder.root / name
    make_folder(path.parent)
    (write_in_place if file.in_place else write_atomic)(path, file.text, file.mode)
