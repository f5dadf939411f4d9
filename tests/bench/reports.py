"""A sample report of the ladder benchmark."""

from dalsegno.bench.ladder.ladder import LadderReport, RankTraffic, RungResult, StepSpan

MIB = 2**20


def report(*rungs: RungResult) -> LadderReport:
    return LadderReport(2, "gloo", "cpu", "2.9.0", 1024, 16 * MIB, rungs)


RING = RungResult(
    "ring",
    steps_s=(0.030, 0.020, 0.100),
    traffic=(RankTraffic(4, 2, 15 * MIB, 16 * MIB, False, 15 * MIB),
             RankTraffic(4, 2, 16 * MIB, 15 * MIB, False, 17 * MIB)),
    marks=(StepSpan(0, "forward", "", 0.0, 0.01), StepSpan(0, "backward", "", 0.01, 0.02),
           StepSpan(0, "communicate", "send <1 B> to 1", 0.02, 0.04), StepSpan(1, "update", "", 0.04, 0.04)),
)  # fmt: skip
DDP = RungResult(
    "ddp",
    steps_s=(0.020,),
    traffic=(RankTraffic(3, 6, 16 * MIB, 16 * MIB, True),) * 2,
    marks=(StepSpan(0, "backward", "", 0.0, 0.02), StepSpan(0, "communicate", "all-reduce 5 B", 0.01, 0.02)),
)
DATA_PARALLEL = RungResult("data-parallel", why_not="here there are no GPUs")
