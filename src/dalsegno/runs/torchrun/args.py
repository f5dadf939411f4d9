"""Parse torchrun's command line, with torchrun's names, defaults and syntax."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.runs.submit.values import NodeCount, parse_nodes, shown

MASTER_PORT = 29_500
_STREAMS = re.compile(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*", re.ASCII)


@dataclass(frozen=True)
class TorchrunArgs:
    """A valid torchrun command line."""

    training_script: str
    training_script_args: tuple[str, ...] = ()
    nnodes: str = "1:1"
    nproc_per_node: str = "1"  # a number, auto, cpu, gpu, xpu, or the name of another accelerator
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_conf: str = ""
    standalone: bool = False
    max_restarts: int = 0
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    event_log_handler: str = "null"
    role: str = "default"
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    log_line_prefix_template: str = ""
    local_ranks_filter: str = ""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    local_addr: str | None = None
    logs_specs: str | None = None
    numa_binding: str | None = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    shutdown_timeout: int | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.module and self.no_python and not self.run_path:
            raise UsageError("`--no-python` and `--module` exclude each other", hint="remove one of them")
        for flag, value in (("--max-restarts", self.max_restarts), ("--shutdown-timeout", self.shutdown_timeout or 0)):
            if value < 0:
                raise UsageError(f"`{value}` is less than 0", where=flag, hint="write 0 for none")
        _ = self.nodes, self.settings, self.shown_ranks
        parse_streams(self.redirects, "--redirects")
        parse_streams(self.tee, "--tee")

    @property
    def nodes(self) -> NodeCount:
        return parse_nodes(self.nnodes)

    @property
    def backend(self) -> str:
        return "c10d" if self.standalone else self.rdzv_backend

    @property
    def endpoint(self) -> str:
        """The rendezvous endpoint. The default for `static` is the master; `--standalone` uses any free port."""
        if self.standalone:
            return "localhost:0"
        if self.rdzv_backend == "static" and not self.rdzv_endpoint:
            return f"{self.master_addr}:{self.master_port or MASTER_PORT}"
        return self.rdzv_endpoint

    @property
    def settings(self) -> dict[str, str]:
        """The settings in `--rdzv-conf` as a mapping."""
        pairs = [pair.partition("=") for pair in self.rdzv_conf.split(",") if pair.strip()]
        if any(not key.strip() or not value.strip() for key, _, value in pairs):
            what = f"{shown(self.rdzv_conf)} is not `key=value,key=value`"
            raise UsageError(what, where="--rdzv-conf", hint="write `join_timeout=600,last_call_timeout=30`")
        return {key.strip(): value.strip() for key, _, value in pairs}

    @property
    def shown_ranks(self) -> tuple[int, ...]:
        """The local ranks whose output is shown; empty for all."""
        words = self.local_ranks_filter.split(",") if self.local_ranks_filter else []
        if not all(word.strip().isdigit() for word in words):
            what = f"{shown(self.local_ranks_filter)} is not a list of local ranks"
            raise UsageError(what, where="--local-ranks-filter", hint="write `0,1`")
        return tuple(int(word) for word in words)


def parse_streams(text: str, where: str = "") -> dict[int | None, int]:
    """Parse `3` or `0:1,1:2` into streams by local rank. The local rank None stands for all ranks.

    The streams are 0 for none, 1 for stdout, 2 for stderr and 3 for both.
    """
    if not _STREAMS.fullmatch(text):
        hint = "write `3`, or `0:1,1:2` by local rank"
        raise UsageError(f"{shown(text)} is not a valid choice of outputs", where=where, hint=hint)
    if ":" not in text:
        return {None: int(text)}
    return {int(rank): int(what) for rank, what in (pair.split(":") for pair in text.split(","))}


def count_processes(nproc_per_node: str, cpus: int, gpus: int) -> int:
    """Return the number of processes for `--nproc-per-node` on a node with this many CPUs and accelerators."""
    if nproc_per_node.isascii() and nproc_per_node.isdigit():
        return int(nproc_per_node)
    known = {"cpu": cpus, "gpu": gpus, "xpu": gpus, "auto": gpus or cpus}
    if not known.get(nproc_per_node):
        hint = "write a number, or `auto`, `cpu`, `gpu`"
        raise UsageError(f"no {shown(nproc_per_node)} found to count", where="--nproc-per-node", hint=hint)
    return known[nproc_per_node]


# Help texts: the meaning of each flag in one line, and how it differs from torchrun's


ABOUT = """\
Run SCRIPT as torchrun does: same flags, same variables for its workers, same exit codes. In a batch
script `srun torchrun …` becomes `srun dalsegno torchrun …`. Options precede SCRIPT, may be
written with `_` for `-`, and most can also be set by a variable: PET_NNODES=2.

  dalsegno torchrun --standalone --nproc-per-node 8 train.py --lr 1e-4
  srun dalsegno torchrun --nnodes 4 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d \\
    --rdzv-endpoint "$(scontrol show hostnames | head -1)" --rdzv-id "$SLURM_JOB_ID" train.py
