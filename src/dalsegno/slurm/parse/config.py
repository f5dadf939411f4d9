"""`scontrol show config`: the settings slurmctld runs with."""

from __future__ import annotations

import re

from dalsegno.slurm.parse.text import malformed

CONFIG_ARGV = ("scontrol", "show", "config")

_SETTING = re.compile(r"^([\w\[\]/]+)\s*= ?(.*)$")


def parse_config(text: str) -> dict[str, str]:
    """Settings by name. `(null)` stays as Slurm wrote it."""
    if not text.startswith("Configuration data as of"):
        raise malformed("scontrol show config", text)
    found = (_SETTING.match(line) for line in text.splitlines()[1:])
    settings: dict[str, str] = {}
    for match in found:
        if match:
            settings.setdefault(match[1], match[2].strip())
    return settings
