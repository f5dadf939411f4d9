"""Tests that the guarantees of recovery hold for any sequence of events."""

from __future__ import annotations

import shutil

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.facts import is_active
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.fakes import FakeCluster
from dalsegno.slurm.facts import JobState, NodeFlag
from dalsegno.slurm.render import SPARE_REASON
from tests.recovery.clinic import Clinic

NODES = [f"n{number}" for number in range(1, 6)]
SPARE = "n5"
node_names = st.sampled_from(NODES)
then = st.integers(0, 6)  # rounds of the controller afterwards
remedies = st.sampled_from([Remedy.DRAIN, Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE])


class World(RuleBasedStateMachine):
    """A cluster with faults, jobs and administrators."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = 0
        self.foreign: dict[str, tuple[object, ...]] = {}

    @initialize(
        max_out=st.sampled_from([0.25, 0.5, 1.0]),
        per_hour=st.sampled_from([1, 4, 100]),
        can=st.sets(st.sampled_from([Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE])),
    )
    def begin(self, max_out: float, per_hour: int, can: set[Remedy]) -> None:
        policy = Policy(
            max_out=max_out, per_hour=per_hour, can=frozenset(can), spares=frozenset({SPARE}), boot_s=5, validate_s=5,
            person_s=10, removal_s=10, capacity_s=10, reboots_apart_s=30,
        )  # fmt: skip
        self.clinic = Clinic(FakeCluster.of(len(NODES)), policy)
        self.cluster = self.clinic.cluster
        spare = self.cluster.nodes[SPARE]
        spare.flags, spare.reason = frozenset({NodeFlag.DRAIN}), SPARE_REASON
        self.clinic.round()

    def teardown(self) -> None:
        if not hasattr(self, "clinic"):
            return
        self._all_comes_to_an_end()
        self.clinic.store.close()
        shutil.rmtree(self.clinic.folder)

    # Events

    @rule(node=node_names, cured_by=remedies, says=remedies, code=st.sampled_from(["79", "48"]), then=then)
    def a_gpu_breaks(self, node: str, cured_by: Remedy, says: Remedy, code: str, then: int) -> None:
        if self.cluster.nodes[node].machine.on:
            self.cluster.break_gpu(node, cured_by, code, says)
        self.the_controller_works(then)

    @rule(node=node_names, then=then)
    def power_is_cut(self, node: str, then: int) -> None:
        self.cluster.power_off(node)
        self.the_controller_works(then)

    @precondition(lambda self: self._working())
    @rule(data=st.data(), cut=st.booleans(), says=remedies, slow=st.booleans())
    def a_node_breaks_under_its_jobs(self, data: st.DataObject, cut: bool, says: Remedy, slow: bool) -> None:
        node = data.draw(st.sampled_from(self._working()))
        self.cluster.slow = slow
        if cut:
            self.cluster.power_off(node)
        else:
            self.cluster.break_gpu(node, says, "48", says)
        self.the_controller_works(6)

    def _working(self) -> list[str]:
        return sorted({name for job in self.cluster.queue.values() if is_active(job) for name in job.nodes})

    @rule(node=node_names)
    def power_comes_back(self, node: str) -> None:
        machine = self.cluster.nodes[node].machine
        if not machine.on:
            machine.on, machine.boot = True, self.cluster.machine().boot

    @rule(bad=st.integers(0, 4), same=st.integers(0, 2))
    def the_store_room_holds_bad_machines(self, bad: int, same: int) -> None:
        self.cluster.bad_replacements, self.cluster.same_gpus_again = bad, same

    @rule(nodes=st.sets(node_names, min_size=1, max_size=3), comment=st.sampled_from(["", "dalsegno:main"]), then=then)
    def a_job_starts(self, nodes: set[str], comment: str, then: int) -> None:
        known = [self.cluster.nodes[name] for name in nodes]
        if not any(node.down or node.flags or not node.machine.on for node in known):
            self.jobs += 1
            self.cluster.runs["train-k3f9"] = 1000
            name = "train-k3f9" if comment else ""
            self.cluster.start(self.jobs, *sorted(nodes), comment=comment, name=name, requeue=self.jobs % 3 != 0)
        self.the_controller_works(then)

    @rule()
    def a_run_wants_one_node_more(self) -> None:
        self.jobs += 1
        self.cluster.join(self.jobs)

    @rule(state=st.sampled_from([JobState.COMPLETED, JobState.FAILED]))
    def jobs_end(self, state: JobState) -> None:
        for job in [job for job in self.cluster.queue.values() if not job.state.ended]:
            self.cluster.end(job.id, state)

    @rule(node=node_names, then=then)
    def someone_drains(self, node: str, then: int) -> None:
        self.cluster.someone_drains(node)
        self.foreign[node] = self._slurm_side(node)
        self.the_controller_works(then)

    @rule(node=node_names, reason=st.sampled_from(["Prolog error", "Kill task failed"]), then=then)
    def slurm_drains(self, node: str, reason: str, then: int) -> None:
        self.cluster.slurm_drains(node, reason)
        self.the_controller_works(then)

    @rule(node=node_names)
    def someone_resumes(self, node: str) -> None:
        known = self.cluster.nodes[node]
        if known.machine.on:
            known.flags, known.down, known.reason, known.user = frozenset(), False, "", ""
            self.foreign.pop(node, None)

    @rule(rounds=st.integers(1, 60))
    def the_controller_s_cable_is_out_for_a_while(self, rounds: int) -> None:
        """Check that no action is taken meanwhile, unless too few nodes are left to detect the loss of contact."""
        self.cluster.blind = True
        self.clinic.round()
        before = self._deeds()
        if self.clinic.store.records.blind:
            self.clinic.rounds(rounds)
            assert not self.clinic.store.records.blind or self._deeds() == before
        self.cluster.blind = False

    @rule()
    def slurm_goes_away(self) -> None:
        self.cluster.slurm_answers = False

    @precondition(lambda self: not self.cluster.slurm_answers)
    @rule()
    def slurm_comes_back(self) -> None:
        self.cluster.slurm_answers = True

    @rule(answers=st.booleans())
    def nodes_answer_to_validation_or_do_not(self, answers: bool) -> None:
        self.cluster.validations = answers

    @rule(paused=st.booleans())
    def someone_pauses_or_resumes(self, paused: bool) -> None:
        self.clinic.store.pause(paused, "ada", self.cluster.now)

    @rule()
    def the_controller_dies_and_is_started_again(self) -> None:
        self.clinic.store.close()
        self.clinic.open()

    @rule(seconds=st.integers(1, 7200))
    def time_passes(self, seconds: int) -> None:
        self.clinic.wait(seconds)

    @rule(rounds=st.integers(1, 12))
    def the_controller_works(self, rounds: int) -> None:
        for _ in range(rounds):
            paused, answers = self.clinic.store.records.paused, self.cluster.slurm_answers
            before = self._deeds()
            out = self._out()
            self.clinic.round()
            if paused or not answers:
                assert self._deeds() == before
            self._out_is_bounded(out)

    # Guarantees

    @invariant()
    def nothing_forbidden_has_happened(self) -> None:
        """No repair touched a node with jobs, in service, or drained by an administrator."""
        assert not hasattr(self, "clinic") or self.cluster.forbidden == []

    @invariant()
    def what_someone_has_drained_is_as_they_left_it(self) -> None:
        for node, left in self.foreign.items():
            assert self._slurm_side(node) == left

    def _out_is_bounded(self, before: set[str]) -> None:
        most = max(1, int(self.clinic.policy.max_out * (len(NODES) - 1)))
        assert not self._out() - before or len(self._out()) <= most

    def _out(self) -> set[str]:
        """Return the nodes that should be in service and that the controller keeps out."""
        names = (set(NODES) - {SPARE}) - self.foreign.keys()
        return {name for name in names if self.cluster.nodes[name].reason.startswith("dalsegno:")}

    def _deeds(self) -> int:
        return sum(len(node.effects) for node in self.cluster.nodes.values())

    def _slurm_side(self, node: str) -> tuple[object, ...]:
        """Return the state that an administrator set; Slurm itself sets silent nodes down."""
        known = self.cluster.nodes[node]
        return known.flags, known.reason, known.user

    def _all_comes_to_an_end(self) -> None:
        """Check that every fault ends with the node back in service, or abandoned with a reason."""
        self.cluster.slurm_answers = self.cluster.validations = True
        self.cluster.bad_replacements = self.cluster.same_gpus_again = 0
        self.cluster.slow = False
        self.clinic.store.pause(False, "ada", self.cluster.now)
        self.jobs_end(JobState.COMPLETED)
        for _ in range(2 * len(NODES)):  # one hour per node and repetition, because of the hourly budgets
            self.clinic.settle()
            self.clinic.wait(3700)
            for job in self.cluster.queue:
                self.cluster.end(job)
        self.clinic.settle()
        for name in set(NODES) - self.foreign.keys():
            self._has_ended(name)
        self.nothing_forbidden_has_happened()

    def _has_ended(self, name: str) -> None:
        phase, node = self.clinic.phase(name), self.cluster.nodes[name]
        if phase is NodePhase.NEEDS_ADMIN:
            assert any(text.startswith("needs admin: ") and len(text) > 15 for text in self.clinic.texts(name))
        elif phase is NodePhase.SUSPECTED:
            out = [own for own in self.clinic.store.records.nodes.values() if own.out and own.node != SPARE]
            assert len(out) >= max(1, int(self.clinic.policy.max_out * (len(NODES) - 1)))
        else:
            excused = self.clinic.store.records.get(name).excuses
            assert phase in (NodePhase.IN_SERVICE, NodePhase.SPARE), (name, phase, self.clinic.texts(name)[-5:])
            assert node.machine.on or excused, (name, self.clinic.texts(name)[-5:])
            assert not node.machine.cured_by or excused, (name, self.clinic.texts(name)[-5:])


World.TestCase.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_guarantees_hold_for_any_sequence_of_events = World.TestCase
