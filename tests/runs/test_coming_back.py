"""What a coordinator's successor still has to do of what its former self was ordered."""

import pytest

from dalsegno.runs.coordinator.causes import read_failure
from dalsegno.runs.coordinator.events import Finish, ReleaseNodes
from dalsegno.runs.coordinator.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.group import Shape
from dalsegno.runs.coordinator.takeover import unfinished

SHAPE = Shape(2, 2, 1)


def test_a_farewell_is_said_again_with_its_cause():
    cause = read_failure(1, "n2", 3)
    ended = Run(SHAPE, phase=GenerationPhase.ENDED, exit_code=3, why="as it was", failures=(cause,))
    assert unfinished(ended) == [Finish(3, cause, "as it was")]


def test_nodes_that_were_to_be_given_back_are_given_back():
    assert unfinished(Run(SHAPE, leaving=True)) == [ReleaseNodes()]


@pytest.mark.parametrize("phase", [GenerationPhase.RUNNING, GenerationPhase.STOPPING, GenerationPhase.OPENING])
def test_a_generation_that_is_under_way_is_left_to_its_agents(phase: GenerationPhase):
    assert unfinished(Run(SHAPE, phase=phase, leaving=True)) == []
    assert unfinished(Run(SHAPE, phase=GenerationPhase.GATHERING)) == []
