"""Run by torchrun: contrastive losses of a share of the batch, and the gradients of a small network."""

import sys

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from its2clr.losses.supcon import gathered_supervised_contrastive_loss
from its2clr.pretrain.simclr import simclr_objective


def losses(network, data, rows):
    """Both losses of the rows' two views, and the gradients they give."""
    found = {}
    for name in ("simclr", "supcon"):
        network.zero_grad()
        embeddings = network(torch.cat([data["first"][rows], data["second"][rows]]))
        labels, anchors = data["labels"][rows].repeat(2), data["anchors"][rows].bool().repeat(2)
        if name == "simclr":
            loss = simclr_objective(0.3)(embeddings, None, None)
        else:
            loss = gathered_supervised_contrastive_loss(embeddings, labels, anchors, 0.1)
        loss.backward()
        found[f"{name}.loss"] = loss.detach()
        for key, parameter in network.named_parameters():
            found[f"{name}.{key.removeprefix('module.')}"] = parameter.grad.clone()
    return found


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = load_file(sys.argv[1])
    mine = torch.arange(rank, len(data["labels"]), world)
    found = losses(DistributedDataParallel(build()), data, mine)
    for name in ("simclr.loss", "supcon.loss"):
        dist.all_reduce(found[name])
        found[name] /= world
    if rank == 0:
        save_file(found, sys.argv[2])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
