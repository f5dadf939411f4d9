"""How often whoever looks after a run does so."""

from __future__ import annotations

CHECK_S = 0.5  # its folder, its nodes, its steps
ASK_SLURM_S = 5.0  # what it did without telling
REFRESH_S = 10.0  # a status is written again, though nothing has changed: whoever reads it sees that we live
