"""The training that `restart.py` disturbs: a small model with DDP over gloo, a line for every completed step."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    life = f"{os.getpid()}.{time.time_ns()}"
    with (folder / f"rank{dist.get_rank()}.steps").open("a", buffering=1) as steps:
        for step in range(1_000_000):
            loss = model(torch.randn(8, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.write(f"{time.time():.6f} {life} {step} {os.environ['WORLD_SIZE']}\n")
            time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
