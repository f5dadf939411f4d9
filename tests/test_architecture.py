"""Architecture rules: packages import only what the table allows, only `system/` starts processes, only `cli/` prints,
and no code compares our own messages.

The rules read source text, and each one is also tested on a small bad example.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.prose_rules import SENTENCE, Module, constants_of, decisions_on_messages, decisions_on_prose, states_as_text

PACKAGE = "dalsegno"
ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / PACKAGE
PAGE = ROOT / "docs/architecture.md"

# ---- the table of imports that each room may have, in addition to its own modules

LAYER_1 = ("errors", "printable", "log", "hostlist", "image_name", "programs", "system", "wire", "hardware")
UP_TO_2 = (*LAYER_1, "spec")
UP_TO_3 = (*UP_TO_2, "slurm", "containers", "health", "storage")
UP_TO_4 = (*UP_TO_3, "node_agent", "users", "runs")
UP_TO_5 = (*UP_TO_4, "bench", "setup")
# The protocol between a worker and its launcher, and the files in shared memory. None of these modules import torch.
TRAIN_TALK = (
    "train.contract", "train.errors", "train.groups", "train.keeper", "train.memory", "train.saver",
)  # fmt: skip
TRAIN_LEFT = ("train.contract", "train.memory.files")  # the files that a run leaves on a node
UP_TO_7 = (
    *UP_TO_5, "adopt", "inject", "targets", "observe", "recovery", "train", "demo", "drill", "why", "overview",
    "doctor",
)  # fmt: skip
EXPOSITION = "observe.exposition"  # the text format of metrics: values in, text out; it imports nothing

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "printable": (),
    "log": ("errors", "printable"),
    "wire": (),  # runs on nodes that may have only Python 3.9
    "train": ("wire",),
    "hostlist": ("errors",),
    "image_name": ("errors", "hardware"),
    "programs": (),  # loads a program by name, whatever its room
    "system": ("errors", "log", "printable"),
    "hardware": ("errors",),
    "spec": ("errors", "hostlist", "image_name", "hardware"),
    "slurm": UP_TO_2,
    "containers": UP_TO_2,
    "storage": UP_TO_2,
    "health": (*UP_TO_2, *TRAIN_LEFT),
    "node_agent": (*UP_TO_3, *TRAIN_LEFT, EXPOSITION),
    "adopt": UP_TO_3,  # describes clusters that Dal Segno did not create, and changes nothing
    "users": UP_TO_3,
    "runs": (*UP_TO_3, *TRAIN_TALK, EXPOSITION),
    "bench": UP_TO_4,
    "setup": UP_TO_4,
    "inject": (*UP_TO_5, *TRAIN_LEFT),  # uses the access that a target provides, and names no target
    "targets": (*UP_TO_5, "inject", "observe"),
    "observe": UP_TO_5,  # metrics, Prometheus, dashboards; it names no target
    "recovery": (*UP_TO_4, *TRAIN_TALK, "targets.base", "observe"),
    "why": (*UP_TO_4, "train.contract", "recovery"),  # the timeline of a node, run or job, and its conclusion
    "doctor": (*UP_TO_4, "train.disk", "why"),  # what is wrong with a job, and the fix
    "overview": (*UP_TO_4, "targets.base", "recovery", "observe"),  # a whole cluster at one moment, and the verdict
    "drill": (
        *UP_TO_4,
        "train",
        "targets.base",
        "inject.faults",
        "recovery.journal.event",
        "recovery.decisions.phase",
    ),  # random faults, and a report of their cost
    "demo": (*UP_TO_3, "drill", "inject.faults"),  # the scenes of `dalsegno demo`
    "cluster": UP_TO_7,
    "controller": (*UP_TO_7, "cluster"),  # wiring, as `cluster` is: the controller's program
    "web": UP_TO_7,  # pages, sessions and actions; it names no target
    "observer": (*UP_TO_7, "web"),  # wiring: the program that serves metrics and the web page
    "cli": (*UP_TO_7, "cluster", "web"),
    "__init__": (),
    "__main__": ("cli",),
}

# ---- exceptions: files that may do what is forbidden to all others, and why

STARTING_A_PROCESS = re.compile(
    r"(subprocess|multiprocessing|pty)(\.\w+)*"
    r"|os\.(fork|forkpty|system|popen|posix_spawnp?|exec[lv]\w*|spawn\w+)"
    r"|asyncio\.(create_subprocess_\w+|subprocess(\.\w+)*)"
    r"|concurrent\.futures\.(process(\.\w+)*|ProcessPoolExecutor)"
)
MAY_START_PROCESSES = {
    "system/": "the one door to the world",
    "runs/agent/warm.py": "the warm parent forks workers: that is what it is for",
    "runs/agent/agent.py": "an agent that nobody leads any more ends as the command that queues its job again",
    "runs/agent/parent.py": "starts the warm parent, in the user's own Python, where `system/` may not be",
    "runs/agent/script.py": "a worker that is not Python becomes its program",
    "train/saver_client.py": "starts the saver where no warm parent can fork it; `system/` may not be there",
    "runs/agent/evidence.py": "py-spy is asked on the node where the worker hangs",
    "setup/host_inspector.py": "runs alone on a host where nothing of ours is installed",
    "setup/machine_record.py": "runs alone on a host where nothing of ours is installed",
    "setup/machine_services.py": "runs alone on a host where nothing of ours is installed",
}

PRINTING = re.compile(
    r"print|click\.(echo\w*|secho)|rich\.(print\w*|get_console|console\.Console)"
    r"|sys\.(__)?std(out|err)(__)?\.(write|writelines|buffer)(\.\w+)*"
)
MAY_PRINT = {
    "cli/": "the one printer",
    "system/guest/init.py": "boots hosts, and prints how each of them did for who called it",
    "runs/agent/script.py": "ends a script as Python itself would, `sys.exit('why')` included",
    "runs/auto_resume/srun_step.py": "stands in srun's place, and speaks on stderr as srun does",
    "health/readers/nvml_process.py": "a program of its own, whose answer is what it prints",
    "inject/worker_program.py": "a program of its own, whose answer is what it prints",
    "storage/probe.py": "a program of its own, whose answer is what it prints",
    "setup/host_inspector.py": "a program of its own, whose answer is what it prints",
    "train/checkpointer.py": "speaks to the user from inside their script, on stderr",
    "bench/collectives/collective_measure.py": "a program of its own, whose answer is what it prints",
    "bench/collectives/pairs_measure.py": "a program of its own, whose answer is what it prints",
    "bench/node/device_measure.py": "a program of its own, whose answer is what it prints",
    "bench/node/storage_measure.py": "a program of its own, whose answer is what it prints",
    "bench/node/versions_measure.py": "a program of its own, whose answer is what it prints",
    "targets/local/nvidia_smi.py": "a stand-alone program that runs inside virtual hosts",
    "setup/machine_record.py": "a program of its own, whose answer is what it prints",
}

# These modules parse messages of other programs into values once. All other modules compare enums.
MAY_READ_SENTENCES = {
    "slurm/parse/": "what Slurm's commands answer, and the code that the container plugin prints through srun",
    "slurm/client.py": "what Slurm's commands answer when something is gone, or so already",
    "runs/agent/flight_dump.py": "what gloo says of a rank that did not arrive",
    "runs/coordinator/generations/causes.py": "Python's tracebacks, and what torch and NCCL say of a lost peer",
    "runs/hang.py": "stacks, as Python's faulthandler and py-spy write them",
    "runs/logs.py": "Python's tracebacks",
    "runs/agent/evidence.py": "Python's tracebacks, and errors of PyTorch, CUDA and NCCL in them",
    "runs/status.py": "messages of status files that were written before they named their cause",
    "health/checks/": "the kernel, munge, chrony",
    "health/readers/": "nvidia-smi and the kernel's log",
    "health/xids.py": "the driver's lines in the kernel's log",
    "bench/nccl/parse.py": "nccl-tests",
    "bench/nccl/debug.py": "NCCL's lines with NCCL_DEBUG",
    "cli/measure/certify_parts.py": "stderr of a benchmark of ours: the error is shown, lines of progress are not",
    "containers/import_image.py": "Enroot and curl",
    "containers/image_metadata.py": "unsquashfs and the start script of an image",
    "containers/named.py": "srun",
    "containers/native.py": "the C compiler",
    "containers/plugstack/": "ssh, srun and install on other hosts",
    "containers/squash.py": "mksquashfs",
    "demo/researchers.py": "sbatch",
    "doctor/logs.py": "Python, PyTorch, NCCL, torchrun, Slurm, conda and the NVIDIA driver",
    "runs/submit/container.py": "`srun --mpi=list`",
    "wire/instance_metadata.py": "the vendor's name in the firmware",
    "bench/collectives/collective_measure.py": "the kernel's /proc/cpuinfo",
    "runs/torchrun/args.py": "argparse",
    "setup/machine_record.py": "its own marks around a part of a file",
    "spec/document.py": "PyYAML",
    "inject/methods.py": "ip",
    "targets/parallelcluster/client.py": "pcluster, which gives no codes",
    "targets/cloud/credentials.py": "Terraform, whose log has OCI's message and no code",
    "targets/cloud/stacks.py": "CloudFormation, whose events have reasons only as text",
    "targets/oci/jobs.py": "Terraform's console, of which Resource Manager has only the text",
    "targets/local/sweep.py": "the command lines of processes",
    "train/disk/convert.py": "pickle",
    "users/homes.py": "authorized_keys, where two lines mark the cluster's keys",
    "users/login_files.py": "PAM files of hosts, where two lines mark our part",
}

# These modules compare values with names such as `text` that hold no message of ours, or only print each text once.
MAY_COMPARE_TEXTS = {
    "cli/training/statusline.py": "a state that a run waits in, possibly with Slurm's reason, is printed if it is new",
    "containers/store.py": "a name of an image, as the user writes it",
    "doctor/batch.py": "the lines of a batch script",
    "doctor/symptoms/program.py": "a path in a batch script",
    "runs/coordinator/nodes/node_rules.py": "Slurm's last message, which is logged once",
    "targets/local/plan.py": "the content of a file",
}

# Fields with the name of a state that hold text for people, or states that are shown unchanged or that other programs
# define.
STATES_OF_OTHERS = {
    "errors.py:Problem.what": "text of an error",
    "containers/plugstack/check.py:ContainerFinding.what": "text of a finding",
    "doctor/case.py:DoctorFinding.what": "text of a finding",
    "inject/faults.py:InjectableFault.what": "the description of a fault",
    "inject/worker_program.py:WantedWorker.what": "the name of a fault, or an order of the program's protocol",
    "targets/cloud/consequences.py:CapacityCheck.what": "the description of a capacity",
    "targets/cloud/cost.py:CostLine.what": "the description of a cost",
    "targets/cloud/stacks.py:StackDescription.status": "CloudFormation's word; `state` is ours",
    "targets/machines.py:MachineStatus.state": "HyperPod's words, shown as they are",
    "bench/": "reports of benchmarks",
    "hardware/": "the catalog's columns",
    "health/": "words of the kernel, the driver and the fabric",
    "node_agent/all_reduce.py:ReducedSums.kind": "torch's name of a backend",
    "slurm/": "Slurm's words, parsed where something depends on them",
    "runs/torchrun/args.py": "torchrun's --role is a name",
    "runs/submit/frameworks.py": "torchrun's --role is a name",
    "targets/base.py:NodeStatus.state": "sinfo's word, shown to people",
}

# Modules under 60 lines that a single other module of their room imports. Others belong in their importer.
FRAGMENT_LINES = 60
MAY_BE_A_FRAGMENT = {
    "runs/agent/store.py": "without a warm parent, the user's Python runs this file alone",
    "runs/coordinator/agents/connect.py": "the connection file; the coordinator has no room for it",
    "runs/coordinator/generations/admission.py": "one decision of the coordinator, which has no room for it",
    "runs/coordinator/shutdown.py": "the end of a run; the coordinator has no room for it",
    "targets/parallelcluster/platform_files.py": "pure, and the target that writes the files has no room for it",
    "web/pages/history.py": "pages have files of their own, and the application only dispatches",
}

NO_NAMES = {"of", "whom"}

TARGETS = tuple(f"{PACKAGE}.targets.{name}" for name in ("local", "ssh", "parallelcluster", "hyperpod", "oci"))
TARGET_NAMES = ("local", "existing", "ssh", "parallelcluster", "hyperpod", "oci")  # as in the cluster file
MAY_NAME_A_TARGET = {
    "targets/registry.py": "opens a target from a cluster file or from a state folder, and imports it only then",
    "programs.py": "daemons are started by name before anything is imported: a table of modules, as strings",
}


class Source(NamedTuple):
    """A module: its dotted name, its file below the package, its imports, and the names it uses."""

    module: str
    file: str
    imported: tuple[ast.Import | ast.ImportFrom, ...]
    named: tuple[ast.Name | ast.Attribute, ...]
    parsed: Module

    @property
    def room(self) -> str:
        return self.file.split("/")[0].removesuffix(".py")


class Use(NamedTuple):
    """A full name that a module imports or uses: `dalsegno.spec.load_spec`, `os.fork`, `print`."""

    name: str
    line: int


def source(file: str, text: str) -> Source:
    dotted = f"{PACKAGE}.{file.removesuffix('.py').replace('/', '.')}"
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))  # computed once, because it takes most of the time
    imported = tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    named = tuple(node for node in nodes if isinstance(node, ast.Name | ast.Attribute))
    name = dotted.removesuffix(".__init__")
    return Source(name, file, imported, named, Module(name, file, tree.body, nodes))


@cache
def read_sources() -> list[Source]:
    return [source(path.relative_to(SRC).as_posix(), path.read_text()) for path in sorted(SRC.rglob("*.py"))]


def imports(source: Source) -> Iterator[Use]:
    """Yield every import, also in functions and under TYPE_CHECKING."""
    for node in source.imported:
        if isinstance(node, ast.Import):
            yield from (Use(alias.name, node.lineno) for alias in node.names)
        else:
            base = _base(source, node)
            yield from (Use(f"{base}.{alias.name}", node.lineno) for alias in node.names)


def calls(source: Source) -> Iterator[Use]:
    """Yield every name or attribute, with its first part replaced by what was imported under that name."""
    known = dict(_known_names(source))
    for node in source.named:
        first, *rest = _words(node)
        yield Use(".".join([known.get(first, first), *rest]), node.lineno)


def _words(node: ast.expr) -> list[str]:
    """Split `a.b.c` into its words. If `a` is not a name, such as a call, the first word is empty."""
    if isinstance(node, ast.Attribute):
        return [*_words(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _known_names(source: Source) -> Iterator[tuple[str, str]]:
    for node in source.imported:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        else:
            for alias in node.names:
                yield alias.asname or alias.name, f"{_base(source, node)}.{alias.name}"


def _base(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    folder = source.module.split(".") if source.file.endswith("__init__.py") else source.module.split(".")[:-1]
    return ".".join([*folder[: len(folder) + 1 - node.level], *([node.module] if node.module else [])])


def wrong_imports(sources: Iterable[Source]) -> list[str]:
    return [
        f"{src.file}:{use.line}: `{src.room}` may not import {use.name}"
        for src in sources
        for use in imports(src)
        if use.name.startswith(f"{PACKAGE}.") and not _allowed(src.room, use.name.split(".")[1:])
    ]


def _allowed(room: str, parts: list[str]) -> bool:
    if parts[0] == room or parts == ["__version__"]:
        return True
    return any(parts[: len(door.split("."))] == door.split(".") for door in MAY_IMPORT.get(room, ()))


def named_targets(sources: Iterable[Source]) -> list[str]:
    """Return imports and strings that name a target outside of that target."""
    return [
        fault
        for target in TARGETS
        for src in sources
        if not src.file.startswith((f"targets/{target.rpartition('.')[2]}/", *MAY_NAME_A_TARGET))
        for fault in (*_imported_targets(src, target), *_written_targets(src, target))
    ]


def _imported_targets(src: Source, target: str) -> list[str]:
    return [f"{src.file}:{use.line}: {use.name}" for use in imports(src) if f"{use.name}.".startswith(f"{target}.")]


def _written_targets(src: Source, target: str) -> list[str]:
    return [
        f"{src.file}:{node.lineno}: {node.value}"
        for node in src.parsed.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and target in node.value
    ]


def decisions_on_targets(sources: Iterable[Source]) -> list[str]:
    """Return where code compares with the name of a target, or gives one to a call, a dict or a variable.

    The room of the cluster file and the targets may do so.
    """
    return [
        f"{src.file}:{node.lineno}: {ast.unparse(node)}"
        for src in sources
        if not src.file.startswith(("spec/", "targets/"))
        for node in src.parsed.nodes
        if (isinstance(node, ast.Compare) and _names_target(node)) or _gives_target(node)
    ]


def _names_target(node: ast.Compare) -> bool:
    sides = [each for side in (node.left, *node.comparators) for each in ast.walk(side)]
    asked = any(isinstance(each, ast.Attribute) and each.attr in ("target", "kind") for each in sides)
    return asked and any(isinstance(each, ast.Constant) and each.value in TARGET_NAMES for each in sides)


def _gives_target(node: ast.AST) -> bool:
    """Return whether the name of a target is the second argument of `Cluster`, or the value of a `target`."""
    values: list[ast.expr] = []
    if isinstance(node, ast.Call):
        made = isinstance(node.func, ast.Name | ast.Attribute) and _words(node.func)[-1] == "Cluster"
        values = [*node.args[1:2]] * made + [each.value for each in node.keywords if each.arg == "target"]
    elif isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        values = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "target"]
    elif isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == "target" for x in node.targets):
        values = [node.value]
    parts = [each for value in values for each in ast.walk(value) if not isinstance(value, ast.Call)]
    return any(isinstance(each, ast.Constant) and each.value in TARGET_NAMES for each in parts)


def unknown_rooms(sources: Iterable[Source]) -> list[str]:
    return [f"{src.file}: no room `{src.room}` in the table" for src in sources if src.room not in MAY_IMPORT]


def behind_doors(sources: Iterable[Source], closed: re.Pattern[str], open_to: Mapping[str, str]) -> list[str]:
    """Return uses of `closed` names in files that are not in `open_to`."""
    faults = {
        f"{src.file}:{use.line}: {use.name}"
        for src in sources
        if not src.file.startswith(tuple(open_to))
        for use in (*imports(src), *calls(src))
        if closed.fullmatch(use.name)
    }
    return sorted(faults)


def cycle(sources: Iterable[Source]) -> list[str]:
    """Return modules that import each other in a cycle, the first also last; [] if there is none."""
    graph = _import_graph(list(sources))
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := visit(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


def _import_graph(sources: list[Source]) -> dict[str, set[str]]:
    modules = {src.module for src in sources}
    return {src.module: {m for use in imports(src) if (m := _module_of(use.name, modules))} for src in sources}


def _module_of(name: str, modules: set[str]) -> str:
    """Return the module that importing this name loads: `dalsegno.spec` for `dalsegno.spec.load_spec`."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def fragments(sources: Iterable[Source], lines: Mapping[str, int]) -> list[str]:
    """Return short modules that only one module imports, and that module is in the same room."""
    known = list(sources)
    importers: dict[str, set[str]] = {}
    rooms = {src.module: src.room for src in known}
    for importer, found in _import_graph(known).items():
        for each in found - {importer}:
            importers.setdefault(each, set()).add(importer)
    short = [src for src in known if lines[src.file] < FRAGMENT_LINES and not src.file.endswith("__init__.py")]
    alone = [src for src in short if len(importers.get(src.module, ())) == 1]
    return [src.file for src in alone if {rooms[each] for each in importers[src.module]} == {src.room}]


