"""What a training script and whoever launched it agree on: names of variables, words to the agent, exit codes."""

from __future__ import annotations

# Variables of a worker, beside those torchrun sets.
RUN = "DALSEGNO_RUN"  # the run's id
GENERATION = "DALSEGNO_GENERATION"  # counts every start of the run's workers, from 1
AGENT = "DALSEGNO_AGENT"  # abstract Unix socket of the agent, without its leading zero byte
WANTED_NODES = "DALSEGNO_WANTED_NODES"  # nodes the user asked for; fewer may be in this generation
FRESH = "DALSEGNO_FRESH"  # "1": start anew, whatever checkpoints there are

# Exit codes of workers and of runs.
DONE = 0
SAVED = 75  # saved, go on later
STOP = 93  # do not restart
TERMINATED = 143  # ended on request, without saving
