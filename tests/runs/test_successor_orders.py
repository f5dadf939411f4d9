"""Orders that a successor has to complete."""

import pytest

from dalsegno.runs.coordinator.generations.causes import read_failure
from dalsegno.runs.coordinator.generations.events import Finish, ReleaseNodes
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.saved_state import unfinished

SHAPE = Shape(2, 2, 1)


def test_interrupted_shutdown_is_repeated_with_its_cause():
    cause = read_failure(1, "n2", 3)
    ended = Run(SHAPE, phase=GenerationPhase.ENDED, exit_code=3, why="as it was", failures=(cause,))
    assert unfinished(ended) == [Finish(3, cause, "as it was")]


def test_interrupted_release_of_nodes_is_repeated():
    assert unfinished(Run(SHAPE, leaving=True)) == [ReleaseNodes()]


@pytest.mark.parametrize("phase", [GenerationPhase.RUNNING, GenerationPhase.STOPPING, GenerationPhase.OPENING])
def test_running_generation_needs_no_order(phase: GenerationPhase):
    assert unfinished(Run(SHAPE, phase=phase, leaving=True)) == []
    assert unfinished(Run(SHAPE, phase=GenerationPhase.GATHERING)) == []
