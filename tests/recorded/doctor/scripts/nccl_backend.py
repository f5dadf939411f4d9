import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group(backend="nccl")
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    print(model)


main()
