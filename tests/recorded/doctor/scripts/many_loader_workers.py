import torch
from torch.utils.data import DataLoader, TensorDataset

DataLoader(TensorDataset(torch.ones(8, 1)), num_workers=64)
