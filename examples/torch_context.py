"""A script that calls scaled_dot_product_attention, put on a ring of two processes by one context."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from burst_attention.integrations.torch_context import context_parallel
from burst_attention.launch import run_processes

tokens, ranks = 1000, 2
torch.manual_seed(0)
x, weight = torch.randn(1, 4, tokens, 64), torch.randn(64, 64) / 8


def loss_of(x, weight):
    return scaled_dot_product_attention(x @ weight, x, x, is_causal=True).square().sum() / tokens


def train(ring):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    mine, parameter = x.clone(), weight.clone().requires_grad_()
    with context_parallel(mesh["cp"], buffers=[mine], buffer_seq_dims=[2]):
        loss = loss_of(mine, parameter)
        loss.backward()
    return loss.item(), parameter.grad


if __name__ == "__main__":
    parts = run_processes(train, ranks)
    parameter = weight.clone().requires_grad_()
    whole = loss_of(x, parameter)
    whole.backward()
    print("loss on one process and on the ring:", whole.item(), sum(loss for loss, _ in parts))
    difference = sum(gradient for _, gradient in parts) - parameter.grad
    print("largest difference of the gradient:", difference.abs().max().item())
