"""What the examples in this folder share: their options, and a last line that shows whether two runs ended alike."""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import torch


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train a small model that can be killed at any moment")
    parser.add_argument("--steps", type=int, default=60, help="steps to train in all (default 60)")
    parser.add_argument("--checkpoints", default="checkpoints/frameworks", help="folder of the checkpoints")
    parser.add_argument("--disk-every", type=int, default=20, help="steps between two checkpoints on disk (default 20)")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds to wait after each step, to have time to kill"
    )
    parser.add_argument(
        "--with", dest="parts", nargs="*", default=[], help="loop.py: ema amp scaler compile workers stateful fsdp"
    )
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return parser.parse_args()


def slow_down(asked: argparse.Namespace) -> None:
    time.sleep(asked.pause)


def describe(model: torch.nn.Module, steps: int, losses: Any = (), scaler: Any = None) -> None:
    """Print the number of steps, digests of the weights and of the logged losses, and the state of a GradScaler."""
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.state_dict().values()]
    weights = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in whole)).hexdigest()
    logged = hashlib.sha256(repr(list(losses)).encode()).hexdigest()
    scale = f" scale {scaler['scale']:g}, {scaler['_growth_tracker']} steps old" if scaler else ""
    print(f"\nended after {steps} steps: weights {weights[:16]} losses {logged[:16]}{scale}", flush=True)
