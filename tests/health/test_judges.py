"""Tests of judges at their thresholds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.health import Remedy, Verdict
from dalsegno.health.checks.gpu import (
    judge_clocks,
    judge_count,
    judge_ecc,
    judge_heating,
    judge_rows,
    judge_temperature,
)
from dalsegno.health.checks.host import (
    ClockOffset,
    MemoryUse,
    judge_clock,
    judge_flaps,
    judge_kernel_log,
    judge_memory,
    judge_oom,
    judge_port_errors,
    judge_ports,
    judge_stuck,
)
from dalsegno.health.facts import (
    HW_SLOWDOWN,
    HW_THERMAL,
    SW_POWER_CAP,
    SW_THERMAL,
    GpuFacts,
    LogLine,
    Port,
    Sample,
    WaitingProcess,
    nvlinks_of,
)
from dalsegno.health.readers.gpus import GpuCount, TemperatureHistory
from dalsegno.health.readers.host import BlockedProcesses, KernelLines, Ports
from dalsegno.health.telemetry import healthy
from dalsegno.system.hanging_calls import NoAnswer

NOW = 1_700_000_000.0
PASSED, WARNED, FAILED = Verdict.PASSED, Verdict.WARNED, Verdict.FAILED
GPUS = healthy("n", 2, "h100").gpus


def one(**changes: object) -> tuple[GpuFacts, ...]:
    return (GPUS[0], replace(GPUS[1], **changes))  # type: ignore[arg-type]


# GPUs


@pytest.mark.parametrize(("celsius", "verdict"), [(81, PASSED), (82, WARNED), (86, WARNED), (87, FAILED), (95, FAILED)])
def test_temperature_is_judged_by_its_margin_to_slowdown(celsius: float, verdict: Verdict) -> None:
    assert judge_temperature(one(temperature_c=celsius, slowdown_c=87)).verdict is verdict
    assert judge_temperature(one(temperature_c=celsius, slowdown_c=celsius + 30)).verdict is PASSED


def test_values_that_no_gpu_reports_are_unknown() -> None:
    silent = [GpuFacts(0), GpuFacts(1)]
    for judge in (judge_temperature, judge_ecc, judge_rows, judge_clocks):
        with pytest.raises(NoAnswer):
            judge(silent)


def heat(*celsius: float, every_s: float = 30) -> list[TemperatureHistory]:
    return [TemperatureHistory(0, 87, tuple(Sample(NOW + index * every_s, each) for index, each in enumerate(celsius)))]


def test_a_gpu_that_heats_up_towards_slowdown_causes_a_warning() -> None:
    found = judge_heating(heat(74, 75, 77, 78, 80))
    assert (found.verdict, found.text) == (WARNED, "GPU 0 heats up by 3.0 °C per minute: slowdown in 2 min")
    assert judge_heating(heat(74, 77, 80, 83, 86)).text.endswith("per minute: slowdown within a minute")
    assert judge_heating(heat(34, 60, 80, 96, 96)).text.endswith("per minute: it has slowed down already")
    assert judge_heating(heat(80, 80, 80, 80, 80)).verdict is PASSED  # hot, but steady
    assert judge_heating(heat(80, 78, 77, 75, 74)).verdict is PASSED
    assert judge_heating(heat(30, 40, 50, 55, 60)).verdict is PASSED  # a job has started
    # Rises too slowly to reach the limit within ten minutes
    assert judge_heating(heat(80, 80, 80.1, 80.1, 80.2)).verdict is PASSED


def test_a_trend_needs_several_measurements_over_a_minute() -> None:
    for few in (heat(), heat(80, 85), heat(80, 81, 82, 83, 84, every_s=1)):
        with pytest.raises(NoAnswer):
            judge_heating([each for each in few if each.samples])


@pytest.mark.parametrize(
    ("changes", "verdict", "remedy"),
    [
        ({"throttle": (HW_SLOWDOWN, HW_THERMAL)}, FAILED, Remedy.DRAIN),
        ({"throttle": (HW_SLOWDOWN,)}, FAILED, Remedy.RESET),
        ({"throttle": (SW_THERMAL,)}, WARNED, Remedy.WATCH),
        ({"throttle": (SW_POWER_CAP,), "utilization_percent": 100, "clock_mhz": 900}, PASSED, Remedy.NONE),
        ({"throttle": (), "utilization_percent": 100, "clock_mhz": 900}, WARNED, Remedy.WATCH),
        ({"throttle": (), "utilization_percent": 10, "clock_mhz": 345}, PASSED, Remedy.NONE),
    ],
)
def test_reduced_clocks_are_judged_by_their_reason(
    changes: dict[str, object], verdict: Verdict, remedy: Remedy
) -> None:
    found = judge_clocks(one(**changes))
    assert (found.verdict, found.remedy) == (verdict, remedy)


def test_many_corrected_errors_cause_a_warning() -> None:
    assert judge_ecc(one(ecc_corrected=20_000_001)).verdict is WARNED
    assert judge_ecc(one(ecc_corrected=20_000_000)).verdict is PASSED
    assert judge_ecc(one(ecc_corrected=30_000_000), corrected=5e7).verdict is PASSED


def test_gpus_are_compared_with_slurm_and_the_bus() -> None:
    assert judge_count(GpuCount(GPUS, 2, 0)).verdict is PASSED
    assert judge_count(GpuCount(GPUS, 4, 0)).text == "2 of 4 GPUs are present"
    assert judge_count(GpuCount(GPUS, None, 3)).verdict is FAILED
    assert judge_count(GpuCount((), 0, 0)).verdict is PASSED


def test_the_number_of_nvlinks_depends_on_the_model() -> None:
    kinds = ("a100", "h100", "h200", "b200", "gb200", "l40s", "nonsense", "")
    assert [nvlinks_of(kind) for kind in kinds] == [12, 18, 18, 18, 18, 0, 0, 0]


# Fabric


def ports(*found: Port, expected: int = 0, booted_at: float = 0.0) -> Ports:
    return Ports(found, expected, NOW, booted_at)


def test_only_a_port_that_was_up_before_must_be_up() -> None:
    up, down = Port("a/1"), Port("b/1", "DOWN")
    assert judge_ports(ports(up, down, expected=1)).verdict is PASSED
    assert judge_ports(ports(up, down, expected=2)).verdict is FAILED
    assert judge_ports(ports(up, expected=2)).text == "1 of 2 ports are up: the others are missing"
    assert judge_ports(ports(down)).verdict is WARNED
    assert judge_ports(ports(up, down, expected=1), count=2).verdict is FAILED


def test_flaps_count_for_six_hours_except_after_boot() -> None:
    often = Port("a/1", flaps=(NOW - 7 * 3600, NOW - 600, NOW - 300))
    assert judge_flaps(ports(often)).text == "a/1 went down 2 times within 6 h"
    assert judge_flaps(ports(often), most=2).verdict is PASSED
    assert judge_flaps(ports(often, booted_at=NOW - 700)).verdict is PASSED
    assert judge_flaps(ports(replace(often, flaps=(NOW - 600,)))).verdict is PASSED


def test_port_errors_cause_only_a_warning() -> None:
    bad = ports(Port("a/1", errors={"symbol_error": 101, "port_rcv_errors": 7}))
    assert (judge_port_errors(bad).verdict, judge_port_errors(bad).code) == (WARNED, "symbol_error")
    assert judge_port_errors(bad, most=1000).verdict is PASSED


# Host


@pytest.mark.parametrize(("free_mib", "verdict"), [(9000, PASSED), (8999, WARNED), (5000, WARNED), (4999, FAILED)])
def test_memory_is_compared_with_what_slurm_promises(free_mib: int, verdict: Verdict) -> None:
    meminfo = f"MemAvailable:   {free_mib * 1024} kB\n"
    assert judge_memory(MemoryUse(meminfo, 10000)).verdict is verdict
    assert judge_memory(MemoryUse(meminfo, None)).verdict is PASSED


@pytest.mark.parametrize(
    ("clock", "verdict"),
    [
        (ClockOffset(0.49), PASSED), (ClockOffset(-0.5), WARNED), (ClockOffset(-5.0), FAILED),
        (ClockOffset(0.0, kept=False), WARNED),
        (ClockOffset(None, kept=True), PASSED), (ClockOffset(None, kept=False), WARNED),
    ],
)  # fmt: skip
def test_clock_offset_and_synchronization_are_judged(clock: ClockOffset, verdict: Verdict) -> None:
    assert judge_clock(clock).verdict is verdict


def test_a_process_is_stuck_after_a_long_wait() -> None:
    waits = WaitingProcess(7, "cp", "D", NOW - 301)
    assert judge_stuck(BlockedProcesses((waits,), NOW)).remedy is Remedy.REBOOT
    assert judge_stuck(BlockedProcesses((replace(waits, since=NOW - 299),), NOW)).verdict is PASSED
    assert judge_stuck(BlockedProcesses((replace(waits, state="Z"),), NOW)).verdict is PASSED


def said(*lines: str, level: int = 3) -> KernelLines:
    return KernelLines(tuple(LogLine(NOW - 10, line, level) for line in lines), NOW)


def test_out_of_memory_counts_only_for_the_whole_node() -> None:
    kill = "ut of memory: Killed process 42 (python) total-vm:1kB"
    assert judge_oom(said(f"O{kill}")).verdict is WARNED
    assert judge_oom(said(f"Memory cgroup o{kill}")).verdict is PASSED
    assert judge_oom(said(f"O{kill}".replace("python", "munged"))).remedy is Remedy.REBOOT
    of_munge = f"Memory cgroup o{kill}, UID:105 pgtables:2kB".replace("python", "munged")
    assert judge_oom(said(of_munge)).remedy is Remedy.REBOOT
    assert judge_oom(KernelLines((LogLine(NOW - 3601, f"O{kill}"),), NOW)).verdict is PASSED


def test_users_process_with_the_name_of_a_daemon_is_no_killed_daemon():
    kill = "ut of memory: Killed process 42 (slurmd) total-vm:1kB, UID:1001 pgtables:2kB"
    assert judge_oom(said(f"Memory cgroup o{kill}")).verdict is PASSED
    assert judge_oom(said(f"O{kill}")).verdict is WARNED


def test_other_log_lines_count_only_if_critical_and_not_allowed() -> None:
    assert judge_kernel_log(said("br0: port 3 entered disabled state", level=6)).verdict is PASSED
    assert judge_kernel_log(said("words", level=2)).verdict is WARNED
    assert judge_kernel_log(said("CPU12: Core temperature above threshold, throttled", level=2)).verdict is PASSED
    # Xids belong to another check
    assert judge_kernel_log(said("NVRM: Xid (PCI:0000:41:00): 79", level=2)).verdict is PASSED
    assert judge_kernel_log(said("watchdog: BUG: soft lockup - CPU#3 stuck for 26s!", level=0)).verdict is WARNED
