"""Orders that a successor has to complete."""

import pytest

from dalsegno.runs.coordinator.agents.agents import current_order
from dalsegno.runs.coordinator.generations.causes import read_failure
from dalsegno.runs.coordinator.generations.events import Finish, ReleaseNodes, SaveGeneration
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.generations.group import Shape, form_group
from dalsegno.runs.coordinator.nodes.departure import SAVE_S
from dalsegno.runs.coordinator.saved_state import unfinished

SHAPE = Shape(2, 2, 1)


def test_interrupted_shutdown_is_repeated_with_its_cause():
    cause = read_failure(1, "n2", 3)
    ended = Run(SHAPE, phase=GenerationPhase.ENDED, exit_code=3, why="as it was", failures=(cause,))
    assert unfinished(ended) == [Finish(3, cause, "as it was")]


def test_interrupted_release_of_nodes_is_repeated():
    assert unfinished(Run(SHAPE, leaving=True)) == [ReleaseNodes()]


def test_save_order_that_may_not_have_arrived_is_sent_again():
    group = form_group(3, SHAPE, ["n1", "n2"])
    run = Run(SHAPE, phase=GenerationPhase.RUNNING, generation=3, group=group, taken={"n2": "the cloud takes it"})
    assert unfinished(run) == [SaveGeneration(("n1", "n2"), 3, SAVE_S)]
    assert group is not None and current_order(run, group, "n1") == {"save": 3}, "and after they have reconnected"
    assert current_order(Run(SHAPE, phase=GenerationPhase.RUNNING, group=group), group, "n1") is None


@pytest.mark.parametrize("phase", [GenerationPhase.RUNNING, GenerationPhase.STOPPING, GenerationPhase.OPENING])
def test_running_generation_needs_no_order(phase: GenerationPhase):
    assert unfinished(Run(SHAPE, phase=phase, leaving=True)) == []
    assert unfinished(Run(SHAPE, phase=GenerationPhase.GATHERING)) == []