def module(file: str, text: str) -> Module:
    return source(file, text).parsed


def prose(modules: Iterable[Module]) -> list[str]:
    """Return comparisons with messages in files that are not allowed to make them."""
    modules = list(modules)
    constants = constants_of(modules)
    closed = [each for each in modules if not each.file.startswith(tuple(MAY_READ_SENTENCES))]
    return [fault for each in closed for fault in decisions_on_prose(each, constants)]


def compared_messages(modules: Iterable[Module]) -> list[str]:
    """Return comparisons of values that hold messages, in files that are not allowed to make them."""
    allowed = (*MAY_READ_SENTENCES, *MAY_COMPARE_TEXTS)
    closed = [each for each in modules if not each.file.startswith(allowed)]
    return [fault for each in closed for fault in decisions_on_messages(each)]


def compared_in_c(text: str) -> list[str]:
    """Return the strings that C code compares or searches for and that look like a message: `word: `, or two words."""
    searched = re.findall(r'\b(?:str(?:n?case|n)?cmp|str(?:case)?str|memcmp|memmem)\([^;"{}]*?"([^"%]*)"', text)
    return [each for each in searched if SENTENCE.search(each) or re.search(r"[A-Za-z]: $", each)]


def plain_states(modules: Iterable[Module]) -> list[str]:
    """Return states of our own that are plain strings."""
    found = [fault for each in modules for fault in states_as_text(each)]
    named = {fault: f"{fault.partition(':')[0]}:{fault.rpartition(' ')[2]}" for fault in found}
    return [fault for fault in found if not named[fault].startswith(tuple(STATES_OF_OTHERS))]


