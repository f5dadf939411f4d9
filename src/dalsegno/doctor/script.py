"""Read a training script without running it: the calls that matter for distributed training, with their lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

MAX_SCRIPT_BYTES = 1 << 20
_DISTRIBUTED = "torch.distributed."
_STARTS = ("init_process_group", "init_device_mesh")
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter", "barrier",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter",
)  # fmt: skip
# These libraries start the process group themselves.
FRAMEWORKS = frozenset(
    {"accelerate", "lightning", "pytorch_lightning", "deepspeed", "transformers", "horovod", "composer", "torchtitan",
     "megatron", "colossalai", "ray"}
)  # fmt: skip


@dataclass(frozen=True)
class ScriptCall:
    """A call in the script. `function` is the function that contains it; "" at the top level."""

    line: int
    name: str
    function: str = ""
    text: str = ""


@dataclass(frozen=True)
class ScriptFacts:
    """The facts about a script that its text shows."""

    path: str
    fault: str = ""  # why the text is not valid Python; "" if it is valid
    fault_line: int = 0
    imports: frozenset[str] = frozenset()  # the names of imported packages
    starts: tuple[ScriptCall, ...] = ()  # calls that start a process group
    backend: str = ""  # the backend in that call; "" if it is the default or chosen at run time
    backend_line: int = 0
    wrappers: tuple[ScriptCall, ...] = ()  # calls of DDP and FSDP
    collectives: tuple[ScriptCall, ...] = ()
    open_saves: tuple[ScriptCall, ...] = ()  # calls of torch.save in which all ranks write the same file
    cuda_line: int = 0  # the line that first uses a GPU; 0 if there is none
    port: int = 0  # a MASTER_PORT that the script sets
    port_line: int = 0
    options: frozenset[str] = frozenset()  # the options that its command line takes
    parses_options: bool = False
    files: tuple[str, ...] = ()  # file names of snapshots that the text contains
    is_program: bool = True  # false if the file only defines things that other modules import

    @property
    def distributed(self) -> bool:
        return bool(self.starts or self.wrappers or self.collectives)


def read_script(text: str, path: str) -> ScriptFacts:
    """Return the facts about a script from its text. The script is never run."""
    try:
        return ScriptReader(ast.parse(text), text.splitlines()).facts(path)
    except SyntaxError as error:
        return ScriptFacts(path, fault=error.msg, fault_line=error.lineno or 0)
    except RecursionError:  # valid Python may be nested too deeply, for example a sum of a thousand terms
        return ScriptFacts(path)
    except (ValueError, MemoryError) as error:
        return ScriptFacts(path, fault=f"{type(error).__name__}: it cannot be parsed")


class ScriptReader:
    """The reader of a syntax tree. It records each call with the functions and conditions around it."""

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        self._lines = lines
        self._names: dict[str, str] = {}  # local name -> full name
        self._calls: list[tuple[ast.Call, str, str, bool]] = []  # call, full name, function, depends on the rank
        self._imports: set[str] = set()
        self._constants: list[str] = []
        self._cuda_line = 0
        self._port = (0, 0)
        self._is_program = any(_does_something(node) for node in tree.body)
        self._learn_names(tree)
        for node in tree.body:
            self._walk(node, "", False)

    def _learn_names(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    self._imports.add(each.name.partition(".")[0])
                    self._names[each.asname or each.name.partition(".")[0]] = (
                        each.name if each.asname else each.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._imports.add(node.module.partition(".")[0])
                for each in node.names:
                    self._names[each.asname or each.name] = f"{node.module}.{each.name}"

    def _walk(self, node: ast.AST, function: str, by_rank: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, by_rank = node.name, False
        elif isinstance(node, (ast.If, ast.IfExp)):
            self._walk(node.test, function, by_rank)
            inside = by_rank or _names_rank(node.test)
            body = node.body if isinstance(node.body, list) else [node.body]
            other = node.orelse if isinstance(node.orelse, list) else [node.orelse]
            for each in (*body, *other):
                self._walk(each, function, inside)
            return
        elif isinstance(node, ast.Call):
            self._calls.append((node, self._full_name(node.func), function, by_rank))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._constants.append(node.value)
        if isinstance(node, ast.Assign):
            self._note_port(node)
        if not self._cuda_line and _uses_cuda(node):
            self._cuda_line = getattr(node, "lineno", 0)
        for child in ast.iter_child_nodes(node):
            self._walk(child, function, by_rank)
            if isinstance(child, ast.If) and _names_rank(child.test) and _leaves(child):
                by_rank = True  # after `if rank != 0: return`, the rest runs on some ranks only

    def _full_name(self, node: ast.expr) -> str:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ".".join(["", *reversed(parts)])
        return ".".join([self._names.get(node.id, node.id), *reversed(parts)])

    def _note_port(self, node: ast.Assign) -> None:
        target, value = node.targets[0], node.value
        key = target.slice if isinstance(target, ast.Subscript) else None
        named = isinstance(key, ast.Constant) and key.value == "MASTER_PORT"
        if named and isinstance(value, ast.Constant) and isinstance(value.value, (str, int)):
            text = str(value.value)
            self._port = (int(text), node.lineno) if text.isdecimal() and len(text) < 6 else self._port

    def facts(self, path: str) -> ScriptFacts:
        starts = [each for each in self._calls if each[1].rpartition(".")[2] in _STARTS]
        backend, backend_line = next(
            ((name, each[0].lineno) for each in starts if (name := _backend(each[0]))), ("", 0)
        )
        return ScriptFacts(
            path,
            imports=frozenset(self._imports),
            starts=tuple(self._as_call(each) for each in starts),
            backend=backend,
            backend_line=backend_line,
            wrappers=tuple(self._as_call(each) for each in self._calls if _is_wrapper(each[1])),
            collectives=tuple(self._as_call(each) for each in self._calls if _is_collective(each[1])),
            open_saves=tuple(self._open_saves()),
            cuda_line=self._cuda_line,
            port=self._port[0],
            port_line=self._port[1],
            options=frozenset(self._options()),
            parses_options=any(each[1].rpartition(".")[2] in ("parse_args", "add_argument") for each in self._calls),
            is_program=self._is_program,
            files=tuple(dict.fromkeys(text for text in self._constants if _is_snapshot(text)))[:20],
        )

    def _as_call(self, call: tuple[ast.Call, str, str, bool]) -> ScriptCall:
        line = call[0].lineno
        text = self._lines[line - 1].strip() if line <= len(self._lines) else ""
        return ScriptCall(line, call[1].rpartition(".")[2], call[2], text)

    def _open_saves(self) -> Iterator[ScriptCall]:
        """Yield the calls of save that every rank makes: no condition on the rank guards the call itself or the place
        where its function is called."""
        for each in self._calls:
            node, name, function, by_rank = each
            if name != "torch.save" or by_rank or any(_names_rank(argument) for argument in node.args[1:]):
                continue
            callers = [
                call
                for call in self._calls
                if function and call[1] != "torch.save" and call[1].rpartition(".")[2] == function
            ]
            if not callers or not all(call[3] for call in callers):
                yield self._as_call(each)

    def _options(self) -> Iterator[str]:
        for node, name, _, _ in self._calls:
            if name.rpartition(".")[2] == "add_argument":
                yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))


def _does_something(node: ast.stmt) -> bool:
    """Return whether a statement at the top level is more than a definition: a call, a loop, `if __name__ == …`."""
    if isinstance(node, (ast.If, ast.For, ast.While, ast.With)):
        return True
    value = node.value if isinstance(node, (ast.Expr, ast.Assign, ast.AnnAssign)) else None
    return isinstance(value, ast.Call)


def _is_wrapper(name: str) -> bool:
    return name.rpartition(".")[2] in _WRAPPERS and name.startswith("torch.")


def _is_collective(name: str) -> bool:
    return name.startswith(_DISTRIBUTED) and name.rpartition(".")[2] in _COLLECTIVES


def _backend(call: ast.Call) -> str:
    given = [word.value for word in call.keywords if word.arg == "backend"] or call.args[:1]
    value = given[0].value if given and isinstance(given[0], ast.Constant) else None
    return value.lower() if isinstance(value, str) else ""


def _names_rank(node: ast.AST) -> bool:
    """Return whether an expression depends on the rank: `rank == 0`, `is_main_process()`, `self.local_rank`."""
    words = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    words += [each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    words += [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return any(
        part in word.lower() for word in words for part in ("rank", "is_main", "main_process", "master", "gpu_id")
    )


def _leaves(node: ast.If) -> bool:
    return bool(node.body) and isinstance(node.body[-1], (ast.Return, ast.Continue, ast.Raise))


def _uses_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
        return True
    if isinstance(node, ast.Attribute) and node.attr == "set_device":
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition(":")[0] == "cuda"


def _is_snapshot(text: str) -> bool:
    return len(text) < 200 and text.endswith((".pt", ".pth", ".ckpt")) and "\n" not in text
