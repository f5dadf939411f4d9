"""Recording rules: they provide names that the other exporters define, from names that are served."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from dalsegno.observe.dialects import DIALECTS, EFA_COUNTERS
from tests.observe.metric_names import DIALECT_NAMES, EFA, OWN, SCKYZO, SERVED, VPENSO

RULES = [(dialect, rule) for dialect, rules in DIALECTS.items() for rule in rules]
METRIC = re.compile(r"\b(?:slurm|dalsegno|training|node|DCGM)_\w+")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_recorded_names_are_those_of_the_dialect(dialect):
    assert {rule.record for rule in DIALECTS[dialect]} - DIALECT_NAMES[dialect] == set()


def test_rules_read_only_names_that_are_served_in_both_dialects():
    plain = (re.sub(r'"[^"]*"', "", rule.expr) for _, rule in RULES)
    read = {name for expr in plain for name in METRIC.findall(expr)} - {"slurm_nodes_total"}
    assert read - SERVED == set()
    assert {name for name in read if name.startswith("slurm_")} <= (VPENSO & SCKYZO) | OWN


def test_no_rule_records_a_name_that_the_observer_serves():
    double = {rule.record for _, rule in RULES} & SERVED
    assert double == {"slurm_nodes_total"}  # the recording rule gives way to the served metric
    rule = next(rule for _, rule in RULES if rule.record == "slurm_nodes_total")
    assert rule.expr.endswith('unless on () slurm_nodes_total{job=~"dalsegno|slurm"}')


def test_no_series_is_recorded_twice():
    recorded = Counter((rule.record, tuple(sorted(rule.labels.items()))) for _, rule in RULES)
    assert [name for name, times in recorded.items() if times > 1] == []


def test_every_efa_counter_has_its_otel_name():
    assert {f"node_amazonefa_{name}" for name in EFA_COUNTERS} == EFA
