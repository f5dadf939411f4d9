"""The entry point of `dalsegno`: imports only the called command and reports errors."""

from __future__ import annotations

import errno
import importlib
import os
import sys

import click

from dalsegno import __version__
from dalsegno.cli import out
from dalsegno.cli.controller_requests import prefix_commands
from dalsegno.cli.forwarding import forward
from dalsegno.cli.interrupts import INTERRUPTED, Interrupted, end_at_once
from dalsegno.errors import DalsegnoError, SpecError

BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it
GROUPS = {  # maps each group to its commands and their help texts, in the order of `--help`
    "Cluster": {
        "init": "Write a commented starter cluster file.",
        "compare": "Compare the places to train, Kubernetes-based ones included.",
        "adopt": "Describe a Slurm cluster that exists already, and what works on it.",
        "validate": "Check a cluster file and report all errors at once.",
        "plan": "Show what `up` would do.",
        "up": "Create the cluster, or apply changes to a running one.",
        "status": "Show the health, nodes, daemons and queue of the cluster.",
        "top": "Watch nodes, GPUs, runs and events in a full-screen view.",
        "web": "Open the web page of the cluster.",
        "ls": "List the clusters on this machine.",
        "shell": "Open a shell, or run a command, with the cluster's Slurm commands.",
        "ssh": "Open a shell, or run a command, on a node.",
        "env": "Print shell commands that put the cluster's Slurm on your PATH.",
        "storage": "List the storage of the cluster; check it from every node.",
        "user": "Add, change, remove and list users of the cluster.",
        "group": "Add, change, remove and list Unix groups of the cluster.",
        "down": "Remove the cluster and everything that belongs to it.",
    },
    "Training": {
        "run": "Run training that survives lost nodes.",
        "torchrun": "Run a torchrun command line with the Dal Segno launcher.",
        "submit": "Submit a job file, or any sbatch script.",
        "runs": "List your runs.",
        "logs": "Print the output of a run's ranks.",
        "cancel": "Cancel runs and end all their processes.",
        "ckpt": "List, verify and convert checkpoints.",
        "estimate": "Estimate time, cost, memory and failures of a training run.",
        "doctor": "Find what is wrong with a script, a job or a run, and print the fix.",
    },
    "Health": {
        "health": "Check this machine or a node: GPUs, fabric, host, services.",
        "nodes": "Show the nodes; `nodes show NODE` shows one node's GPUs and history.",
        "events": "Show node events and recovery actions.",
        "why": "Explain what happened to a node, a run or a job, and what to do.",
        "automation": "Pause or resume automatic recovery.",
        "inject": "Inject a fault into a node or a worker.",
        "drill": "Train a small model, inject faults, and report what each one cost.",
    },
    "Containers": {
        "image": "Import, build, list and remove container images.",
        "containers": "Check `srun --container-image` on every node; list named containers.",
    },
    "Measure": {
        "bench": "Run benchmarks, and judge the output of nccl-tests.",
        "certify": "Measure the whole cluster, and write a report with a verdict.",
        "exporter": "Serve the metrics of any Slurm cluster to Prometheus.",
        "monitor": "Run Prometheus for the cluster; show targets, alerts and panels without data.",
        "dashboards": "Write dashboards for Grafana, and start Grafana on AWS.",
    },
    "Other": {
        "schema": "Print the cluster file's JSON schema for editors.",
        "demo": "Run a demonstration on this machine: training that survives faults.",
    },
}
COMMANDS = {name: text for commands in GROUPS.values() for name, text in commands.items()}
FOLDERS = {"Other": ""}  # maps a group to its folder in `cli/`; the default is the group's name in lower case
# maps a command to the module that it shares with other commands; the module's function has the command's name
SHARED_MODULES = {
    "init": "cluster_file", "validate": "cluster_file", "plan": "up", "ls": "status", "env": "shell", "events": "nodes",
    "automation": "nodes", "group": "user", "schema": "cluster.cluster_file",
}  # fmt: skip


class Commands(click.Group):
    """The group of all commands. A command's module is imported only when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(find_module(name))
        command: click.Command = getattr(module, name if name in SHARED_MODULES else "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, 1)
            raise click.UsageError(f"no command `{args[0]}`" + (f"; did you mean `{close[0]}`?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(widest), text) for name, text in commands.items()])


def find_module(command: str) -> str:
    """Return the module of a command: in the folder of the command's group, or in `cli/` itself."""
    group = next((group for group, commands in GROUPS.items() if command in commands), "Other")
    parts = ("dalsegno.cli", FOLDERS.get(group, group.lower()), SHARED_MODULES.get(command, command))
    return ".".join(part for part in parts if part)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dalsegno")
def cli() -> None:
    """Stand up a Slurm cluster for training from one file, and keep training alive on it."""


def main() -> None:
    """Run the command line. Report errors as a message and an exit code; only bugs cause a traceback."""
    end_at_once()
    _open_streams()
    try:
        forward(sys.argv[1:], cli)
        code = cli.main(prog_name="dalsegno", standalone_mode=False)
        sys.stdout.flush()
    except (DalsegnoError, click.ClickException) as error:
        code = _explain(error)
    except (KeyboardInterrupt, click.Abort) as end:
        stopped = end.__cause__  # click turns every interrupt into an Abort, with the interrupt as its cause
        out.error(stopped.word if isinstance(stopped, Interrupted) else "interrupted")
        code = stopped.exit_code if isinstance(stopped, Interrupted) else INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        code = BROKEN_PIPE
    except OSError as error:
        _discard_output()
        out.error(_describe_os_error(error))
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _discard_output() -> None:
    """Discard output that cannot be written. Python would flush it again at exit, print an error and exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Open closed standard streams on /dev/null. Otherwise the next opened file takes their descriptors."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _explain(error: DalsegnoError | click.ClickException) -> int:
    # this error is new in click 8.2
    if isinstance(error, click.ClickException) and type(error).__name__ == "NoArgsIsHelpError":
        out.talk(error.format_message())
        return error.exit_code
    if isinstance(error, click.ClickException):
        usage = error.ctx.get_usage() if isinstance(error, click.UsageError) and error.ctx else ""
        out.error(error.format_message(), hint=usage)
        return error.exit_code
    if isinstance(error, SpecError):
        out.problems(error.problems)
    else:
        out.error(error.what, error.where, prefix_commands(error.hint))
    return error.exit_code


def _describe_os_error(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    full = " (free some space, or set DALSEGNO_HOME to another disk)" if error.errno == errno.ENOSPC else ""
    return f"{error.strerror or error}{where}{full}"
