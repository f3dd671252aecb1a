"""The queue methods on 1, 2 and 4 processes: the same loss, gradients, queue and statistics from the same global batch."""

import importlib
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import common

MODELS = {"moco_jointcrop": "MoCo", "jcl": "JCL"}


def one_step(rank, world, port, method, path):
    """Two steps of float64 on this process's part of one global batch; the first process writes what it got."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    module = importlib.import_module(method)
    common.ARCHS["resnet_nano"] = ("resnet18", dict(layers=(1, 1, 1, 1), channels=(4, 8, 8, 8)))
    args = module.parse_args(["--arch", "resnet_nano", "--batch-size", "16", "--queue", "24", "--device", "cpu"])
    args.bn_groups = 4
    device = module.init_distributed(args)
    info = common.backbone_info(args.arch, 16, 4, args.norm, method=method, encoder="query")
    info["stem"] = "timm"
    torch.manual_seed(0)
    args.steps = 1
    model = getattr(module, MODELS[method])(args, info).double()
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if world > 1 else model
    views = 1 + getattr(args, "num_keys", 1)
    batch = torch.randn(views, 16, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = batch.view(views, world, -1, 3, 16, 16)[:, rank]
    losses = []
    for step in range(2):
        model.zero_grad()
        loss, _ = wrapped(list(mine), step)
        loss.backward()
        model.enqueue()
        module.average_buffers(model)
        losses.append(module.gather(loss.detach().view(1)).mean())
    if rank == 0:
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        torch.save({"losses": losses, "gradients": gradients, "state": model.state_dict(), "device": str(device)}, path)
    if world > 1:
        queues = module.gather(model.queue.keys.unsqueeze(0))
        assert all(torch.equal(q, queues[0]) for q in queues)  # the same on every process
        del wrapped  # before the group: in torch 2.11 a DDP that goes last can hang for ever
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", MODELS)
def test_one_two_and_four_processes_agree(method, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ARCHS", dict(common.ARCHS))
    results = []
    for world in (1, 2, 4):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        path = str(tmp_path / f"{world}.pt")
        if world == 1:
            one_step(0, 1, port, method, path)
        else:
            mp.spawn(one_step, (world, port, method, path), nprocs=world)
        results.append(torch.load(path, weights_only=True))
    for other in results[1:]:
        torch.testing.assert_close(other["losses"], results[0]["losses"], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(other["gradients"], results[0]["gradients"], rtol=1e-8, atol=1e-10)
        for name, value in results[0]["state"].items():
            torch.testing.assert_close(other["state"][name], value, rtol=1e-9, atol=1e-10, msg=name)
