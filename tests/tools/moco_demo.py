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
VIEW = transforms.Compose([
    transforms.RandomResizedCrop(32),
    transforms.RandomHorizontalFlip(),
    transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
    transforms.RandomGrayscale(0.2),
    transforms.ToTensor(),
    transforms.Normalize(MEAN, STD),
])  # fmt: skip


class GroupedBatchNorm(nn.BatchNorm2d):
    """Batch norm over each of GROUPS interleaved parts of the batch."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        each = [v.repeat(GROUPS) for v in (self.running_mean, self.running_var, self.weight, self.bias)]
        groups = x.view(-1, GROUPS * x.shape[1], *x.shape[2:])  # a group's channels as channels of their own
        y = F.batch_norm(groups, *each, True, self.momentum, self.eps)
        self.running_mean, self.running_var = (v.view(GROUPS, -1).mean(0) for v in each[:2])
        return y.view_as(x)


def two_views(items):
    """A batch of each, of items (image, label)."""
    return [torch.stack([VIEW(image) for image, _ in items]) for _ in range(2)]


def main(args):
    torch.manual_seed(0)
    device = common.init_distributed()[0]
    train, test = common.open_data("cifar10", args.data_dir)
    info = common.backbone_info(args.arch, 32, norm="cifar10") | dict(mean=MEAN, std=STD)
    backbone = common.build_backbone(info, norm_layer=GroupedBatchNorm)
    query = nn.Sequential(backbone, nn.Linear(common.feature_width(backbone, 32), 128)).to(device)
    key, queue = copy.deepcopy(query).requires_grad_(False), F.normalize(torch.randn(QUEUE, 128), dim=1).to(device)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.06, weight_decay=5e-4, momentum=0.9)
    options = common.loader_options(args.workers, device)
    loader = torch.utils.data.DataLoader(train, 512, True, collate_fn=two_views, drop_last=True, **options)
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
    add = parser.add_argument
    add("--data-dir", required=True)
    add("--arch", default="resnet18")
    add("--epochs", type=int, default=200)
    add("--stop", type=int, help="stop after this epoch of the schedule")
    add("--workers", type=int, default=0)
    main(parser.parse_args())
