"""`dalsegno estimate`: time, cost, memory, failures and goodput of a training run, before it starts."""

from __future__ import annotations

import click

from dalsegno.cli import out
from dalsegno.cli.out import finite, json_option


@click.command()
@click.option("--params", required=True, metavar="N", help="Parameters of the model, such as 70B.")
@click.option("--tokens", required=True, metavar="N", help="Tokens to train on, such as 1.4T.")
@click.option("--instance", required=True, metavar="TYPE", help="Instance type of the nodes, such as p5.48xlarge.")
@click.option("--nodes", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="Number of nodes.")
@click.option(
    "--mfu", type=click.FloatRange(0, 1, min_open=True), default=0.4, show_default=True, callback=finite,
    help="Model FLOP utilization: share of the GPUs' peak that training reaches. Llama 3 405B: 0.38 to 0.43.",
)  # fmt: skip
@click.option(
    "--layers", type=click.IntRange(1, 100_000), help="Layers of the model.  [default: as common for its size]"
)
@click.option(
    "--hidden", type=click.IntRange(1, 10_000_000), help="Hidden size of the model.  [default: as common for its size]"
)
@click.option(
    "--sequence", type=click.IntRange(1, 1_000_000_000), default=8192, show_default=True, help="Tokens in a sequence."
)
@click.option(
    "--micro-batch", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="Sequences per GPU at once."
)
@click.option(
    "--failures", type=click.FloatRange(0, 1000), metavar="RATE", callback=finite,
    help="Failures per 1000 node-days.  [default: 6.5, published by Meta]",
)  # fmt: skip
@click.option(
    "--storage-gbytes-per-s", "storage", type=click.FloatRange(0.001, 1e6), metavar="RATE",
    callback=finite,
    help="GB/s at which all nodes together write a checkpoint.  [default: 2 per node, at most 20]",
)  # fmt: skip
@json_option
def command(
    params: str, tokens: str, instance: str, nodes: int, mfu: float, layers: int | None, hidden: int | None,
    sequence: int, micro_batch: int, failures: float | None, storage: float | None, json_: bool,
) -> None:  # fmt: skip
    """Estimate a training run: time, cost, memory per GPU, failures, and goodput.

    \b
    dalsegno estimate --params 70B --tokens 1.4T --instance p5.48xlarge --nodes 32
    """
    from dalsegno.bench import estimate as model
    from dalsegno.bench.training_memory import USABLE_SHARE, shape_of

    machine, gpu = model.find_training_instance(instance)
    shape = shape_of(model.parse_count(params, "--params"), layers, hidden, sequence, micro_batch)
    ask = model.TrainingAsk(
        shape, model.parse_count(tokens, "--tokens"), machine, nodes, mfu, failures, storage
    )  # fmt: skip
    found = model.estimate(ask)
    if json_:
        out.as_json(found.to_dict())
        return
    memory = machine.gpu_memory_gib or gpu.memory_gib
    out.data("\n".join(model.headline(found)) + "\n")
    out.data(
        f"memory per GPU: {USABLE_SHARE * memory:.1f} of {memory:g} GiB usable; {shape.layers} layers,"
        f" hidden size {shape.hidden}, {shape.micro_batch} x {shape.sequence} tokens"
    )
    out.table(model.MEMORY_HEADERS, model.memory_rows(found.memory))
    out.data("\n" + model.failure_text(found))
    out.table(model.GOODPUT_HEADERS, model.goodput_rows(found))
