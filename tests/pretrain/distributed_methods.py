"""Run by torchrun: one step of each pretraining method on a share of the batch; losses, gradients and what is kept."""

import sys

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from its2clr.config import DinoConfig, PretrainConfig
from its2clr.encoders.weights import create_network
from its2clr.pretrain.loop import prepare
from its2clr.settings import resolve_config

METHODS = ("moco", "byol", "dino", "bag_labels")
DINO = DinoConfig(hidden_dim=16, bottleneck_dim=8, output_dim=12, local_views=1)
NARROW = ["encoder.options={channels: [8, 8, 16, 16], stem_width: 8}", "projector={hidden_dim: 16, output_dim: 8}"]


def step_of(name, data, rows, wrap=lambda network: network):
    """Loss of the rows' views, the gradients it gives, and the copy and buffers after an update.

    Batch norm, whose statistics on a CPU are those of a process, is in evaluation mode.
    """
    torch.manual_seed(0)
    network = create_network(resolve_config("demo", NARROW)).double()
    method = prepare(network, PretrainConfig(method=name, queue_size=32, dino=DINO, momentum_encoder=0.5), 0)
    method.network.double().eval()
    views = [torch.cat([data["first"][rows], data["second"][rows]])]
    if method.crops is not None:
        views.append(data["crops"][rows])
    wrapped = wrap(method.network)  # averages gradients as long as it lives
    _, embeddings = wrapped(*views)
    loss = method.loss(embeddings, data["labels"][rows].repeat(2), None)
    loss.backward()
    if method.update is not None:
        method.update(0, 10)
    found = {f"{name}.loss": loss.detach()}
    for key, parameter in method.network.named_parameters():
        found[f"{name}.{key}"] = parameter.detach().clone() if parameter.grad is None else parameter.grad.clone()
    found |= {f"{name}.{key}": value.clone() for key, value in method.network.named_buffers() if "num_b" not in key}
    return found


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = load_file(sys.argv[1])
    mine = torch.arange(rank, len(data["labels"]), world)
    found = {}
    for name in METHODS:
        found |= step_of(name, data, mine, DistributedDataParallel)
        dist.all_reduce(found[f"{name}.loss"])
        found[f"{name}.loss"] /= world
    save_file({key: value.contiguous() for key, value in found.items()}, f"{sys.argv[2]}-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
