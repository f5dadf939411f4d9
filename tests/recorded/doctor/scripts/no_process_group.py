import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    model = DDP(torch.nn.Linear(20, 1))
    print(model)


if __name__ == "__main__":
    main()
