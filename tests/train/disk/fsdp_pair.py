"""One of two ranks with fully sharded models: it saves, then loads with torch alone and with Dal Segno. See test_fsdp.

Arguments: rank, the folder for its checkpoints, a folder with a checkpoint that other ranks wrote unsharded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dalsegno.train.disk.commit import commit
from dalsegno.train.disk.load import find_newest
from dalsegno.train.disk.write import write_share
from dalsegno.train.state import take


def trained(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(900, 1101), torch.nn.Linear(1101, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    model(torch.ones(2, 900)).sum().backward()
    opt.step()
    return model, opt


def local(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: tensor.to_local() for key, tensor in state.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def main(rank: int, folder: Path, unsharded: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, opt = trained(seed=1)
    write_share(
        folder, take({"model": model.state_dict(), "optimizer": opt.state_dict()}, None, 5, rank, 2), "run-a", 1
    )
    if rank == 0:
        commit(folder, 5, 2, "run-a", 1, lambda: True)
    whole = {key: tensor.full_tensor() for key, tensor in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    dist.barrier()

    other, other_opt = trained(seed=2)
    state = {"model": other.state_dict(), "optimizer": other_opt.state_dict()}
    dcp.load(state, checkpoint_id=folder / "latest")
    assert equal(local(state["model"]), local(model.state_dict())), "torch alone"
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.01

    third, _ = trained(seed=3)
    found = find_newest(folder, print)
    assert found
    found.fill({f"model.{key}": tensor for key, tensor in third.state_dict().items()})
    assert equal(local(third.state_dict()), local(model.state_dict())), "Dal Segno"

    found = find_newest(unsharded, print)
    assert found
    found.fill({f"model.{key}": tensor for key, tensor in third.state_dict().items()})
    assert all(tensor.full_tensor().eq(9).all() for tensor in third.state_dict().values()), (
        "from an unsharded checkpoint"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)  # torch's threads may abort the process while the interpreter is torn down
