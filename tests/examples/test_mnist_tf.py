"""examples/mnist_tf.py: it reads the variables of `dalsegno run --framework tensorflow`; training needs TensorFlow."""

from __future__ import annotations

import importlib.util
import py_compile
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dalsegno.runs.submit.frameworks import ProcessLayout, tensorflow_env
from tests.examples.programs import ALONE, EXAMPLES
from tests.submit.torchrun.launcher import Launcher

SCRIPT = EXAMPLES / "mnist_tf.py"


@pytest.fixture
def mnist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mnist_tf", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_compiles_and_does_not_import_tensorflow_on_import(mnist: ModuleType, tmp_path: Path) -> None:
    assert py_compile.compile(str(SCRIPT), cfile=str(tmp_path / "mnist.pyc"), doraise=True)
    assert "tensorflow" not in sys.modules


def test_every_worker_finds_its_index_in_tf_config(mnist: ModuleType) -> None:
    world = ProcessLayout("run", ("train-1", "train-2"), nproc_per_node=2, port=7000)
    found = [mnist.find_place(tensorflow_env(world, rank, {})) for rank in range(world.size)]
    assert found == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [place.is_chief for place in found] == [True, False, False, False]


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}])
def test_process_without_tf_config_is_the_only_worker(mnist: ModuleType, environ: dict[str, str]) -> None:
    assert mnist.find_place(environ) == (0, 1)


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_example_trains_with_tensorflow(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    import numpy as np

    chance = np.random.default_rng(0)
    images, labels = chance.integers(0, 255, (256, 28, 28), "uint8"), chance.integers(0, 10, 256)
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels)
    launcher = Launcher(tmp_path, sys.executable)
    done = launcher.run(str(SCRIPT), "--data", "mnist.npz", "--epochs", "2", "--steps-per-epoch", "3", program=ALONE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Epoch 2/2" in done.stdout
