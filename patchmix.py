"""PatchMix: Inter-Instance Similarity Modeling for Contrastive Learning (Shen et al., arXiv 2306.12243).

Contrastive learning treats any two images as unrelated. They rarely are. PatchMix makes images whose relations are
known. It cuts M images of a batch into patches and puts patches of all M together, each at the place that it had. A ViT
then learns that such a mixed image is similar to each of its sources, in equal shares.

The encoder makes queries of images, and a momentum encoder makes keys. The negatives of a query are the other keys of
the batch. The loss is the sum of three contrasts. Without one of them, oto, no query would look like a natural image.

    Eq. 1-9       patch_mix           M images into one, patch by patch (Eq. 8-9 and 17: the same by flat indices)
    Eq. 10-12     mix_targets         the positives of a mixed query and their weights (also Eq. 18-19)
    Eq. 13        soft_info_nce       mto, mix to origin: a mixed query and the keys of its M sources, 1/M each
    Eq. 14        soft_info_nce       mtm, mix to mix: a mixed query and mixed keys, by the share of common sources
    Eq. 15        soft_info_nce       oto, origin to origin: an original query and the key of the same image
    Eq. 16        PatchMix.forward    their sum
    Algorithm 1   patch_mix (lines 2 to 7), mix_targets (8)
    Algorithm 2   PatchMix (lines 1, 2 and 7), main (3, 4, 10 and 11), PatchMix.forward (5, 6, 8, 9, the loss of 10)

    python patchmix.py                                                        # a laptop, no data
    python patchmix.py --dataset cifar10 --arch vit_tiny                      # one GPU
    torchrun --nproc_per_node=8 patchmix.py --dataset imagenet --data-dir DIR --arch vit_small

The baseline is MoCo v3, without its frozen patch projection and fixed positions. `--num-mix 1 --terms oto,mto` is
L(q2, k1) + L(q1, k2), its symmetric loss divided by 2 tau. (With M = 1, mtm is mto.) What PatchMix changes in it:
    queries of both views                     one view's queries are of mixed images      mix_in_slices
    L(q2, k1) + L(q1, k2)                     oto + mto + mtm, with mixed keys            PatchMix.forward
    one positive per query                    M, or 2M - 1, positives with weights        mix_targets
    InfoNCE                                   its sum over the weighted positives         soft_info_nce
Not here: the other mixes of Table 5 (CutMix and Mixup, RegionSwap, ResizeMix), and detection on COCO (Table 4).

Where the paper, which is the default, and the released code, `--variant released`, differ:
    D1 The terms. Paper: each counts 1, and mtm's weights sum to M. Released: oto counts 1, mto and mtm 0.5, mtm's
       weights sum to 1, and 0.1 of oto's targets is spread over all keys. So its M = 1 is not MoCo v3.
    D2 The number of images M. Paper: 3. Released: 2.
    D3 The attention heads of ViT-S. Paper (Table 8): 6. Released, and the paper's Fig. 11: 12.
    D4 ViT-T's keys. Paper: of a momentum encoder. Released: of the encoder, in training mode; this is `--momentum 0 0`.
    D5 The mixed query. Paper: of view 1, and the original one of view 2. Released: the reverse, `--mixed-view 2`.
    D6 Local crops. Paper ("4(224)" views): none. Released, on ImageNet: 8 of 96 px; large ones from 0.35 of the area.
    D7 The ring of images. Paper (Eq. 4, 10, 11: mod N): the batch. Released: a GPU's part. Here: a slice of the batch.
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import json
import math
from itertools import pairwise
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ========================================================= 1. hyper-parameters

# fmt: off
# {group: {name: (value, what it is, its limits or words)}}: the paper's for ImageNet, section 4.1.2, Tables 9 and 10.
# Each is a flag of its value's type, --num-mix 2, and args.NAME. Without limits, a number is not below 0. What the
# paper does not say is marked: released, or ours.
HYPERPARAMETERS = dict(
    loss=dict(
        num_mix=(3, "images that are mixed into one, M (Table 6); 1: no mixing", (1, math.inf)),
        mix_slices=(8, "equal slices of the batch; images are mixed within each (D7)", (1, math.inf)),  # ours
        mixed_view=(1, "the view, 1 or 2, whose mixed images are the queries (D5)", (1, 2)),
        terms=("oto,mto,mtm", "terms of the loss, Eq. 16: some of oto,mto,mtm (Table 7)"),
        term_weights=((1.0, 1.0, 1.0), "weights of oto, mto, mtm; local terms have 1"),
        local_crops=(0, "local crops per image, as queries of oto and mto (D6)"),
        smoothing=(0.0, "share of oto's targets that is spread over all keys (D1)", (0, 1)),
        temperature=(0.2, "temperature tau of the loss", (1e-9, math.inf)),
    ),
    model=dict(
        arch=("vit_small", "encoder: vit_micro, vit_tiny, vit_small, vit_base, or any timm model"),
        image_size=(224, "side of a view, in pixels", (1, math.inf)),
        patch_size=(16, "side of a patch, in pixels, of the ViT and of the mixing", (1, math.inf)),
        num_heads=("auto", "heads of the ViT's attention; auto: timm's (D3)", (1, math.inf, "auto")),
        drop_path=(0.1, "drop-path rate of the ViT's last block; earlier ones have less", (0, 1)),  # released
        hidden=(4096, "hidden size of the projector and the predictor (Table 9)", (1, math.inf)),
        dim=(256, "dimension of queries and keys (Table 9)", (1, math.inf)),
        momentum=((0.996, 1.0), "momentum mu, first and last; 0 0: no such encoder (D4)", (0, 1)),
    ),
    schedule=dict(
        epochs=(300, "epochs of the whole training", (1, math.inf)),  # its 10 of warm-up and "rest 260" make 270
        batch_size=(1024, "images per step, over all processes", (2, math.inf)),
        lr=(1e-3, "learning rate at --lr-batch; scaled linearly to --batch-size", (1e-9, math.inf)),  # ViT-S: 2e-3
        lr_batch=(1024, "batch size for which --lr is given", (1, math.inf)),
        min_lr=(1e-6, "last learning rate; if not given, it is scaled as the peak rate is"),  # released
        warmup=(10.0, "epochs of linear warm-up; if not given, it shrinks with --epochs"),
        weight_decay=((0.04, 0.4), "weight decay of AdamW, at the start and at the end"),
        betas=((0.9, 0.999), "betas of AdamW", (0, 0.999999)),  # released
    ),
    augmentation=dict(
        crop_scale=((0.05, 1.0), "smallest and largest share of the image that a crop has", (1e-9, 1)),
        local_size=(96, "side of a local crop, in pixels; by default at most half a view's", (1, math.inf)),  # released
        local_scale=((0.05, 0.35), "smallest and largest area of a local crop", (1e-9, 1)),  # released
        local_blur_p=(0.5, "probability of a blurred local crop", (0, 1)),  # released
        crop_ratio=((3 / 4, 4 / 3), "smallest and largest width / height of a crop", (1e-9, math.inf)),
        interpolation=("bicubic", "how a crop is resized", ("bilinear", "bicubic")),  # released
        jitter=((0.4, 0.4, 0.2, 0.1), "largest change of brightness, contrast, saturation and hue"),
        jitter_p=(0.8, "probability of these color changes", (0, 1)),
        gray_p=(0.2, "probability of a gray view", (0, 1)),
        blur_p=((1.0, 0.1), "probability of a blurred view, by T_1 and by T_2", (0, 1)),
        blur_sigma=((0.1, 2.0), "smallest and largest sigma of the blur, in pixels", (1e-9, math.inf)),
        solarize_p=((0.0, 0.2), "probability of a solarised view, by T_1 and by T_2", (0, 1)),
        flip_p=(0.5, "probability of a horizontal flip", (0, 1)),
        norm=("imagenet", "data set whose mean and standard deviation normalise the views", common.NORMS),
    ),
)
# fmt: on


# ================================================================ 2. the paper


def patch_mix(images, num_mix, patch_size, permutation=None):
    """Mix each image with the num_mix - 1 images that follow it in the batch, patch by patch (Algorithm 1, Eq. 1-7).

    The T patches are shuffled by one permutation for all images, and cut into M groups of S = floor(T / M). Mixed image
    i takes group m from image (i + m) mod N. Every patch stays at its place. The T mod M patches that are left over are
    those of image i, though its share in Eq. 13 remains 1/M. With M = 1 the images stay as they are.

    images: (N, C, H, W), any values. num_mix: M, from 1 to T. patch_size: p, which divides H and W. permutation: (T,)
    int64, the shuffle k of Eq. 2 for T = H/p * W/p patches; it is drawn if None.
    Returns the mixed images (N, C, H, W). Gradients pass through. Raises ValueError if these do not fit together.
    """
    if images.dim() != 4:
        raise ValueError(f"patch_mix takes images (N, C, H, W), not {tuple(images.shape)}")
    height, width = images.shape[2:]
    if height % patch_size or width % patch_size:
        raise ValueError(f"patches of {patch_size} px do not tile an image of {height} x {width}")
    rows, columns = height // patch_size, width // patch_size
    num_patches = rows * columns  # T, Eq. 1
    if not 1 <= num_mix <= num_patches:
        raise ValueError(f"num_mix must be from 1 to the {num_patches} patches of an image, not {num_mix}")
    if permutation is None:
        permutation = torch.randperm(num_patches)  # k, Eq. 2: Algorithm 1, line 2
    if sorted(permutation.tolist()) != list(range(num_patches)):
        raise ValueError(f"permutation must hold each of 0 to {num_patches - 1} once")
    # The pixels need not be shuffled and put back. It is enough to know in which group the patch at each place is.
    group_size = num_patches // num_mix  # S
    # Line 3, Eq. 3: the j-th shuffled patch is in group j // S. What is left over joins group 0, the image's own.
    group_of_shuffled = torch.arange(num_patches) // group_size
    group_of_shuffled[group_size * num_mix :] = 0
    # Line 7, Eq. 5 and 7: by r = argsort(k) the patches go back to their places, and so do their groups.
    group_of_patch = group_of_shuffled[permutation.cpu().argsort()].view(rows, columns)
    group_of_patch = group_of_patch.to(images.device, non_blocking=True)
    group_of_pixel = group_of_patch.repeat_interleave(patch_size, 0).repeat_interleave(patch_size, 1)
    mixed = images
    # Lines 4 to 6, Eq. 4 and 6: group m of row i is of image (i + m) mod N, in row i of the batch rolled by -m.
    for m in range(1, num_mix):
        mixed = torch.where(group_of_pixel == m, images.roll(-m, 0), mixed)
    return mixed


def mix_targets(n, num_mix, first=0):
    """Return the positives of mixed images: their sources, and the mixed images that share some with them (Eq. 10-12).

    n: the number of images that are mixed with each other, N. num_mix: M. first: the row of their first key among all
    keys: rank * N where each process mixes its own N images, and the keys of all processes are gathered.
    Returns (mto_index (n, M) int64, mto_weight (M,), mtm_index (n, 2M-1) int64, mtm_weight (2M-1,)). The indices are
    rows of keys, from `first` on, and go around: mod n. mto_weight is 1/M each. mtm_weight is 1/M, 2/M, ..., 1, ...,
    2/M, 1/M, which sum to M. With fewer than 2M - 1 images a positive can come twice; its weights then add up in
    `soft_info_nce`.
    Raises ValueError if n or num_mix is below 1.
    """
    if n < 1 or num_mix < 1:
        raise ValueError(f"mix_targets takes at least 1 image and num_mix 1, not {n} and {num_mix}")
    i = torch.arange(n)[:, None]
    mto_index = first + (i + torch.arange(num_mix)) % n  # Eq. 10
    mto_weight = torch.full((num_mix,), 1 / num_mix)  # the 1/M of Eq. 13
    offset = torch.arange(2 * num_mix - 1) - (num_mix - 1)
    mtm_index = first + (i + offset) % n  # Eq. 11
    mtm_weight = 1 - offset.abs() / num_mix  # Eq. 12, where |M - j - 1| is |offset|
    return mto_index, mto_weight, mtm_index, mtm_weight


def soft_info_nce(q, k, index, weight, temperature, smoothing=0.0):
    """Return the cross-entropy of queries against weighted positives among the keys (Eq. 13-15), as a scalar.

    It is -1/n sum_i sum_j weight_j log softmax_t(sim(q_i, k_t) / tau)[index_ij], where sim is the cosine. q and k are
    L2-normalised here. The weights are used as given. At equal logits the loss is weight.sum() * log(N).

    q: (n, C) queries, the paper's h. k: (N, C) keys, the paper's z. index: (n, P) int64, the positives of each query as
    rows of k. weight: (P,), theirs. temperature: tau > 0. smoothing: s in [0, 1] (D1); 1 - s of each weight stays, and
    s of their sum is spread evenly over all keys.
    Gradients reach q, and also k unless it is detached, as in the paper. Raises ValueError if the shapes do not fit.
    """
    fits = q.dim() == k.dim() == index.dim() == 2 and q.shape[1] == k.shape[1]
    if not fits or len(index) != len(q) or weight.shape != index.shape[1:]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, index, weight))
        raise ValueError(f"soft_info_nce takes q (n, C), k (N, C), index (n, P) and weight (P,), not {shapes}")
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / temperature
    index, weight = index.to(q.device), weight.to(logits)
    log_sum = logits.logsumexp(1, keepdim=True)
    loss = (weight * (log_sum - logits.gather(1, index))).sum(1).mean()
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * weight.sum() * (log_sum.mean() - logits.mean())
    return loss


# ============================================================= 3. augmentation


def augmentation(args):
    """Return the two views per image, drawn by T_1 and T_2 of Table 10, and the local crops (D6): a list of View."""
    crop = dict(size=args.image_size, area=args.crop_scale, ratio=args.crop_ratio)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=args.solarize_p[0])
    blur = dict(blur_p=args.blur_p[0], blur_sigma=args.blur_sigma)
    view = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    view2 = view._replace(blur_p=args.blur_p[1], solarize_p=args.solarize_p[1])
    local = view._replace(size=args.local_size, area=args.local_scale, blur_p=args.local_blur_p, solarize_p=0.0)
    return [view, view2] + [local] * args.local_crops


# ==================================================================== 4. model

TERMS = ("oto", "mto", "mtm")  # of Eq. 16
STREAM_PERMUTATION = 10  # random streams, 10 and 11 for the two views, then one per local crop, see common.generator


def mix_in_slices(images, args, step, number):
    """Patch-mix images within --mix-slices equal slices of the global batch (D7): (n, C, H, W) -> (n, C, H, W).

    images: this process's rows. number: 0 for the mixed queries' view, 1 for the mixed keys', 2 and up for local crops.
    There is one permutation per view and batch (Eq. 2), the same in all slices and on all processes.
    """
    generator = common.generator(args.seed, step, STREAM_PERMUTATION + number, 0)  # the 0 stays, so that the draws stay
    num_patches = (images.shape[-1] // args.patch_size) ** 2
    permutation = torch.randperm(num_patches, generator=generator)
    slices = images.chunk(args.mix_slices // common.rank_and_world()[1])
    return torch.cat([patch_mix(part, args.num_mix, args.patch_size, permutation) for part in slices])


def batch_targets(n, slices, num_mix):
    """Return the positives of n images, mixed in slices, {term: (index (n, P) int64, weight (P,))}: rows of the n."""
    of_slices = [mix_targets(n // slices, num_mix, first) for first in range(0, n, n // slices)]
    mto_index, mto_weight, mtm_index, mtm_weight = zip(*of_slices, strict=True)
    return dict(
        oto=(torch.arange(n)[:, None], torch.ones(1)),
        mto=(torch.cat(mto_index), mto_weight[0]),
        mtm=(torch.cat(mtm_index), mtm_weight[0]),
    )


def image_sizes(args):
    """Return the sides of the images that the encoder gets, in pixels."""
    return [args.image_size, *[args.local_size] * args.local_crops]


def mlp(widths):
    """A head of Table 9: Linear, batch norm and ReLU per layer. The last layer has no ReLU, and its norm no parameters.

    widths: the sizes of the input, of each hidden layer and of the output. Without biases, as in the released code.
    """
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-2], nn.BatchNorm1d(widths[-1], affine=False))


class PatchMix(nn.Module):
    """Encoder F, projector G, predictor H, and the momentum encoder: slow copies of F and G (Algorithm 2).

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of --arch.
    """

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args = args
        self.terms = args.terms.split(",")
        self.term_weights = dict(zip(TERMS, args.term_weights, strict=True))
        self.backbone = encoder  # Algorithm 2, line 1
        if encoder is None:
            drop_path = dict(drop_path_rate=args.drop_path) if common.is_vit(args.arch) else {}
            self.backbone = common.build_backbone(common.encoder_info(args), **drop_path)
        width = common.output_width(self.backbone, *image_sizes(args))
        self.projector = mlp([width, args.hidden, args.hidden, args.dim])
        self.predictor = mlp([args.dim, args.hidden, args.dim])
        if max(args.momentum) > 0:  # line 2
            self.momentum_backbone = common.copy_module(self.backbone, frozen=True)
            self.momentum_projector = common.copy_module(self.projector, frozen=True)
            for module in self.momentum_backbone.modules():
                if isinstance(module, timm.layers.DropPath):  # only the encoder drops paths
                    module.drop_prob = 0.0
        else:  # D4: there is no momentum encoder
            self.momentum_backbone, self.momentum_projector = self.backbone, self.projector
        # Lines 5 to 7: the targets are the same in all steps
        for term, (index, weight) in batch_targets(args.batch_size, args.mix_slices, args.num_mix).items():
            self.register_buffer(f"{term}_index", index, persistent=False)
            self.register_buffer(f"{term}_weight", weight, persistent=False)

    def query(self, x):
        """Return the queries of images, h = H(G(F(x))): (n, 3, H, W) -> (n, dim), not normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    @torch.no_grad()
    def key(self, x):
        """Return the keys of all processes' images, sg(z) of Eq. 16, z = G(F(x)) by the momentum encoder.

        (n, 3, H, W) of this process -> (N, dim), not normalised, in the dtype of x. No gradient.
        """
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            return gather(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype))

    def contrast(self, term, h, z):
        """A term of Eq. 16 as a scalar: this process's queries h (n, dim) against the keys z (N, dim) of all."""
        index = common.shard(getattr(self, f"{term}_index"))
        weight = getattr(self, f"{term}_weight")
        smoothing = self.args.smoothing if term == "oto" else 0.0  # D1
        return soft_info_nce(h, z, index, weight, self.args.temperature, smoothing)

    def local_contrasts(self, local_views, z1, z2, step):
        """The contrasts of the local crops (D6), {term: scalar}: the mean over the crops, summed over both views' keys.

        local_views: of this process, each (n, 3, S, S), normalised. z1, z2: (N, dim), the views' original keys. As
        released: plain crops as in oto, and mixed ones, each by its own permutation, as in mto, if --terms has these.
        """
        mixed = [mix_in_slices(x, self.args, step, 2 + i) for i, x in enumerate(local_views)]
        losses = {}
        for term, crops in (("oto", local_views), ("mto", mixed)):
            if term in self.terms:
                queries = self.query(torch.cat(crops)).chunk(len(crops))
                values = [self.contrast(term, h, z) for h in queries for z in (z1, z2)]
                losses[f"local_{term}"] = sum(values) / len(crops)
        return losses

    def forward(self, views, step):
        """Lines 5, 6, 8, 9 of Algorithm 2, and the loss of line 10.

        views: this process's two views, each (n, 3, H, W), and its local crops, if any, normalised. step: chooses the
        shuffles of the patches.
        Returns (loss, None, (q, k), metrics {name: tensor}); no keys are enqueued. q and k (n, dim) are queries and
        their keys, without gradient. Gradients reach the encoder only, not the keys.
        """
        (x1, x2), local_views = views[:2], views[2:]
        if self.args.mixed_view == 2:  # D5
            x1, x2 = x2, x1
        pairs = {}  # {term: (queries, keys)}: lines 8 and 9, but only what the terms need
        if "oto" in self.terms:
            pairs["oto"] = self.query(x2), self.key(x1)  # Eq. 15
        if "mto" in self.terms or "mtm" in self.terms:
            h_mix1 = self.query(mix_in_slices(x1, self.args, step, 0))  # line 5
        if "mto" in self.terms:
            pairs["mto"] = h_mix1, self.key(x2)  # Eq. 13
        if "mtm" in self.terms:
            pairs["mtm"] = h_mix1, self.key(mix_in_slices(x2, self.args, step, 1))  # line 6; Eq. 14
        losses = {term: self.contrast(term, h, z) for term, (h, z) in pairs.items()}
        loss = sum(self.term_weights[term] * value for term, value in losses.items())  # line 10: Eq. 16
        if local_views:
            z1 = pairs["oto"][1] if "oto" in pairs else self.key(x1)
            z2 = pairs["mto"][1] if "mto" in pairs else self.key(x2)
            local_losses = self.local_contrasts(local_views, z1, z2, step)
            loss = loss + sum(local_losses.values())
            losses |= local_losses
        q, z = pairs[self.terms[0]]
        metrics = {f"loss_{term}": value for term, value in losses.items()}
        return loss, None, (q.detach(), common.shard(z)), metrics

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: Xi <- m Xi + (1 - m) Theta (Algorithm 2, line 11), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