"""
_SECONDS = "SECONDS"

HELP = {  # flag -> placeholder for its value, and help; defaults come from the table of flags
    "--nnodes": ("N|MIN:MAX", "Nodes; with MIN:MAX the run may shrink and grow."),
    "--nproc-per-node": ("N", "Processes on each node: a number, auto, cpu or gpu."),
    "--rdzv-backend": ("NAME", "Rendezvous of the nodes: static or c10d; etcd is treated as c10d."),
    "--rdzv-endpoint": ("HOST[:PORT]", "Host of the rendezvous. Default port with c10d: 29400."),
    "--rdzv-id": ("ID", "Name of the run, the same on all nodes."),
    "--rdzv-conf": ("K=V,…", "Settings: join_timeout=600, last_call_timeout=30, is_host, keep_alive_interval=5 …"),
    "--standalone": ("", "A single node; no endpoint is needed."),
    "--max-restarts": ("N", "Restarts before the run fails."),
    "--monitor-interval": (_SECONDS, "Accepted, without effect: the end of a worker is detected at once."),
    "--start-method": ("", "Accepted, without effect: workers are forked from a parent with torch imported."),
    "--event-log-handler": ("NAME", "Accepted, without effect."),
    "--role": ("NAME", "Prefix of the local rank in teed lines, and ROLE_NAME of the workers."),
    "--module": ("", "SCRIPT is a Python module, as with `python -m`."),
    "--no-python": ("", "SCRIPT is any program."),
    "--run-path": ("", "Run SCRIPT by its path, regardless of --no-python."),
    "--log-dir": ("FOLDER", "Folder for log files. Default: a temporary folder."),
    "--redirects": ("WHAT", "Write to files: 1 output, 2 errors, 3 both; by local rank: 0:1,1:2."),
    "--tee": ("WHAT", "Write to files and to the terminal; same values as --redirects."),
    "--log-line-prefix-template": ("TEXT", "Prefix of each teed line: ${role_name}, ${local_rank}, ${rank}."),
    "--local-ranks-filter": ("R,…", "Show only these local ranks. Default: all."),
    "--duplicate-stdout-filters": ("WORD,…", "Also write teed output lines with one of these words to a file."),
    "--duplicate-stderr-filters": ("WORD,…", "Also write teed error lines with one of these words to a file."),
    "--node-rank": ("N", "static: rank of this node."),
    "--master-addr": ("HOST", "static: the node with rank 0."),
    "--master-port": ("PORT", "static: port of that node. Default: 29500."),
    "--local-addr": ("ADDRESS", "Address of this node. Default: the one that reaches the endpoint."),
    "--logs-specs": ("NAME", "Not supported: use --log-dir, -r and -t."),
    "--numa-binding": ("", "Accepted, without effect: use srun's --cpu-bind and --mem-bind."),
    "--signals-to-handle": ("NAME,…", "Signals that are forwarded to the workers and then end the run."),
    "--shutdown-timeout": (_SECONDS, "Time for the workers to end after a signal. Default: 30."),
    "--virtual-local-rank": ("", "LOCAL_RANK is 0 in all workers, and each sees only its own GPU."),
}

WITHOUT_EFFECT = ("--monitor-interval", "--start-method", "--event-log-handler", "--numa-binding")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that shows only the spelling of a flag with dashes; the one with underscores also works."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spelled = ", ".join(each for each in action.option_strings if "_" not in each)
        value = "{" + ",".join(action.choices) + "}" if action.choices else action.metavar
        return f"{spelled} {value}" if value and action.nargs != 0 else spelled


def flag_help(name: str, default: object) -> str:
    """Return the help text of one flag, with percent signs escaped for argparse."""
    text = HELP[name][1]
    has_default = default not in (None, "", ()) and default is not False and name not in WITHOUT_EFFECT
    return (f"{text} Default: {default}." if has_default else text).replace("%", "%%")


# torchrun's flags (torch 2.1 to 2.15, torch/distributed/run.py). A test compares this table with torch's own flags


@dataclass(frozen=True)
class Flag:
    """One flag, which may be spelled `--log-dir` or `--log_dir`. A `switch` takes no value."""

    name: str  # the long spelling with dashes
    default: object = None
    type: Callable[[str], object] = str
    short: str = ""
    switch: bool = False
    choices: tuple[str, ...] = ()
    pet: bool = True  # whether the variable PET_<NAME> sets this flag
    also: str = ""  # another variable, with lower precedence

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
    """Split a string at commas. A doubled comma stands for a literal comma."""
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


# Parser of the command line


_SCRIPT = "SCRIPT"


def parse_torchrun(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> TorchrunArgs | None:
    """Return the parsed arguments; None if they ask for help. Raise UsageError if torchrun would refuse them.

    Flags end at the script. All arguments after it are passed to the script.
    """
    try:
        found: dict[str, Any] = vars(torchrun_parser(environ or {}).parse_args(list(argv)))
    except _HelpWanted:
        return None
    lists: dict[str, Any] = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return TorchrunArgs(**{**found, **lists})


def torchrun_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return an argparse parser, so that abbreviations and the script's arguments are handled as in torchrun."""
    usage = "dalsegno torchrun [OPTIONS] SCRIPT [ARGS]..."
    parser = _Parser("dalsegno torchrun", usage, ABOUT, add_help=False, formatter_class=Formatter)
    parser.add_argument("-h", "--help", action=_Help, dest=argparse.SUPPRESS, help="Show this message and exit.")
    for flag in FLAGS:
        _add(parser, flag, next((environ[name] for name in flag.variables if name in environ), None))
    parser.add_argument("training_script", type=str, metavar=_SCRIPT, help="What to run on every node.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="ARGS", help="Arguments of SCRIPT.")
    return parser


def _add(parser: argparse.ArgumentParser, flag: Flag, variable: str | None) -> None:
    """Add a flag. The variable's text becomes its default, which argparse parses like an argument."""
    text = flag_help(flag.name, flag.default)
    if flag.switch:
        parser.add_argument(*flag.spellings, action="store_true", default=_switched(flag, variable or "0"), help=text)
    else:
        how: dict[str, Any] = {"type": flag.type, "default": flag.default if variable is None else variable}
        shows = HELP[flag.name][0] or None
        parser.add_argument(*flag.spellings, choices=flag.choices or None, metavar=shows, help=text, **how)


def _switched(flag: Flag, variable: str) -> bool:
    if not variable.strip().isdigit():
        raise UsageError(f"{shown(variable)} is neither 1 nor 0", where=flag.variables[0], hint="write `1` or `0`")
    return bool(int(variable))


class _HelpWanted(Exception):
    pass


class _Help(argparse.Action):
    """An action that stops parsing at once, so that a missing script is not an error."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, *_: Any) -> NoReturn:
        raise _HelpWanted


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"torchrun would refuse this: {message}", hint=_hint(message))


def _hint(message: str) -> str:
    if f"required: {_SCRIPT}" in message:
        return "name the script after the flags: `dalsegno torchrun --nproc-per-node 8 train.py --lr 0.1`"
    unknown = message.partition("unrecognized arguments: ")[2].split()
    known = [name for flag in FLAGS for name in flag.spellings]
    otherwise = "`dalsegno torchrun --help` shows all flags"
    return did_you_mean(unknown[0].partition("=")[0], known, otherwise) if unknown else otherwise
