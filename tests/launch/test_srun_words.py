"""What srun says of nodes on which it could not start anything."""

from dalsegno.launch.srun_words import launch_failures

SAID = """srun: cluster configuration lacks support for cpu binding
srun: error: Task launch for StepId=59.0 failed on node train-1: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: train-3: task 2: Killed
srun: error: train-2: task 1: Killed
"""
NODES = ("train-1", "train-2", "train-3")


def test_only_the_node_that_was_not_reached_is_to_blame():
    assert launch_failures(SAID, 59, NODES) == {"train-1": "Communication connection failure"}


def test_what_older_versions_say_is_understood():
    said = "srun: error: Task launch for 59.0 failed on node train-2: Socket timed out on send/recv operation\n"
    assert launch_failures(said, 59, NODES) == {"train-2": "Socket timed out on send/recv operation"}


def test_words_about_other_jobs_and_other_nodes_are_not_about_this_step():
    assert launch_failures(SAID, 5, NODES) == {}
    assert launch_failures(SAID, 59, NODES[1:]) == {}
    assert launch_failures("srun: error: train-2: task 1: Killed\n", 59, NODES) == {}
