"""Tests of drawing jobs as bars."""

from dalsegno.demo.researchers import JobBar, draw


def test_waiting_is_dotted_and_running_is_solid():
    bars = [JobBar("ada", "2 GPUs", 0, 0, 5), JobBar("cem", "1 GPU", 0, 5, 10)]
    assert draw(bars, width=10, solid="#", dotted=".").splitlines() == [
        "ada  #####       2 GPUs",
        "cem  .....#####  1 GPU",
        "     0 s   10 s",
    ]


def test_a_job_too_short_for_the_scale_is_still_shown():
    assert "#" in draw([JobBar("a", "", 0, 0, 0), JobBar("b", "", 0, 0, 1000)], width=10, solid="#").splitlines()[0]