# The package follows the rules
def test_every_package_is_in_the_import_table():
    assert unknown_rooms(read_sources()) == []


def test_imports_follow_the_import_table():
    assert wrong_imports(read_sources()) == []


def test_only_the_registry_names_a_target():
    assert named_targets(read_sources()) == []


def test_no_decision_above_the_targets_depends_on_the_name_of_a_target():
    assert decisions_on_targets(read_sources()) == []


def test_no_import_cycles():
    assert cycle(read_sources()) == []


def test_only_system_starts_processes():
    assert behind_doors(read_sources(), STARTING_A_PROCESS, MAY_START_PROCESSES) == []


def test_only_the_cli_prints():
    assert behind_doors(read_sources(), PRINTING, MAY_PRINT) == []


def test_no_code_compares_our_own_messages():
    assert prose(each.parsed for each in read_sources()) == []


def test_no_code_compares_values_that_hold_our_messages():
    assert compared_messages(each.parsed for each in read_sources()) == []


def test_c_code_compares_no_messages():
    allowed = {"import.c": "hands the error and the hint of `image import` on to the user, and decides nothing by them"}
    found = {path.name for path in (SRC / "native").glob("*.c") if compared_in_c(path.read_text())}
    assert found == set(allowed)


def test_every_exception_for_texts_is_needed():
    found = [fault for each in read_sources() for fault in decisions_on_messages(each.parsed)]
    assert [file for file in MAY_COMPARE_TEXTS if not any(fault.startswith(file) for fault in found)] == []


