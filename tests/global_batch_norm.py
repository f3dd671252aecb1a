"""Batch norm over the batch of all CPU processes, for the proof that one process computes what several compute.

On GPUs that is torch's SyncBatchNorm, which CPUs do not have.
"""

from torch import nn

import common
from logo import GatherWithGradient


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm for (N, C) or (N, C, H, W). Each process must have as many images as the others."""

    def forward(self, x):
        all_but_channels = [0, *range(2, x.dim())]

        def global_mean(values):
            return GatherWithGradient.apply(values.mean(all_but_channels, keepdim=True)).mean(0, keepdim=True)

        mean = global_mean(x)
        var = global_mean((x - mean).square())
        count = common.rank_and_world()[1] * x.numel() // x.shape[1]  # values per channel
        self.running_mean.lerp_(mean.detach().flatten(), self.momentum)
        self.running_var.lerp_(var.detach().flatten() * count / (count - 1), self.momentum)
        y = (x - mean) * (var + self.eps).rsqrt()
        return y if self.weight is None else y * self.weight.view_as(mean) + self.bias.view_as(mean)


def synchronize(model):
    """Turn every batch norm of a model, which has parameters and statistics already, into one over all processes."""
    for norm in model.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
            norm.__class__ = GlobalBatchNorm
    return model
