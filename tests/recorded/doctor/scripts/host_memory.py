import torch

print(torch.empty(1 << 50, dtype=torch.uint8))