def test_states_are_enums():
    assert plain_states(each.parsed for each in read_sources()) == []


def test_class_names_are_unique_in_the_package():
    assert shared_classes(read_sources()) == {}


def test_names_say_what_a_thing_is():
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    # Only files that seem to bind such a name are parsed, because that takes seconds for all of them.
    binds = re.compile(rf"\b(?:{'|'.join(NO_NAMES)})\b *(?:[^\w\s]|in\b)")
    tests = [module(file, text) for file, text in files.items() if binds.search(text)]
    assert prepositions([*(each.parsed for each in read_sources()), *tests]) == []


def test_no_file_is_longer_than_450_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in SRC.rglob("*.py")}
    assert {path.relative_to(SRC).as_posix(): lines for path, lines in lengths.items() if lines > 450} == {}


def test_every_short_module_with_a_single_importer_has_a_reason():
    lines = {each.file: len((SRC / each.file).read_text().splitlines()) for each in read_sources()}
    assert sorted(fragments(read_sources(), lines)) == sorted(MAY_BE_A_FRAGMENT)


def test_no_folder_has_more_than_25_modules():
    folders = Counter(path.parent.relative_to(SRC).as_posix() for path in SRC.rglob("*.py") if path.stem != "__init__")
    assert {folder: modules for folder, modules in folders.items() if modules > 25} == {}


