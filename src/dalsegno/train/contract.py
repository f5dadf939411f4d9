"""The contract between a training script and its launcher: environment variables and exit codes."""

from __future__ import annotations

# Environment variables of a worker, in addition to torchrun's.
RUN = "DALSEGNO_RUN"  # the run's id
GENERATION = "DALSEGNO_GENERATION"  # number of this start of the run's workers, counted from 1
AGENT = "DALSEGNO_AGENT"  # name of the agent's abstract Unix socket, without the leading zero byte
WANTED_NODES = "DALSEGNO_WANTED_NODES"  # number of nodes that the user requested; this generation may have fewer
FRESH = "DALSEGNO_FRESH"  # "1": start from scratch even if there are checkpoints
VERIFY_EVERY = "DALSEGNO_VERIFY_EVERY"  # steps between two checks for silent data corruption
VERIFIED = "DALSEGNO_VERIFIED"  # the last step of the run that passed a check for silent data corruption
# "GENERATION:STEP": states that this run saved after STEP, in generations up to GENERATION, may be corrupt
TRUSTED = "DALSEGNO_TRUSTED"

# Exit codes of workers and of runs.
DONE = 0
SAVED = 75  # the state was saved, so the run can resume later
STOP = 93  # the script asks not to be restarted
TERMINATED = 143  # the worker ended on request, without saving
