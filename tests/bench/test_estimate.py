"""The estimate of a training run: time, cost, memory, failures, goodput, and the command."""

import json
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.bench.estimate import (
    DAY_S,
    NO_FIT,
    TrainingAsk,
    TrainingEstimate,
    checkpoint_interval,
    count_text,
    estimate,
    failure_rates,
    find_training_instance,
    make_goodput,
    parse_count,
    time_text,
    usd_text,
)
from dalsegno.bench.training_memory import GIB, MemoryChoice, MemoryFit, ModelShape, memory_choices, shape_of
from dalsegno.cli.main import cli
from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.hardware import find_instance

YEAR_S = 365.25 * DAY_S


def ask(
    params: float = 70e9, tokens: float = 1.4e12, instance: str = "p5.48xlarge", nodes: int = 32, mfu: float = 0.4
) -> TrainingAsk:
    return TrainingAsk(shape_of(params, None, None, 8192, 1), tokens, find_instance(instance), nodes, mfu)


def command(*words: str) -> Result:
    return CliRunner().invoke(cli, ["estimate", *words], standalone_mode=False)


# Time and cost


def test_llama_70b_on_one_h100_takes_19_years():
    at_peak = estimate(ask(instance="p5.4xlarge", nodes=1, mfu=1.0))
    assert at_peak.gpus == 1 and at_peak.ideal_s / YEAR_S == pytest.approx(18.8, abs=0.05)
    assert estimate(ask(instance="p5.4xlarge", nodes=1)).ideal_s / YEAR_S == pytest.approx(47.1, abs=0.05)


def test_llama_3_405b_takes_about_as_long_as_was_published():
    # Meta trained this model on 15.6T tokens, mostly with 16,384 H100. Its report describes 54 days of that time.
    found = estimate(ask(405e9, 15.6e12, nodes=2048, mfu=0.41))
    assert 55 < found.ideal_s / DAY_S < 75


def test_time_falls_with_gpus_and_rises_with_tokens():
    once = estimate(ask()).ideal_s
    assert estimate(ask(nodes=64)).ideal_s == pytest.approx(once / 2)
    assert estimate(ask(tokens=2.8e12)).ideal_s == pytest.approx(once * 2)


def test_cost_is_the_list_price_of_all_gpus():
    found = estimate(ask())
    assert found.price is not None
    assert found.cost_usd(3600) == pytest.approx(256 * found.price.usd_per_gpu_hour)
    assert replace(found, price=None).cost_usd(3600) is None


# Memory


def choices(params: float, gpus: int, memory_gib: float = 80) -> dict[str, MemoryChoice]:
    shape = shape_of(params, None, None, 4096, 1)
    return {choice.name: choice for choice in memory_choices(shape, gpus, min(8, gpus), memory_gib)}


def test_state_is_spread_as_the_zero_paper_says():
    found = choices(7.5e9, 64)  # the example in figure 1 of the ZeRO paper, in GB of 1e9 bytes
    sizes = {name: round(found[name].state / 1e9, 1) for name in ("DDP", "ZeRO-1", "ZeRO-2")}
    assert sizes == {"DDP": 120.0, "ZeRO-1": 31.4, "ZeRO-2": 16.6}
    gathered = 2 * 2 * 7.5e9 / shape_of(7.5e9, None, None, 1, 1).layers
    assert (found["FSDP (ZeRO-3)"].state - gathered) / 1e9 == pytest.approx(1.9, abs=0.05)


def test_small_model_fits_with_ddp_and_a_large_one_only_spread():
    assert choices(1e9, 8)["DDP"].fit is MemoryFit.YES
    large = choices(70e9, 256)
    assert large["DDP"].fit is large["ZeRO-2"].fit is MemoryFit.NO
    assert large["FSDP (ZeRO-3)"].fit is MemoryFit.RECOMPUTE and large["TP 8 + ZeRO-1"].fit is MemoryFit.YES


def test_pipeline_is_offered_where_tensor_parallelism_alone_does_not_fit():
    names = [choice.name for choice in choices(405e9, 1024).values()]
    assert names == ["DDP", "ZeRO-1", "ZeRO-2", "FSDP (ZeRO-3)", "TP 8 + ZeRO-1", "TP 8 x PP 4 + ZeRO-1"]
    assert choices(405e9, 1024)["TP 8 x PP 4 + ZeRO-1"].fit is not MemoryFit.NO


def test_one_gpu_has_nothing_to_spread():
    assert list(choices(1e9, 1)) == ["DDP"]


