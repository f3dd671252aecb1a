"""MoCo's demo on CIFAR-10 in plain torch, to be compared with `moco_jointcrop.py --moco v1 --joint none`.

    python tests/tools/moco_demo.py --data-dir DIR [--arch resnet_mini --epochs 30 --stop 10]

Only the encoder, the reading of images and kNN are the project's. The views are made image by image by torchvision, all
numbers are float32, and a group of batch norm has every eighth image, as in MoCo's notebook.
"""

import argparse
import copy
import math

import bench  # noqa: F401, which puts the project's root on the path
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import transforms

import common

GROUPS, QUEUE, MOMENTUM, TEMPERATURE, MEAN, STD = 8, 4096, 0.99, 0.1, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class GroupedBatchNorm(nn.BatchNorm2d):
    """Batch norm over each of GROUPS interleaved parts of the batch. `act`: what timm's batch norm does afterwards."""

    def forward(self, x):
        if not self.training:
            return self.act(super().forward(x))
        y, found = torch.empty_like(x), []
        for group in range(GROUPS):
            mean, var = self.running_mean.clone(), self.running_var.clone()
            y[group::GROUPS] = F.batch_norm(
                x[group::GROUPS], mean, var, self.weight, self.bias, True, self.momentum, self.eps
            )
            found.append(torch.stack([mean, var]))
        self.running_mean, self.running_var = torch.stack(found).mean(0)
        return self.act(y)


def grouped(module):
    """Replace the batch norms of a module."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            norm = GroupedBatchNorm(child.num_features)
            norm.act = getattr(child, "act", nn.Identity())
            setattr(module, name, norm)
        else:
            grouped(child)
    return module


class Pairs(torch.utils.data.Dataset):
    """Two views of each image."""

    def __init__(self, images):
        self.images = [common.to_rgb(images[i][0]) for i in range(len(images))]
        jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8)
        changes = [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), jitter]
        changes += [transforms.RandomGrayscale(0.2), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        self.view = transforms.Compose(changes)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.view(self.images[index]), self.view(self.images[index])


def main(args):
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    train, test = common.open_data("cifar10", args.data_dir)
    info = common.backbone_info(args.arch, 32, norm="cifar10") | dict(mean=MEAN, std=STD)
    backbone = common.build_backbone(info)
    query = nn.Sequential(backbone, nn.Linear(common.feature_width(backbone, 32), 128))
    query = grouped(query).to(device)
    key, queue = copy.deepcopy(query).requires_grad_(False), F.normalize(torch.randn(QUEUE, 128), dim=1).to(device)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.06, weight_decay=5e-4, momentum=0.9)
    options = common.loader_options(args.workers, device)
    loader = torch.utils.data.DataLoader(Pairs(train), 512, shuffle=True, drop_last=True, **options)
    for epoch in range(args.stop or args.epochs):
        losses = []
        optimizer.param_groups[0]["lr"] = 0.06 * (1 + math.cos(math.pi * epoch / args.epochs)) / 2
        for views in loader:
            x_q, x_k = (view.to(device) for view in views)
            with torch.no_grad():
                for theta_k, theta_q in zip(key.parameters(), query.parameters(), strict=True):
                    theta_k.copy_(MOMENTUM * theta_k + (1 - MOMENTUM) * theta_q)
                shuffle = torch.randperm(len(x_k), device=device)
                k = F.normalize(key(x_k[shuffle]), dim=1)[shuffle.argsort()]
            q = F.normalize(query(x_q), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / TEMPERATURE
            loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64, device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue = torch.cat([queue[len(k) :], k])
            losses.append(loss.item())
        print(f"epoch {epoch + 1}/{args.epochs}  loss {sum(losses) / len(losses):.3f}", flush=True)
    for what, encoder in (("features", query[0]), ("embeddings", query)):
        for temperature in (0.07, 0.1):
            scores = common.knn_monitor(encoder, info, train, test, device, args.workers, temperature=temperature)
            print(f"kNN of {what}, temperature {temperature}: {scores}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("moco_demo.py")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--stop", type=int, help="stop after this epoch of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=0)
    main(parser.parse_args())
