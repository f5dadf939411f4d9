"""Jobs as bars."""

from dalsegno.demo.researchers import Bar, draw


def test_waiting_is_dotted_and_running_is_solid():
    bars = [Bar("ada", "2 GPUs", 0, 0, 5), Bar("cem", "1 GPU", 0, 5, 10)]
    assert draw(bars, width=10, solid="#", dotted=".").splitlines() == [
        "ada  #####       2 GPUs",
        "cem  .....#####  1 GPU",
        "     0 s   10 s",
    ]


def test_a_job_too_short_for_the_scale_still_shows():
    assert "#" in draw([Bar("a", "", 0, 0, 0), Bar("b", "", 0, 0, 1000)], width=10, solid="#").splitlines()[0]
