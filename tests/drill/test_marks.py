"""What a run's journal says of a drill."""

from __future__ import annotations

from dalsegno.drill.marks import marks_of_run
from dalsegno.drill.story import KNOWN, Mark


def test_lost_nodes_and_failed_ranks_are_known_and_what_peers_say_is_not():
    entries = [
        {"at": 1.0, "event": "began", "host": "head"},
        {"at": 2.0, "event": "generation", "generation": 1, "nodes": ["n1", "n2"]},
        {"at": 3.0, "event": "lost", "node": "n2", "why": "no sign of life"},
        {"at": 4.0, "event": "failed", "node": "n1", "rank": 0, "what": "was killed by SIGKILL"},
        {"at": 4.1, "event": "failed", "node": "n3", "rank": 1, "what": "gloo", "noise": True},
    ]
    assert list(marks_of_run(entries)) == [
        Mark(2.0, "generation", "", "generation 1 on n1, n2"),
        Mark(3.0, KNOWN, "n2", "the run misses it: no sign of life"),
        Mark(4.0, KNOWN, "n1", "rank 0 was killed by SIGKILL"),
    ]
