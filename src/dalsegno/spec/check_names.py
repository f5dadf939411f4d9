"""The health checks that a cluster file may name, and their thresholds. The room `health` keeps this true by a test."""

from __future__ import annotations

from collections.abc import Mapping

CHECK_THRESHOLDS: Mapping[str, tuple[str, ...]] = {
    "xid": ("window_s", "repeats"),
    "gpu-count": (),
    "gpu-ecc": ("corrected",),
    "gpu-rows": ("rows",),
    "gpu-temperature": ("margin_c", "least_c"),
    "gpu-heating": ("within_min", "near_c", "window_s", "least_s"),
    "gpu-clocks": ("least_share",),
    "gpu-leftovers": ("used_mib",),
    "nvlink": ("errors",),
    "pcie-width": ("lanes",),
    "fabric-manager": (),
    "dcgm": (),
    "fabric-ports": ("count",),
    "fabric-flaps": ("most", "window_s", "after_boot_s"),
    "fabric-errors": ("most",),
    "network": ("percent", "least", "window_s"),
    "kernel-log": ("window_s",),
    "oom": ("window_s",),
    "disk": ("warn_percent", "fail_percent"),
    "inodes": ("fail_percent",),
    "memory": ("warn_share", "fail_share"),
    "stuck": ("older_than_s",),
    "zombies": ("older_than_s",),
    "clock": ("warn_s", "fail_s"),
    "nvme": (),
    "slurmd": (),
    "munge": (),
    "file-systems": (),
    "containers": (),
    "host-names": (),
}
