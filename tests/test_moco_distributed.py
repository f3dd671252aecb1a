"""MoCo and JCL on 1, 2 and 4 processes: the same loss, gradients, queue and statistics from the same global batch."""

import importlib
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import common

METHODS = {  # (file, model, flags, what forward gets besides views and step)
    "moco v2": ("moco_jointcrop", "MoCo", ["--queue", "24", "--bn-groups", "4"], ()),
    "moco v3": ("moco_jointcrop", "MoCoV3", ["--moco", "v3"], ()),
    "jcl": ("jcl", "JCL", ["--queue", "24", "--bn-groups", "4"], (4.0,)),
}


def two_steps(rank, world, port, method, path):
    """Two steps of float64 on this process's part of one global batch; the first process writes what it got."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    file, name, flags, rest = METHODS[method]
    module = importlib.import_module(file)
    small = ["--image-size", "16", "--batch-size", "16", "--device", "cpu", *flags]
    args = module.parse_args(["--arch", "resnet_micro", *small])
    args.bf16 = False
    common.join_processes(args)
    torch.manual_seed(0)
    model = getattr(module, name)(args)
    if name == "MoCoV3":
        model = module.synchronize_batch_norms(model).double()
    else:
        model = module.split_batch_norms(model, args.bn_groups).double()
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if world > 1 else model
    views = 1 + getattr(args, "num_keys", 1)
    batch = torch.randn(views, 16, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = batch.view(views, world, -1, 3, 16, 16)[:, rank]
    losses = []
    for step in range(2):
        model.zero_grad()
        loss, keys, _ = wrapped(list(mine), step, *rest)
        loss.backward()
        model.update(0.9)
        module.average_statistics(model)
        if keys is not None:
            model.queue.enqueue(keys)
        losses.append(module.gather(loss.detach().view(1)).mean())
    state = model.state_dict()
    for name, value in state.items():  # the same on every process
        everyone = module.gather(value.reshape(1, -1))
        assert all(torch.equal(row, everyone[0]) for row in everyone), name
    if rank == 0:
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        torch.save({"losses": losses, "gradients": gradients, "state": state}, path)
    if world > 1:
        del wrapped  # before the group: in torch 2.11 a DDP that goes last can hang for ever
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_one_two_and_four_processes_agree(method, tmp_path):
    results = []
    for world in (1, 2, 4):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        path = str(tmp_path / f"{world}.pt")
        if world == 1:
            two_steps(0, 1, port, method, path)
        else:
            mp.spawn(two_steps, (world, port, method, path), nprocs=world)
        results.append(torch.load(path, weights_only=True))
    for other in results[1:]:
        torch.testing.assert_close(other["losses"], results[0]["losses"], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(other["gradients"], results[0]["gradients"], rtol=1e-8, atol=1e-10)
        for name, value in results[0]["state"].items():
            if not name.endswith("num_batches_tracked"):  # which nothing reads
                torch.testing.assert_close(other["state"][name], value, rtol=1e-9, atol=1e-10, msg=name)
