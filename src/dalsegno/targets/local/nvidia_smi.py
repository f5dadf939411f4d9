#!/usr/bin/env python3
"""A stand-in for nvidia-smi on nodes with simulated GPUs. It lists the GPUs in the node's telemetry file."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from typing import Any

Gpu = dict[str, Any]

FIELDS = {
    "index": "index",
    "name": "name",
    "gpu_name": "name",
    "uuid": "uuid",
    "gpu_uuid": "uuid",
    "memory.total": "memory_total_mib",
    "memory.used": "memory_used_mib",
    "temperature.gpu": "temperature_c",
    "utilization.gpu": "utilization_percent",
}
UNITS = {"memory.total": "MiB", "memory.used": "MiB", "utilization.gpu": "%"}


def read_gpus() -> list[Gpu] | None:
    """Return the GPUs of this node; None if this is not a node of the cluster."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        with open(os.path.join(root, "hosts", os.path.basename(node), "telemetry.json")) as file:
            gpus: list[Gpu] = json.load(file)["gpus"]
            return [gpu for gpu in gpus if not gpu.get("lost")]
    except (OSError, ValueError, KeyError):
        return None


def query(gpus: list[Gpu], names: list[str], style: str) -> None:
    unknown = [name for name in names if name not in FIELDS]
    if unknown:
        sys.exit(f'Field "{unknown[0]}" is not a valid field to query (simulated GPUs know: {", ".join(FIELDS)}).')
    units = {} if "nounits" in style else UNITS
    if "noheader" not in style:
        print(", ".join(f"{name} [{units[name]}]" if name in units else name for name in names))
    for gpu in gpus:
        print(", ".join(f"{gpu[FIELDS[name]]} {units.get(name, '')}".strip() for name in names))


def table(gpus: list[Gpu]) -> None:
    print("+-----------------------------------------------------------------------------+")
    print(f"| {'Dal Segno: GPUs of this node are SIMULATED':75} |")
    print("+-----+--------------------------------+-------+----------------------+-------+")
    print("| GPU | Name                           | Temp  | Memory               | Util  |")
    print("+-----+--------------------------------+-------+----------------------+-------+")
    for gpu in gpus:
        memory = f"{gpu['memory_used_mib']}MiB / {gpu['memory_total_mib']}MiB"
        heat, load = f"{gpu['temperature_c']}C", f"{gpu['utilization_percent']}%"
        print(f"| {gpu['index']:>3} | {gpu['name'][:30]:30} | {heat:>5} | {memory:>20} | {load:>5} |")
    print("+-----+--------------------------------+-------+----------------------+-------+")


def main() -> None:
    parser = argparse.ArgumentParser(prog="nvidia-smi", description="Simulated GPUs of a Dal Segno node.")
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("--query-gpu", default="")
    parser.add_argument("--format", default="csv")
    parser.add_argument("-i", "--id", default="")
    args = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `nvidia-smi | head` ends quietly
    gpus = read_gpus()
    if gpus is None:
        sys.exit("nvidia-smi (simulated): this machine is not a compute node; try `srun --gpus=1 nvidia-smi`")
    wanted = args.id.split(",") if args.id else None
    gpus = [gpu for gpu in gpus if wanted is None or str(gpu["index"]) in wanted or gpu["uuid"] in wanted]
    if not gpus:
        sys.exit("No devices were found")
    if args.list_gpus:
        for gpu in gpus:
            print(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")
    elif args.query_gpu:
        query(gpus, [name.strip() for name in args.query_gpu.split(",")], args.format)
    else:
        table(gpus)


if __name__ == "__main__":
    main()