def test_activations_follow_the_formula():
    shape = ModelShape(1e9, layers=10, hidden=1000, sequence=2048, micro_batch=2)
    (ddp, *_) = memory_choices(shape, 1, 1, 80)
    assert ddp.kept == 34 * 2048 * 2 * 1000 * 10
    assert ddp.recomputed == 2 * 2048 * 2 * 1000 * 10 + 34 * 2048 * 2 * 1000
    assert 0 < ddp.limit < 80 * GIB


@pytest.mark.parametrize(("params", "layers", "hidden"), [(7e9, 32, 4096), (70e9, 80, 8192), (405e9, 126, 16384)])
def test_guessed_shape_is_near_that_of_published_models(params: float, layers: int, hidden: int):
    shape = shape_of(params, None, None, 8192, 1)
    assert shape.layers == pytest.approx(layers, rel=0.15) and shape.hidden == pytest.approx(hidden, rel=0.15)
    assert shape_of(params, layers, hidden, 8192, 1) == ModelShape(params, layers, hidden)


@given(st.floats(1e6, 1e13), st.integers(1, 10_000))
def test_spreading_further_never_needs_more_memory(params: float, nodes: int):
    shape = shape_of(params, None, None, 8192, 1)
    found = memory_choices(shape, 8 * nodes, 8, 80)
    ddp, one, two, *_ = found
    assert ddp.state >= one.state >= two.state
    assert all(choice.state > 0 and choice.kept >= 0 for choice in found)


# Failures and goodput


def test_published_rates_have_sources_and_agree_with_their_counts():
    assert [rate.per_1000_node_days for rate in failure_rates()] == [6.5, 3.79, 14.11]
    assert all("arXiv" in rate.source for rate in failure_rates())
    assert round(419 / (2048 * 54) * 1000, 2) == 3.79 and round(105 / (124 * 60) * 1000, 2) == 14.11


def test_failures_grow_with_nodes_and_days():
    found = estimate(ask())
    assert found.failures() == pytest.approx(6.5 / 1000 * 32 * found.ideal_s / DAY_S)
    assert found.mtbf_s == pytest.approx(DAY_S * 1000 / (6.5 * 32))


def test_time_between_failures_is_that_of_meta_for_16384_gpus():
    assert estimate(ask(nodes=2048)).mtbf_s / 3600 == pytest.approx(1.8, abs=0.01)


def test_checkpoint_interval_is_that_of_young_and_daly():
    # Young's formula, for short checkpoints
    assert checkpoint_interval(1, 1e8) == pytest.approx((2 * 1e8) ** 0.5, rel=0.001)
    d, m = 49.0, 6600.0
    daly = (2 * d * m) ** 0.5 * (1 + (d / (2 * m)) ** 0.5 / 3 + d / (2 * m) / 9) - d
    assert checkpoint_interval(d, m) == pytest.approx(daly)
    assert checkpoint_interval(300, 100) == 100


@pytest.mark.parametrize(("nodes", "share"), [(128, 0.955), (512, 0.905), (2048, 0.750)])
def test_goodput_of_a_job_that_is_requeued_falls_with_its_nodes(nodes: int, share: float):
    # The expected values assume 17 min until the run trains again, a checkpoint of 50 s every 30 min, and 6.5 failures
    # per 1000 node-days
    found = estimate(ask(nodes=nodes))
    assert found.plain_slurm.recovery_s == pytest.approx(17 * 60, abs=2)
    goodput = make_goodput(1e6, found.mtbf_s, 1800, 50 / 1800, 1020)
    assert goodput.share == pytest.approx(share, abs=0.001) and goodput.elapsed_s == pytest.approx(1e6 / goodput.share)


def test_dal_segno_gains_much_on_many_nodes_and_little_on_few():
    few, many = estimate(ask(nodes=4)), estimate(ask(405e9, 15.6e12, nodes=2048))
    assert abs(few.with_dalsegno.share - few.plain_slurm.share) < 0.01
    assert many.with_dalsegno.share - many.plain_slurm.share > 0.2
    assert many.with_dalsegno.elapsed_s < many.plain_slurm.elapsed_s


@given(st.floats(1e6, 1e13), st.integers(1, 100_000), st.floats(0, 1000))
def test_goodput_is_a_share_of_the_time(params: float, nodes: int, rate: float):
    found: TrainingEstimate = estimate(replace(ask(params, nodes=nodes), per_1000_node_days=rate))
    for side in (found.plain_slurm, found.with_dalsegno):
        assert 0 < side.share <= 1 and side.elapsed_s >= found.ideal_s
        assert 0 <= side.stall_share < 1


def test_without_failures_only_saving_costs_time():
    found = estimate(replace(ask(), per_1000_node_days=0.0))
    assert found.failures() == 0 and found.with_dalsegno.share == pytest.approx(1 - found.with_dalsegno.stall_share)


# The command


