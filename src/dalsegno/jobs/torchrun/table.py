"""torchrun's flags as data (torch 2.1 to 2.15, torch/distributed/run.py), so that a test can hold them to torch's own.

Each but a few also reads a variable: PET_ and its name in capitals. Left out is `--print-completion`, for shells only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """One flag. Both spellings are known: `--log-dir` and `--log_dir`. A `switch` takes no value."""

    name: str  # its longest spelling, with dashes
    default: object = None
    type: Callable[[str], object] = str
    short: str = ""
    switch: bool = False
    choices: tuple[str, ...] = ()
    pet: bool = True  # reads PET_…
    also: str = ""  # a further variable, of lower rank

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        underscored = f"--{self.dest}"
        return tuple(dict.fromkeys(each for each in (self.short, self.name, underscored) if each))

    @property
    def variables(self) -> tuple[str, ...]:
        pet = (f"PET_{self.dest.upper()}",) if self.pet else ()
        return (*pet, self.also) if self.also else pet


def comma_list(text: str) -> list[str]:
    """Words with commas between them; a doubled comma is one inside a word."""
    return [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")]


FLAGS = (
    Flag("--nnodes", "1:1"),
    Flag("--nproc-per-node", "1"),
    Flag("--rdzv-backend", "static"),
    Flag("--rdzv-endpoint", ""),
    Flag("--rdzv-id", "none"),
    Flag("--rdzv-conf", ""),
    Flag("--standalone", False, switch=True),
    Flag("--max-restarts", 0, int),
    Flag("--monitor-interval", 0.1, float),
    Flag("--start-method", "spawn", choices=("spawn", "fork", "forkserver")),
    Flag("--event-log-handler", "null"),
    Flag("--role", "default"),
    Flag("--module", False, short="-m", switch=True),
    Flag("--no-python", False, switch=True),
    Flag("--run-path", False, switch=True),
    Flag("--log-dir"),
    Flag("--redirects", "0", short="-r"),
    Flag("--tee", "0", short="-t"),
    Flag("--log-line-prefix-template", "", also="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    Flag("--local-ranks-filter", ""),
    Flag("--duplicate-stdout-filters", (), comma_list),
    Flag("--duplicate-stderr-filters", (), comma_list),
    Flag("--node-rank", 0, int),
    Flag("--master-addr", "127.0.0.1"),
    Flag("--master-port", None, int),
    Flag("--local-addr"),
    Flag("--logs-specs", pet=False),
    Flag("--numa-binding", choices=("node", "socket", "exclusive", "core-complex"), pet=False),
    Flag("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    Flag("--shutdown-timeout", None, int, also="TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    Flag("--virtual-local-rank", False, switch=True),
)
