"""What `dalsegno torchrun --help` says of each flag: torchrun's meaning in a line, and where ours differs."""

from __future__ import annotations

import argparse

ABOUT = """\
Run SCRIPT as torchrun does: same flags, same variables for its workers, same exit codes. In a batch
script `srun torchrun …` becomes `srun dalsegno torchrun …`. Options stand before SCRIPT, may be
written with `_` for `-`, and most may also be a variable: PET_NNODES=2.

  dalsegno torchrun --standalone --nproc-per-node 8 train.py --lr 1e-4
  srun dalsegno torchrun --nnodes 4 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d \\
    --rdzv-endpoint "$(scontrol show hostnames | head -1)" --rdzv-id "$SLURM_JOB_ID" train.py
"""
_SECONDS = "SECONDS"

HELP = {  # flag -> what stands for its value, and what it does; defaults come from the table of flags
    "--nnodes": ("N|MIN:MAX", "Nodes; with MIN:MAX the run may shrink and grow."),
    "--nproc-per-node": ("N", "Processes on each node: a number, auto, cpu or gpu."),
    "--rdzv-backend": ("NAME", "How the nodes meet: static or c10d; etcd is taken for c10d."),
    "--rdzv-endpoint": ("HOST[:PORT]", "Where the nodes meet. Port with c10d: 29400."),
    "--rdzv-id": ("ID", "Name of the run, the same on all nodes."),
    "--rdzv-conf": ("K=V,…", "join_timeout=600, last_call_timeout=30, is_host, keep_alive_interval=5 …"),
    "--standalone": ("", "One node by itself; no endpoint is needed."),
    "--max-restarts": ("N", "Restarts before the run is given up."),
    "--monitor-interval": (_SECONDS, "Taken, without effect: the end of a worker is seen at once."),
    "--start-method": ("", "Taken, without effect: workers are forked from a parent with torch imported."),
    "--event-log-handler": ("NAME", "Taken, without effect."),
    "--role": ("NAME", "Name before the local rank in teed lines, and ROLE_NAME of the workers."),
    "--module": ("", "SCRIPT is a Python module, as with `python -m`."),
    "--no-python": ("", "SCRIPT is a program of its own."),
    "--run-path": ("", "SCRIPT is run by its path, whatever --no-python says."),
    "--log-dir": ("FOLDER", "Where log files go; by default a temporary folder."),
    "--redirects": ("WHAT", "To files: 1 output, 2 errors, 3 both; by local rank: 0:1,1:2."),
    "--tee": ("WHAT", "To files and to the terminal; as --redirects."),
    "--log-line-prefix-template": ("TEXT", "Before each teed line: ${role_name}, ${local_rank}, ${rank}."),
    "--local-ranks-filter": ("R,…", "Show only these local ranks; by default all."),
    "--duplicate-stdout-filters": ("WORD,…", "Keep teed output lines with one of these words in a file too."),
    "--duplicate-stderr-filters": ("WORD,…", "The same for errors."),
    "--node-rank": ("N", "static: which node this is."),
    "--master-addr": ("HOST", "static: the node with rank 0."),
    "--master-port": ("PORT", "static: a port there. Default: 29500."),
    "--local-addr": ("ADDRESS", "Address of this node; by default the one by which it reaches the endpoint."),
    "--logs-specs": ("NAME", "Not taken: use --log-dir, -r and -t."),
    "--numa-binding": ("", "Taken, without effect: srun's --cpu-bind and --mem-bind do that."),
    "--signals-to-handle": ("NAME,…", "Signals that end the run in order, after the workers got them."),
    "--shutdown-timeout": (_SECONDS, "How long the workers have to end after a signal. Default: 30."),
    "--virtual-local-rank": ("", "LOCAL_RANK is 0 in all workers, each of which sees its own GPU alone."),
}

WITHOUT_EFFECT = ("--monitor-interval", "--start-method", "--event-log-handler", "--numa-binding")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """A flag in one spelling: that with dashes, and the short one. The others work as well."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spelled = ", ".join(each for each in action.option_strings if "_" not in each)
        value = "{" + ",".join(action.choices) + "}" if action.choices else action.metavar
        return f"{spelled} {value}" if value and action.nargs != 0 else spelled


def said_of(name: str, default: object) -> str:
    """The line of one flag. argparse reads a percent sign as its own."""
    said = HELP[name][1]
    has_default = default not in (None, "", ()) and default is not False and name not in WITHOUT_EFFECT
    return (f"{said} Default: {default}." if has_default else said).replace("%", "%%")