# ================================================================= 5. training

# fmt: off
IMAGENET = common.defaults(HYPERPARAMETERS)
CIFAR = dict(  # section 4.1.2; released: ImageNet's mean and standard deviation; ours: the slices
    IMAGENET, arch="vit_tiny", image_size=32, patch_size=2, epochs=800, warmup=100.0, batch_size=512, lr_batch=512,
    mix_slices=4, crop_scale=(0.1, 1.0),
)
SMALL_ENCODER = dict(  # ours, for CPUs: small heads, few patches, weak views
    batch_size=64, lr_batch=64, weight_decay=(0.02, 0.2), patch_size=8, num_mix=2, mix_slices=1, hidden=512, dim=128,
    drop_path=0.0, crop_scale=(0.3, 1.0), blur_p=(0.1, 0.1), momentum=(0.98, 1.0),
)
RECIPES = dict(
    patterns=IMAGENET | SMALL_ENCODER | dict(arch="vit_micro", image_size=32, epochs=50, warmup=1.0, norm="patterns"),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(CIFAR, image_size=96, patch_size=6),  # ours
    imagenet100=IMAGENET,  # ours
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=IMAGENET,  # ours
)
CIFAR_ENCODERS = dict(  # section 4.1.2
    vit_micro=dict(lr=2e-3, weight_decay=(0.02, 0.2), patch_size=8, hidden=512, dim=128),  # ours, for CPUs
    vit_tiny=dict(lr=4e-3, weight_decay=(0.02, 0.2)),
    vit_small=dict(lr=1e-3),
    vit_base=dict(lr=1.5e-3),
)
IMAGENET_ENCODERS = dict(vit_small=dict(lr=2e-3), vit_base=dict(lr=3e-3))  # section 4.1.2
RELEASED = dict(num_mix=2, smoothing=0.1, mixed_view=2)  # D2, D1, D5
RELEASED_IMAGENET = dict(RELEASED, local_crops=8, crop_scale=(0.35, 1.0))  # D6; without local crops it is RELEASED
RELEASED_ENCODERS = dict(vit_small=dict(num_heads=12), vit_tiny=dict(momentum=(0.0, 0.0)))  # D3, D4
# fmt: on


