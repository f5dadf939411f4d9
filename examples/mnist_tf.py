"""Train on handwritten digits with TensorFlow's MultiWorkerMirroredStrategy: every worker holds the model.

    python mnist_tf.py
    dalsegno run --framework tensorflow --nodes 2 --nproc-per-node 1 mnist_tf.py --data /shared/mnist.npz

`dalsegno run --framework tensorflow` sets TF_CONFIG, and restarts all workers when one is lost. Keras then resumes
from its own backup, which it writes at the end of every epoch.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple


class Place(NamedTuple):
    """The position of this process among the workers."""

    index: int
    workers: int

    @property
    def is_chief(self) -> bool:
        return self.index == 0


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Read the position from TF_CONFIG, as TensorFlow does; without it there is one worker."""
    config = json.loads(environ.get("TF_CONFIG") or "{}")
    workers = config.get("cluster", {}).get("worker", [])
    return Place(int(config.get("task", {}).get("index", 0)), max(1, len(workers)))


def main() -> None:
    asked, place = parse_arguments(), find_place()
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # must come before any other use of TensorFlow
    images, labels = load_digits(tf, asked.data)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=0).repeat()
    with strategy.scope():
        model = make_model(tf)
    model.fit(
        data.batch(asked.batch_size * place.workers),
        epochs=asked.epochs,
        steps_per_epoch=asked.steps_per_epoch,
        callbacks=[tf.keras.callbacks.BackupAndRestore(asked.checkpoints)],
        verbose=2 if place.is_chief else 0,
    )


def make_model(tf: Any) -> Any:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Input((28, 28)), layers.Flatten(), layers.Dense(128, "relu"), layers.Dropout(0.2), layers.Dense(10)]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


def load_digits(tf: Any, path: str | None) -> tuple[Any, Any]:
    """Load the data from a file that all nodes see, or let Keras download and cache it."""
    import numpy as np

    if path is None:
        (images, labels), _ = tf.keras.datasets.mnist.load_data()
    else:
        with np.load(path) as held:
            images, labels = held["x_train"], held["y_train"]
    return (images / 255.0).astype("float32"), labels.astype("int64")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="handwritten digits on several TensorFlow workers")
    parser.add_argument("--data", help="mnist.npz (default: downloaded by Keras)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps-per-epoch", type=int, default=70)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step on each worker (default 64)")
    parser.add_argument("--checkpoints", default="checkpoints/mnist", help="folder (default checkpoints/mnist)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