def test_the_command_line_starts_without_the_heavy_libraries():
    heavy = {"pydantic", "rich", "yaml", "torch", "boto3"}
    code = "import sys, dalsegno.cli.main; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert heavy & set(done.stdout.split()) == set()


def test_a_local_cluster_is_opened_without_the_library_that_checks_cluster_files():
    code = "import sys, dalsegno.cluster, dalsegno.targets.local; print('pydantic' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert said.stdout.split() == ["False"], "`shell`, `env` and `status` would take 0.1 s longer"


def test_up_does_not_import_fault_injection_whatever_the_target():
    code = (
        "import pkgutil, sys\n"
        "import dalsegno.cli.cluster.up, dalsegno.cluster, dalsegno.spec.load, dalsegno.spec.resolve\n"
        "import dalsegno.targets as targets\n"
        "for each in pkgutil.walk_packages(targets.__path__, 'dalsegno.targets.'):\n"
        "    __import__(each.name)\n"
        "print(*[name for name in sys.modules if name.startswith(('dalsegno.inject', 'dalsegno.targets.registry'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == ["dalsegno.targets.registry"], "all modules of all targets are loaded, and no others"


def shared_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Return names that more than one class has, also within functions and classes, and the files of these classes.

    A leading underscore makes no difference: a reader who searches for `Run` also finds `_Run`.
    """
    found: dict[str, list[str]] = {}
    for each in sources:
        for node in each.parsed.nodes:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(each.file)
    return {name: files for name, files in found.items() if len(files) > 1}


def bound_names(module: Module) -> Iterator[Use]:
    """Yield the name of every parameter, field and variable of a module."""
    for node in module.nodes:
        if isinstance(node, ast.arg):
            yield Use(node.arg, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Use(node.id, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield Use(node.attr, node.lineno)


def prepositions(modules: Iterable[Module]) -> list[str]:
    """Return parameters, fields and variables that are named with a preposition instead of what they are."""
    return [
        f"{each.file}:{use.line}: {use.name}" for each in modules for use in bound_names(each) if use.name in NO_NAMES
    ]


# Each rule finds a bad example
def test_forbidden_import_is_found_anywhere_in_a_module():
    at_the_top = source("spec/model.py", "from dalsegno.slurm.versions import Version")
    in_a_function = source("slurm/client.py", "def f():\n    import dalsegno.targets.base")
    for_types_only = source(
        "hardware/catalog.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..spec import Spec"
    )
    assert wrong_imports([at_the_top, in_a_function, for_types_only]) == [
        "spec/model.py:1: `spec` may not import dalsegno.slurm.versions.Version",
        "slurm/client.py:2: `slurm` may not import dalsegno.targets.base",
        "hardware/catalog.py:3: `hardware` may not import dalsegno.spec.Spec",
    ]


def test_access_to_one_module_does_not_allow_its_package():
    contract = source("runs/agent/env.py", "from dalsegno.train.contract import RUN_ID")
    the_same = source("runs/agent/env.py", "from dalsegno.train import contract")
    snapshot = source("runs/agent/env.py", "from dalsegno.train import snapshot")
    assert wrong_imports([contract, the_same]) == []
    assert wrong_imports([snapshot]) == ["runs/agent/env.py:1: `runs` may not import dalsegno.train.snapshot"]


def test_a_target_that_is_named_outside_of_it_is_found():
    imported = source("cli/cluster/up.py", "def f():\n    from dalsegno.targets.local import LocalTarget")
    written = source("cluster.py", "import_module('dalsegno.targets.local.target')")
    its_own = source("targets/local/plan.py", "from dalsegno.targets.local import folder")
    other = source("cli/cluster/up.py", "from dalsegno.targets.localhost import x")
    assert named_targets([imported, written, its_own, other]) == [
        "cli/cluster/up.py:2: dalsegno.targets.local.LocalTarget",
        "cluster.py:1: dalsegno.targets.local.target",
    ]


def test_decision_on_the_name_of_a_target_is_found():
    ways = [
        "if cluster.target != 'ssh': pass",
        "if target.kind in ('oci', 'hyperpod'): pass",
        "x = 'local' == a.target",
        "facts = Cluster(name, 'existing', (), ())",
        "facts = replace(facts, target='ssh')",
        "content = {'target': 'existing'}",
        "target = chosen or 'local'",
    ]
    assert [way for way in ways if not decisions_on_targets([source("cli/x.py", way)])] == []
    fine = [
        "if cluster.is_foreign: pass",
        "if check.kind == 'gpu': pass",
        "if target.kind == other.kind: pass",
        "kind = Storage(path, name, type='existing')",
        "thread = Thread(target=run, name='ssh')",
    ]
    assert decisions_on_targets(source("cli/x.py", way) for way in fine) == []
    assert decisions_on_targets([source("spec/checks/x.py", ways[0]), source("targets/registry.py", ways[1])]) == []


def test_package_missing_from_the_table_is_found():
    assert unknown_rooms([source("utils/text.py", ""), source("helpers.py", "")]) == [
        "utils/text.py: no room `utils` in the table",
        "helpers.py: no room `helpers` in the table",
    ]


def test_import_cycle_is_found_and_package_with_its_modules_is_not_one():
    a = source("spec/a.py", "from dalsegno.spec.b import x")
    b = source("spec/b.py", "def f():\n    from . import c")
    c = source("spec/c.py", "import dalsegno.spec.a")
    assert cycle([a, b, c]) == ["dalsegno.spec.a", "dalsegno.spec.b", "dalsegno.spec.c", "dalsegno.spec.a"]
    init = source("spec/__init__.py", "from dalsegno.spec.a import x")
    assert cycle([init, a, source("spec/b.py", "x = 1")]) == []
    part_that_asks_its_package = source("spec/b.py", "from dalsegno.spec import x")
    assert cycle([init, a, part_that_asks_its_package]) != []


def test_short_module_with_a_single_importer_in_its_room_is_found():
    sources = [
        source("spec/a.py", "from dalsegno.spec import b, c, d"),
        source("spec/b.py", ""),
        source("spec/c.py", ""),
        source("spec/d.py", ""),
        source("spec/e.py", "from dalsegno.spec import c"),
        source("errors.py", ""),
        source("web/x.py", "import dalsegno.errors"),
    ]
    lines = {each.file: 59 for each in sources} | {"spec/d.py": 60}
    assert fragments(sources, lines) == ["spec/b.py"], "c has two importers, d is long, errors is of another room"


def test_every_way_to_start_a_process_is_found():
    ways = [
        "import subprocess", "from subprocess import run", "import multiprocessing.pool", "import os\nos.fork()",
        "import os as o\no.execvp('a', [])", "from os import posix_spawn", "import os\nos.system('a')",
        "import asyncio\nasyncio.create_subprocess_exec('a')", "from concurrent.futures import ProcessPoolExecutor",
    ]  # fmt: skip

    def found(file: str, text: str) -> list[str]:
        return behind_doors([source(file, text)], STARTING_A_PROCESS, MAY_START_PROCESSES)

    assert [way for way in ways if not found("slurm/x.py", way)] == []
    assert found("slurm/x.py", "import os\nos.getpid()\nexecute = 1\nos.path.join('a')") == []
    assert found("system/x.py", "import subprocess") == []


def test_every_way_to_print_is_found():
    ways = [
        "print('a')", "import click\nclick.echo('a')", "from click import secho", "import sys\nsys.stdout.write('a')",
        "from sys import stderr\nstderr.write('a')", "import sys\nsys.stdout.buffer.write(b'a')",
        "from rich.console import Console", "import rich\nrich.print('a')",
    ]  # fmt: skip

    def found(file: str, text: str) -> list[str]:
        return behind_doors([source(file, text)], PRINTING, MAY_PRINT)

    assert [way for way in ways if not found("spec/x.py", way)] == []
    assert found("spec/x.py", "import sys\npretty = sys.stdout.isatty()\nself.print_it = 1") == []
    assert found("cli/x.py", "print('a')") == []


def test_every_comparison_with_a_message_is_found():
    ways = [
        "if error == 'its connection broke': pass", "if text.startswith('begins to'): pass",
        "if 'left as it is' in text: pass", "if line.startswith('error: '): pass",
        "word = text.partition('; before that, ')[0]",
        "import re\nre.compile(r'did you mean `(\\w+)`')", "if f'{x} is lost' != text: pass",
        "BROKEN = ('it is gone', 'ok')\nif error in BROKEN: pass", "if text in ('a', 'it is gone'): pass",
        "SAYS = {'no answer within': 1}\nnext(v for sign, v in SAYS.items() if sign in text)",
        "match text:\n    case 'given up': pass",
    ]  # fmt: skip
    assert [way for way in ways if not prose([module("recovery/x.py", way)])] == []
    assert prose([module("slurm/parse/x.py", ways[0])]) == []


def test_every_comparison_of_values_that_hold_messages_is_found():
    ways = [
        "others = [trouble for trouble in troubles if trouble not in text]",
        "new = [text for text in here.findings if text not in elsewhere]",
        "note = None if own.said == text else Note(text)", "if before.summary != after.summary: pass",
        "line = int(problem.where.rpartition(':')[2])", "line = document.where(path).rpartition(':')[2]",
        "if job.sentence() in said: pass", "if finding.text.startswith(prefix): pass",
    ]  # fmt: skip
    assert [way for way in ways if not compared_messages([module("recovery/x.py", way)])] == []
    assert compared_messages([module("slurm/parse/x.py", ways[0])]) == []


def test_comparison_with_message_in_c_is_found():
    ways = ['if (strncmp(line, "error: ", 7) == 0)', 'at = strstr(text, "is no folder");', '!strcmp(why, "not found")']
    assert [way for way in ways if not compared_in_c(way)] == []
    assert compared_in_c('strcmp(flag, "ro") == 0; strncmp(words[i], "data=", 5); fail("is not a path")') == []


def test_presence_keywords_and_first_lines_of_messages_are_allowed():
    fine = [
        "if own.said != '': pass", "if key.text == '<<': pass", "if text in WORDS: pass", "if 'error' in text: pass",
        "first = error.text.partition('\\n')[0]", "words = status.message.split()", "if 'error' in message: pass",
        "if key in message: pass", "if own.about != about: pass", "if text: pass", "if text == found: pass",
    ]  # fmt: skip
    assert compared_messages(module(f"recovery/x{number}.py", text) for number, text in enumerate(fine)) == []


def test_comparison_with_message_of_another_module_is_found():
    judge = module("recovery/decisions/judge.py", "AGENT_DEAD = 'its agent is dead'")
    node = module(
        "why/node.py", "from dalsegno.recovery.decisions.judge import AGENT_DEAD\nlook = note.startswith(AGENT_DEAD)"
    )
    assert prose([judge, node]) == ["why/node.py:2: 'its agent is dead'"]


def test_keywords_and_messages_to_users_are_allowed():
    fine = [
        "if name == 'power-off': pass", "if key.startswith('x-'): pass", "words = line.split(', ')",
        "SAYS = {Kind.A: 'it is gone'}\nif kind in SAYS: pass", "text = f'{node} is lost'",
        "if state is State.GONE: say('it is gone')", "HINT = 'fix that'\nraise Error(what, hint=HINT)",
    ]  # fmt: skip
    assert prose(module(f"recovery/x{number}.py", text) for number, text in enumerate(fine)) == []


def test_state_held_as_plain_string_is_found():
    text = (
        "class Run:\n    phase: str\n    kind: str | None = None\n    role: 'str'\n"
        "    state: RunPhase\n    states: tuple[str, ...]\n    why: str\n    what: str\n"
    )
    assert plain_states([module("runs/x.py", text)]) == [
        "runs/x.py:2: Run.phase",
        "runs/x.py:3: Run.kind",
        "runs/x.py:4: Run.role",
        "runs/x.py:8: Run.what",
    ]
    other = module("targets/base.py", "class NodeStatus:\n    state: str\nclass JobStatus:\n    state: str")
    assert plain_states([other]) == ["targets/base.py:4: JobStatus.state"]


def test_class_name_in_two_modules_is_found():
    sources = [
        source("spec/facts.py", "class Node: ..."),
        source("spec/document.py", "class Node: ...\nclass Other: ..."),
    ]
    assert shared_classes(sources) == {"Node": ["spec/facts.py", "spec/document.py"]}


def test_class_names_that_differ_only_by_an_underscore_are_found():
    sources = [source("spec/facts.py", "class Node: ..."), source("spec/document.py", "class _Node: ...")]
    assert shared_classes(sources) == {"Node": ["spec/facts.py", "spec/document.py"]}


def test_class_name_in_two_functions_is_found():
    text = "def make():\n    class Node: ..."
    sources = [source("spec/facts.py", text), source("spec/document.py", text)]
    assert shared_classes(sources) == {"Node": ["spec/facts.py", "spec/document.py"]}


def test_names_that_are_prepositions_are_found():
    text = (
        "class Variable:\n    of: str\ndef f(of, *, name): ...\nkeys = lambda of: 1\nof = 1\nself.of = 2\n"
        "class Names:\n    @classmethod\n    def of(cls): ...\nNames.of()\n"
    )
    lines = [f"x.py:{line}: of" for line in (2, 3, 4, 5, 6)]
    assert sorted(prepositions([module("x.py", text)])) == lines


def test_every_path_on_the_page_about_the_architecture_exists():
    named = re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:py|c|sh))`", PAGE.read_text())
    assert len(named) > 100
    assert [path for path in named if not (SRC / path).exists() and not (ROOT / path).exists()] == []


def test_every_function_on_the_page_about_the_architecture_is_in_the_file_beside_it():
    table = PAGE.read_text().partition("## Where is it?")[2].partition("\n## ")[0]
    rows = [
        [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[2:4]] for line in table.splitlines() if "|" in line
    ]
    found = [(files, name) for files, names in rows for name in names]
    assert len(found) > 8
    sources = {path: (SRC / path).read_text() for files, _ in found for path in files if (SRC / path).is_file()}
    assert [
        name for files, name in found if not any(re.search(rf"\b{name}\(", sources.get(path, "")) for path in files)
    ] == []