def test_command_prints_time_cost_memory_and_goodput():
    shown = command("--params", "70B", "--tokens", "1.4T", "--instance", "p5.48xlarge", "--nodes", "32").output
    assert shown.startswith("70B parameters, 1.4T tokens, 32 x p5.48xlarge (256 x H100)\n")
    for text in ("67.2 days without failures", "FSDP (ZeRO-3)", "14 expected", "PLAIN SLURM", "goodput"):
        assert text in shown


def test_json_has_the_same_figures():
    words = ("--params", "70B", "--tokens", "1.4T", "--instance", "p5.48xlarge", "--nodes", "32", "--json")
    answer = json.loads(command(*words).output)
    assert answer["ideal_s"] / DAY_S == pytest.approx(67.2, abs=0.05) and answer["gpus"] == 256
    assert answer["with_dalsegno"]["goodput"] > answer["without"]["goodput"] > 0.9
    assert len(answer["failures_by_source"]) == 3 and answer["memory"][0]["name"] == "DDP"


def test_infinite_time_between_failures_is_still_json():
    words = ("--params", "1B", "--tokens", "1B", "--instance", "p5.48xlarge", "--failures", "0", "--json")
    answer = json.loads(command(*words).output, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert answer["mtbf_s"] is None


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("--instance", "p5.48xlarg"), UsageError, "did you mean `p5.48xlarge`?"),
        (("--instance", "m5.large"), UsageError, "p5.48xlarge"),
        (("--instance", "p3.16xlarge"), DalsegnoError, "A100"),
        (("--instance", "p5.48xlarge", "--params", "many"), UsageError, "70B"),
        (("--instance", "p5.48xlarge", "--tokens", "0"), UsageError, "1.4T"),
    ],
)
def test_wrong_input_is_an_error_with_a_hint(words: tuple[str, ...], error: type[DalsegnoError], hint: str):
    found = command("--params", "7B", "--tokens", "1T", *words).exception
    assert isinstance(found, error) and hint in found.hint


@pytest.mark.parametrize(
    "words",
    [("--mfu", "nan"), ("--mfu", "0"), ("--mfu", "1.1"), ("--failures", "nan"), ("--storage-gbytes-per-s", "inf"),
     ("--nodes", "0"), ("--hidden", "9" * 400)],
)  # fmt: skip
def test_options_outside_of_their_range_are_refused(words: tuple[str, ...]):
    found = command("--params", "7B", "--tokens", "1T", "--instance", "p5.48xlarge", *words).exception
    assert isinstance(found, click.UsageError)


def test_extreme_sizes_still_give_numbers():
    words = ("--params", "100000P", "--tokens", "100000P", "--instance", "p5.48xlarge", "--nodes", "1000000")
    shown = command(*words, "--failures", "1000", "--storage-gbytes-per-s", "0.001")
    assert shown.exception is None and "nan" not in shown.output and "inf" not in shown.output


def test_numbers_with_unit_suffixes_are_read_and_written():
    assert [parse_count(text, "--params") for text in ("70B", "1.4t", "7e9", "125M")] == [7e10, 1.4e12, 7e9, 1.25e8]
    for wrong in ("", "-1", "0", "1e99", "70 B B", "9" * 40):
        with pytest.raises(UsageError):
            parse_count(wrong, "--params")
    assert [count_text(value) for value in (7e10, 1.4e12, 1.25e8)] == ["70B", "1.4T", "125M"]
    assert [time_text(value) for value in (12, 90, 7200, 5 * DAY_S, 19 * YEAR_S)] == [
        "12 s", "1.5 min", "2.0 h", "5.0 days", "19.0 years",
    ]  # fmt: skip
    assert [usd_text(value) for value in (950.0, 2.84e6)] == ["950 $", "2.84 million $"]


def test_every_instance_type_with_a_modern_gpu_can_be_estimated():
    assert find_training_instance("ml.p5.48xlarge")[1].name == "h100"
    for name in ("p4d.24xlarge", "p6-b200.48xlarge", "BM.GPU.H200.8", "g5.48xlarge", "trn1.32xlarge"):
        assert estimate(ask(7e9, 1e12, name, 2)).ideal_s > 0


def test_a_model_that_does_not_fit_is_reported_before_time_and_goodput():
    few = ("--params", "70B", "--tokens", "1.4T", "--instance", "p5.4xlarge")
    assert command(*few).stdout.splitlines()[1] == NO_FIT
    assert NO_FIT not in command(*few, "--nodes", "256").stdout
    assert json.loads(command(*few, "--json").stdout)["fits"] is False


def test_a_number_out_of_range_is_refused_with_the_bounds():
    with pytest.raises(UsageError) as refused:
        parse_count("1e30", "--params")
    assert refused.value.what == "`1e30` is not between 1 and 1e+20"