def recipe(chosen):
    """Return the hyper-parameters {name: value}. chosen: dataset, arch, variant, local_crops and num_mix."""
    values = dict(RECIPES[chosen.dataset])
    arch = (chosen.arch or values["arch"]).removesuffix("_patch16_224")  # timm's own names, too
    if chosen.dataset in ("cifar10", "cifar100", "stl10"):
        values |= CIFAR_ENCODERS.get(arch, {})
    elif chosen.dataset != "patterns":
        values |= IMAGENET_ENCODERS.get(arch, {})
    if chosen.dataset == "folder" and arch == "vit_micro":
        values |= SMALL_ENCODER | dict(lr=2e-3)
    if chosen.variant == "released":
        values |= RELEASED_IMAGENET if chosen.dataset == "imagenet" and chosen.local_crops != 0 else RELEASED
        values |= RELEASED_ENCODERS.get(arch, {})
        values["term_weights"] = (1.0, 0.5, 0.5 / (chosen.num_mix or values["num_mix"]))  # D1: mtm's sum to 1
    return values


def some_terms(text):
    """Return what --terms says as some of TERMS, in that order, with commas between them."""
    chosen = text.split(",")
    if not set(chosen) <= set(TERMS):
        common.fail(f"--terms {text}: give some of {', '.join(TERMS)}, with commas and without blanks")
    return ",".join(term for term in TERMS if term in chosen)


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    run = dict(RUN, variant=("paper", "follow the paper, or the authors' code", ("paper", "released")))
    args, typed = common.parse("patchmix.py", __doc__, argv, HYPERPARAMETERS, dict(run=run), recipe)
    args.method, args.evaluated = "patchmix", "momentum"
    args.terms = some_terms(args.terms)
    # What is not typed follows from other values
    if "mix_slices" not in typed:
        equal = [n for n in range(1, 1 + args.mix_slices) if args.batch_size % n == 0]  # fewer for a small folder
        slices = max(n for n in equal if n == 1 or args.batch_size >= n * args.num_mix)
        args.mix_slices = math.lcm(slices, common.rank_and_world()[1])  # each process has equally many
    if "local_size" not in typed:  # at most half of a view's side, in whole patches
        args.local_size = min(args.local_size, args.image_size // 2) // args.patch_size * args.patch_size
    common.check_schedule(args)
    check_mixing(args)
    return args


def check_mixing(args):
    """Exit with an error message if processes, batch, slices, patches, local crops and M do not go together."""
    world, slices, num_mix, patch = common.rank_and_world()[1], args.mix_slices, args.num_mix, args.patch_size
    if slices % world or args.batch_size % slices:
        common.fail(f"--mix-slices {slices}: {world} process(es) must divide it, and it must divide the batch")
    if num_mix > (images := args.batch_size // slices):
        common.fail(f"--num-mix {num_mix} of {images} image(s) per slice: larger --batch-size, or smaller --mix-slices")
    if args.local_crops and args.terms == "mtm":
        common.fail("--local-crops with --terms mtm: local crops are queries of oto and mto, and none would be used")
    for size in image_sizes(args):
        if size % patch or num_mix > (size // patch) ** 2:
            common.fail(f"--patch-size {patch} does not cut images of {size} px into --num-mix {num_mix} whole patches")


def cosine(start, end, done):
    """Half a cosine from `start` to `end`; done: the share of the way, from 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def schedule(args, step, steps_per_epoch):
    """Return (learning rate, weight decay, momentum of the momentum encoder) for a step, counted from 0.

    The rate warms up linearly from 0, then falls by a cosine to --min-lr. The other two follow a cosine from their
    first to their second value.
    """
    epoch, done = step / steps_per_epoch, step / (args.epochs * steps_per_epoch)
    warmup = args.warmup if args.warmup * steps_per_epoch >= 1 else 0  # less than a step is none
    if epoch < warmup:
        lr = common.peak_rate(args) * epoch / warmup
    else:
        lr = cosine(common.peak_rate(args), args.min_lr, (epoch - warmup) / (args.epochs - warmup))
    return lr, cosine(*args.weight_decay, done), cosine(*args.momentum, done)


def chance_level(args):
    """Return the loss at equal logits. Each contrast is then the sum of its targets' weights times log N."""
    terms = args.terms.split(",")
    target_sums = dict(oto=1, mto=1, mtm=args.num_mix)
    weights = sum(w * target_sums[term] for term, w in zip(TERMS, args.term_weights, strict=True) if term in terms)
    if args.local_crops:
        weights += 2 * sum(term in terms for term in ("oto", "mto"))  # against the keys of both views
    return weights * math.log(args.batch_size)


@common.leaves_no_trace
def main(args, train=None, test=None, encoder=None):
    """Train as args say. If an earlier call was stopped, the same call continues its run.

    args: the namespace of `parse_args`. train, test: common.ImageSet of images to use instead of --dataset.
    encoder: a module that maps (N, 3, H, W) to (N, width), to train instead of --arch; a copy of it is trained.
    """
    args = argparse.Namespace(**vars(args))  # a copy
    device = common.join_processes(args.device)
    args.arch = args.arch if encoder is None else "custom"
    dataset = args.dataset if train is None else "custom"
    args.out = args.out or f"runs/patchmix-{dataset}-{args.arch}-s{args.seed}{args.changes}"
    args.amp = "bf16" if common.use_bf16(args.amp, device, args.arch, image_sizes(args)) else "off"
    args.device = device.type

    # Data
    train, test = common.open_images(args, train, test)
    loader = common.make_loader(args, train, augmentation(args), device)
    layout, norm = common.memory_format(device, args.arch), common.NORMS[args.norm]
    if args.show_views:
        views = common.colour_views(next(iter(loader)), device)
        mixed = [mix_in_slices(view, args, 0, number) for number, view in enumerate(views)]
        names = ["view 1", "view 2", *(f"local {i + 1}" for i in range(args.local_crops))]
        names += [f"{name} mixed, M = {args.num_mix}" for name in names]
        return common.save_views(args.show_views, views + mixed, names)
    steps_per_epoch = len(train) // args.batch_size
    total_steps, rank = args.epochs * steps_per_epoch, common.rank_and_world()[0]
    last_step = min(args.max_steps or total_steps, total_steps)

    # Model and optimiser
    torch.manual_seed(args.seed)
    model = PatchMix(args, common.copy_module(encoder)).to(device)
    norms = "of the whole batch"  # as in the released code
    if dist.is_initialized() and device.type == "cuda":
        model = timm.layers.convert_sync_batchnorm(model)
    elif dist.is_initialized():
        norms = "of each process alone"  # torch has batch norm over processes on GPUs only
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = param_groups_weight_decay(model)  # as released: no weight decay of biases and 1-D tensors
    optimizer = torch.optim.AdamW(groups, args.lr, betas=args.betas, fused=True)
    ddp = in_parallel(args, model)

    # The run's folder. The run goes on from its last.pt, if there is one. The lock keeps other runs out
    images = dict(number=len(train), checksum=train.checksum())
    lock = common.claim_folder(args.out)
    step, records = restore(args, images, model, optimizer)
    save(args, step, records, images, model, optimizer)
    chance = chance_level(args)
    facts = dict(peak_lr=common.peak_rate(args), chance_level=chance, keys_per_query=args.batch_size, batch_norm=norms)
    introduce(args, train, test, **facts)

    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # the last epoch again: it may lack its kNN
        loader.batch_sampler.set_epoch(epoch, step, last_step)
        history = []
        with common.until_stopped(loader) as batches:  # SIGTERM or Ctrl-C: the step is saved, then it raises Stopped
            for batch in batches:
                lr, weight_decay, momentum = schedule(args, step, steps_per_epoch)
                no_decay, decay = optimizer.param_groups  # timm: 1-D tensors and biases first
                no_decay["lr"] = decay["lr"] = lr
                decay["weight_decay"] = weight_decay
                # Algorithm 2, line 4: two views per image; the loader has cut them
                views = common.colour_views(batch, device, layout, norm)
                torch.manual_seed(common.generator(args.seed, step, STREAM_STEP, rank).initial_seed())  # for drop-path
                # Lines 5, 6, 8, 9, and the loss of 10: the mixed images, queries and keys
                loss, _, (q, _), metrics = ddp(views, step)
                # Line 10: update the encoder. Line 11: move the momentum encoder
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                grad_norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
                optimizer.step()
                model.update(momentum)
                step += 1
                metrics |= dict(loss=loss, grad_norm=grad_norm)
                history.append({name: value.detach() for name, value in metrics.items()})
                if step % 10 == 0 or step == total_steps:
                    common.show_progress(args, loader, history, step, total_steps)
            ended = step == (epoch + 1) * steps_per_epoch
            if ended and history:
                record = dict(epoch=epoch + 1, step=step, **means(args, loader, history), lr=lr, momentum=momentum)
                records.append(record | dict(below_chance=chance - record["loss"], **common.embedding_health(q)))
            save(args, step, records, images, model, optimizer)
        if ended:
            due = args.knn_every and ((epoch + 1) % args.knn_every == 0 or epoch + 1 == args.epochs)
            if test is not None and due and "knn20_top1" not in records[-1]:
                records[-1] |= common.knn_record(args, model.momentum_backbone, train, test, device)
                save(args, step, records, images, model, optimizer)
            common.log_epoch(args, records[-1])
        if step >= last_step:
            break

    lock.close()
    common.log_end(args, step, total_steps)


# =============================================================== 6. machinery


def restore(args, images, model, optimizer):
    """Load the run in --out, or --resume's, or --init's weights only. Return (steps done, records of the epochs)."""
    path, state = common.load_run(args, images, args.resume)
    if state["step"] > 0:
        with common.fitting(path):
            model.load_state_dict(state["model"])
            # Only its buffers: rates and weight decay are this run's, which may differ from --resume's
            optimizer.load_state_dict(optimizer.state_dict() | dict(state=state["optimizer"]["state"]))
    elif args.init:
        weights, _ = common.fitting_weights(args.init, model.backbone, args.init_prefix)
        model.backbone.load_state_dict(weights)
        model.momentum_backbone.load_state_dict(weights)
    return state["step"], state["records"]


def save(args, step, records, images, model, optimizer):
    """Write last.pt, which is all that a run needs to go on, and what follows from it, each whole or not at all."""
    out, info = Path(args.out), common.encoder_info(args)
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, records=records)
    state |= dict(config=vars(args), images=images, backbone=info)
    common.write_file(out / "last.pt", state)
    epoch = records[-1]["epoch"] if records and records[-1]["step"] == step else 0  # 0: in the middle of one
    if epoch and args.keep_every and epoch % args.keep_every == 0:
        common.write_file(out / f"epoch-{epoch:04d}.pt", state)
    common.write_file(out / "backbone.pt", info | {"state_dict": model.momentum_backbone.state_dict()})
    config = vars(args) | common.versions(args.device) | {"images": images}
    common.write_file(out / "config.json", json.dumps(config, default=str))
    common.write_file(out / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))


# ------------------------- what every run has (the same in all five files)

STREAM_STEP = 0  # a random stream, see common.generator
RUN = dict(
    dataset=("patterns", "data set; it also chooses the recipe", common.DATASETS),
    data_dir=(None, "its folder, with train/, and val/ or test/; for `folder` any tree of images"),
    seed=(0, "seed of all random numbers", (0, 2**63 - 1)),
    init=(None, "start the encoder from a checkpoint, of this project or another"),
    init_prefix=(None, "prefix of the encoder's names in --init's file, if it has several"),
    out=(None, "folder of the run; one that has begun goes on"),
    resume=(None, "begin a new --out with another run's last.pt"),
    max_steps=(None, "save and stop when the run has made N steps in all", (1, math.inf)),
    keep_every=(0, "keep a copy of last.pt every N epochs; 0: none"),
    knn_every=(10, "evaluate by kNN every N epochs; 0: never"),
    device=("auto", "auto: a GPU where there is one", ("auto", "cuda", "cpu")),
    amp=("auto", "auto: bf16 on GPUs that have it; off: float32", ("auto", "bf16", "off")),
    compile=(False, "compile the encoders: minutes at the start, then faster steps"),
    grad_checkpoint=(False, "less memory, more time; batch norm's averages move twice"),
    workers=(None, "processes that load images, per training process", (0, 1024)),
    tensorboard=(False, "also write the metrics for TensorBoard"),
    show_views=(None, "write a picture of the inputs, and exit"),
)


def introduce(args, train, test, **facts):
    """Say what the run is: its data, every value that its numbers depend on, and facts that follow from these."""
    world = common.rank_and_world()[1]
    precision = "bf16" if args.amp == "bf16" else "TF32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
    facts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in facts.items()}
    facts |= dict(processes=world, images_per_process=args.batch_size // world, precision=precision)
    rows = dict(run={name: getattr(args, name) for name in ("dataset", "variant", "seed", "init", "evaluated", "out")})
    rows |= {group: {name: getattr(args, name, None) for name in table} for group, table in HYPERPARAMETERS.items()}
    rows |= dict(data={"train": train, "test": test}, facts=facts, versions=common.versions(args.device))
    for group, values in rows.items():
        common.log_values(group, values)


def means(args, loader, history):
    """Return the means of metrics over the steps and processes, and how fast the steps were: {name: float}.

    history: a dict per step, {name: 0-d tensor}. Exits with an error message if a mean is not finite.
    """
    sums = sum(torch.stack([*metrics.values()]).double() for metrics in history)
    values = (gather(sums[None]).mean(0) / len(history)).tolist()
    if not math.isfinite(sum(values)):
        common.fail("the loss or its gradient is not finite in this epoch; last.pt is from before")
    return dict(zip(history[0], values, strict=True)) | loader.speed(args.batch_size * len(history))


def gather(x):
    """Concatenate the tensors (n, ...) of all processes to (N, ...), in rank order. No gradient."""
    world = common.rank_and_world()[1]
    if world == 1:
        return x
    out = x.new_empty(world * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def in_parallel(args, model):
    """Apply --grad-checkpoint and --compile to the model, wrap it in DDP if there are several processes, return it."""
    if args.grad_checkpoint:
        model.backbone.set_grad_checkpointing()
    if args.compile:
        for encoder in {model.backbone, getattr(model, "momentum_backbone", model.backbone)}:
            encoder.compile()
    if not dist.is_initialized():
        return model
    options = dict(broadcast_buffers=False, gradient_as_bucket_view=True)
    options["find_unused_parameters"] = args.arch == "custom"  # only a user's own encoder may have any
    return DistributedDataParallel(model, **options)


if __name__ == "__main__":
    common.start(main, parse_args)
