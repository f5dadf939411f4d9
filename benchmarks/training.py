"""The training that the benchmarks interrupt: a small model with DDP, over NCCL with a GPU, else over gloo."""

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
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    model = DistributedDataParallel(torch.nn.Linear(64, 64, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    life = f"{os.getpid()}.{time.time_ns()}"
    with (folder / f"rank{dist.get_rank()}.steps").open("a", buffering=1) as steps:
        for step in range(1_000_000):
            loss = model(torch.randn(8, 64, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if gpu:
                torch.cuda.synchronize()
            steps.write(f"{time.time():.6f} {life} {step} {os.environ['WORLD_SIZE']}\n")
            time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
