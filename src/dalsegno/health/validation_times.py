"""How long a validation may take, for all who have a part in it: whoever waits, waits longer than whom it waits for.

Counted from the moment a node is told to prove itself, with a partner that takes all its time to say where it listens:

    PORT_S < PORT_S + VALIDATE_S < PORT_S + ANSWER_S < LISTEN_S < PARTNER_S < PHASE_S

So a good node always has its own full time, and is never given up for what its partner takes.
"""

from __future__ import annotations

MARGIN_S = 10.0  # for a word to come, on machines that are busy
PORT_S = 30.0  # the partner says where it listens, or the node is tried alone
VALIDATE_S = 160.0  # the node's own: its agent ends it then, and says so
ANSWER_S = VALIDATE_S + MARGIN_S  # the controller waits so long for the node; the partner, for its first word
LISTEN_S = PORT_S + ANSWER_S + MARGIN_S  # the partner's own, from the beginning
PARTNER_S = LISTEN_S + MARGIN_S  # the controller waits so long for the partner's answer
PHASE_S = PARTNER_S + MARGIN_S  # nothing came of it: the validation has failed
