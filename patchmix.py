"""PatchMix: Inter-Instance Similarity Modeling for Contrastive Learning (Shen et al., arXiv 2306.12243).

Contrastive learning treats any two images as unrelated, although many are similar. PatchMix makes images whose
relations are known: it cuts M images of a batch into patches, and combines patches of all M into one image, each at its
original position. A ViT then learns that such a mixed image is similar to each of its sources, in equal shares.

As in MoCo v3, an encoder embeds queries, a momentum encoder embeds keys, and the negatives of a query are the other
keys of the batch. The loss is the sum of three contrasts: mto, mtm and oto. Only oto has queries of unmixed images.

    Eq. 1-9       patch_mix           M images into one, patch by patch (Eq. 8-9 and 17: the same by flat indices)
    Eq. 10-12     mix_targets         the positives of a mixed query and their weights (also Eq. 18-19)
    Eq. 13        soft_info_nce       mto, mix to origin: a mixed query and the keys of its M sources, 1/M each
    Eq. 14        soft_info_nce       mtm, mix to mix: a mixed query and mixed keys, by the fraction of common sources
    Eq. 15        soft_info_nce       oto, origin to origin: an original query and the key of the same image
    Eq. 16        PatchMix.forward    their sum
    Algorithm 1   patch_mix (lines 2 to 7), mix_targets (line 8)
    Algorithm 2   PatchMix (lines 1, 2), PatchMix.forward (5 to 9, and 10's loss), PatchMix.update (11), main (3, 4, 10)

    python patchmix.py                                                        # a laptop, no data
    python patchmix.py --dataset cifar10 --arch vit_tiny                      # one GPU
    torchrun --nproc_per_node=8 patchmix.py --dataset imagenet --data-dir DIR --arch vit_small

The baseline is `--num-mix 1 --terms oto,mto`: without mixing, mtm is the same term as mto. This is MoCo v3, with
drop path, a trained patch projection and positions, and without the factor 2 tau. PatchMix changes three things:
    queries of both views                ->  queries of one view are of mixed images    (PatchMix.forward)
    L(q2, k1) + L(q1, k2)                ->  oto + mto + mtm, with mixed keys           (PatchMix.forward)
    InfoNCE with one positive per query  ->  M, or 2M - 1, positives with weights       (mix_targets, soft_info_nce)
(D1), (D2), ... at the end are differences between the paper, the released code (`--variant released`) and this file.
"""

import argparse
import copy
import math
import os
import re
from itertools import pairwise

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.transforms import v2

import common

# ========================================================= 1. hyper-parameters


def parse_args(argv=None):
    """Parse the command line. The defaults are the paper's for ImageNet, with the changes that `recipe` returns."""
    parser = argparse.ArgumentParser(os.path.basename(__file__), description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--variant", choices=("paper", "released"), default="paper", help="follow the paper or the released code")

    add = parser.add_argument_group("loss").add_argument
    add("--num-mix", type=common.positive_int, help="images mixed into one, M (Table 6); 1: no mixing")
    add("--mix-slices", type=common.positive_int, default=8, help="slices of the batch; images mix within each (D7)")
    add("--terms", default="oto,mto,mtm", help="terms of the loss (Eq. 16): any of oto,mto,mtm (Table 7)")
    add("--term-weights", type=common.nonnegative_float, nargs=3, default=[1.0] * 3, help="weights of oto,mto,mtm (D1)")
    add("--local-crops", type=common.nonnegative_int, help="local crops per image, as queries of oto and mto (D6)")
    add("--smoothing", type=common.fraction, default=0.0, help="label smoothing of oto (D1)")
    add("--temperature", type=common.positive_float, default=0.2, help="softmax temperature tau")

    add = parser.add_argument_group("model").add_argument
    add("--arch", help="encoder: vit_micro, vit_tiny, vit_small, vit_base, or any timm model")
    add("--image-size", type=common.positive_int, default=224, help="size of the views, in pixels")
    add("--patch-size", type=common.positive_int, default=16, help="patch size in pixels, of the ViT and of the mixing")
    add("--num-heads", type=common.positive_int, metavar="N", help="attention heads of the ViT, by default timm's (D3)")
    add("--drop-path", type=common.fraction, default=0.1, help="stochastic depth rate of the ViT")  # released
    add("--hidden", type=common.positive_int, default=4096, help="hidden size of projector and predictor (Table 9)")
    add("--dim", type=common.positive_int, default=256, help="embedding dimension (Table 9)")
    add("--key-encoder", choices=("momentum", "query"), default="momentum", help="encoder of the keys (D4)")
    add("--momentum", action=common.FractionPair, default=[0.996, 1.0], help="EMA momentum mu; two: initial and final")

    add = parser.add_argument_group("schedule").add_argument
    add("--epochs", type=common.positive_int, default=300, help="number of epochs")  # section 4.1.2
    add("--batch-size", type=common.positive_int, default=1024, help="global batch size, over all processes")
    add("--lr", type=common.positive_float, default=5e-4, help="peak learning rate per 256 images")  # for ViT-S
    add("--min-lr", type=common.nonnegative_float, default=2.5e-7, help="final learning rate per 256 images")  # 1e-6
    add("--warmup", type=common.nonnegative_float, default=10.0, help="linear warmup epochs, at most --epochs / 4")
    add("--weight-decay", action=common.FractionPair, default=[0.04, 0.4], help="AdamW's; two: initial and final")

    add = parser.add_argument_group("augmentation").add_argument
    add("--crop-scale", action=common.AreaRange, default=[0.05, 1.0], help="area range of RandomResizedCrop")
    add("--local-size", type=common.positive_int, default=96, help="size of a local crop, in pixels (D6)")
    add("--local-scale", action=common.AreaRange, default=[0.05, 0.35], help="area range of local crops (D6)")
    add("--blur-p", action=common.FractionPair, default=[1.0, 0.1], help="probability of blur; two values: views 1, 2")

    args = common.parse_args(parser, argv, recipe)
    args.warmup = min(args.warmup, args.epochs / 4)  # a short run would not reach its peak learning rate
    common.needs(parser, args, ["num_heads", "drop_path"], common.is_vit(args.arch), "a ViT (--arch)")
    common.needs(parser, args, ["local_size", "local_scale"], args.local_crops, "local crops (--local-crops)")
    if args.local_crops and args.local_size > args.image_size:
        parser.error(f"--local-size {args.local_size} is larger than --image-size {args.image_size}")
    terms = chosen_terms(args)
    if not terms or not set(args.terms.split(",")) <= set(TERMS):
        parser.error("--terms: pass one or more of oto,mto,mtm, with --term-weights above 0")
    if args.local_crops and set(terms) == {"mtm"}:
        parser.error("--local-crops are queries of oto and mto: choose one of these --terms, with a weight above 0")
    common.needs(parser, args, ["num_mix", "mix_slices"], terms.keys() & {"mto", "mtm"}, "mto or mtm in --terms")
    common.needs(parser, args, ["mix_slices"], args.num_mix > 1, "--num-mix 2 or more")
    common.needs(parser, args, ["smoothing"], "oto" in terms, "oto in --terms, with a weight above 0")
    common.needs(parser, args, ["momentum"], args.key_encoder == "momentum", "--key-encoder momentum")
    if args.min_lr > args.lr:
        parser.error(f"--min-lr {args.min_lr} is above --lr {args.lr}, the peak of the learning rate")
    for size in [args.image_size, args.local_size] if args.local_crops else [args.image_size]:
        if terms.keys() & {"mto", "mtm"} and (size % args.patch_size or args.num_mix > (size // args.patch_size) ** 2):
            needed = f"consist of whole patches, at least --num-mix {args.num_mix}"
            parser.error(f"--patch-size {args.patch_size}: a view or local crop of {size} px must {needed}")
    return args


CIFAR = dict(  # section 4.1; Table 10: crop_scale; released: min_lr, norm; not in the paper: mix_slices, local_size
    arch="vit_tiny", image_size=32, patch_size=2, epochs=800, warmup=100.0, batch_size=512, min_lr=5e-7,
    mix_slices=4, crop_scale=[0.1, 1.0], norm="imagenet", local_size=16,
)  # fmt: skip
RECIPES = dict(  # what differs from the values for ImageNet
    patterns=dict(  # not in the paper: for a laptop, with small heads, few patches, weak views
        arch="vit_micro", image_size=32, patch_size=8, epochs=50, batch_size=64, lr=4e-3, min_lr=4e-6, warmup=1.0,
        weight_decay=[0.02, 0.2], momentum=[0.98, 1.0], num_mix=2, mix_slices=1, hidden=512, dim=128, drop_path=0.0,
        crop_scale=[0.3, 1.0], blur_p=[0.1, 0.1], local_size=16,
    ),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(CIFAR, image_size=96, patch_size=6, local_size=48),  # not in the paper
    imagenet100={},  # not in the paper
    imagenet={},
    folder=dict(mix_slices=1),  # not in the paper; 1, as there may be few images
)  # fmt: skip
ENCODERS = dict(  # section 4.1.2, for CIFAR and ImageNet; others: ViT-S's 5e-4, which is 1e-3 for 512, 2e-3 for 1024
    vit_micro=dict(lr=1e-3, weight_decay=[0.02, 0.2], patch_size=8, hidden=512, dim=128),  # not in the paper: for CPUs
    vit_tiny=dict(lr=2e-3, weight_decay=[0.02, 0.2]),  # 4e-3 for 512; ImageNet: as released, 8e-3 for 1024
    vit_base=dict(lr=7.5e-4),  # 1.5e-3 for 512, 3e-3 for 1024
)


def recipe(args):
    """Return the defaults, {name: value}, that suit args, whose arch, num_mix and local_crops are None if not given."""
    values = dict(arch="vit_small", num_mix=3, local_crops=0) | RECIPES[args.dataset]
    # vit_tiny, vit_small, ..., also of timm's own names, such as deit_small_patch16_224
    arch = re.sub("^(?:deit3?|vit)_([a-z]+)_.*", r"vit_\1", args.arch or values["arch"])
    if args.dataset != "patterns":
        values |= ENCODERS.get(arch, {})
    if args.variant == "released":
        values |= dict(num_mix=2, smoothing=0.1)  # M: D2, smoothing: D1
        values["term_weights"] = [1.0, 0.5, 0.5 / (args.num_mix or 2)]  # D1: mtm's weights sum to 1
        if arch == "vit_small":
            values["num_heads"] = 12  # D3
        if arch == "vit_tiny":
            values["key_encoder"] = "query"  # D4
        if args.dataset == "imagenet":
            values["local_crops"] = 8  # D6
            if args.local_crops != 0:  # None: the 8 above
                values["crop_scale"] = [0.35, 1.0]
    return values


def chosen_terms(args):
    """Return the terms of the loss, {name: weight}: those in --terms whose weight in --term-weights is above 0."""
    weights = zip(TERMS, args.term_weights, strict=True)
    return {term: weight for term, weight in weights if term in args.terms.split(",") and weight > 0}


# ================================================================ 2. the paper

TERMS = ("oto", "mto", "mtm")  # of the loss, Eq. 16


def patch_mix(images, num_mix, patch_size, permutation=None):
    """Mix each image with the num_mix - 1 images that follow it in the batch, patch by patch (Algorithm 1, Eq. 1-7).

    The T patches are shuffled by one permutation for all images, and split into M groups of S = floor(T / M). Mixed
    image i takes group m from image (i + m) mod N. Every patch keeps its position. The T mod M remaining patches are
    those of image i (D10), although its weight in Eq. 13 remains 1/M. With M = 1 the images are unchanged.

    images: (N, C, H, W), any values. num_mix: M, from 1 to T. patch_size: p, which divides H and W. permutation: (T,)
    int64, the shuffle k of Eq. 2 for T = H/p * W/p patches; if None, it is drawn.
    Returns mixed images, (N, C, H, W). Gradients flow through. Raises ValueError if num_mix or patch_size does not fit.
    """
    height, width = images.shape[2:]
    rows, columns = height // patch_size, width // patch_size
    num_patches = rows * columns  # T, Eq. 1
    if height % patch_size or width % patch_size:
        raise ValueError(f"patch_mix takes a patch_size that divides {height} x {width}, not {patch_size}")
    if not 1 <= num_mix <= num_patches:
        raise ValueError(f"patch_mix takes num_mix from 1 to the number of patches, {num_patches}, not {num_mix}")
    permutation = torch.randperm(num_patches) if permutation is None else permutation.cpu()  # line 2: k, Eq. 2
    # The pixels need not be shuffled and put back. It is enough to know the group of the patch at each position.
    group_size = num_patches // num_mix  # S
    place = permutation.argsort()  # r of Eq. 5: where the shuffle puts each patch
    # Line 3, Eq. 3: the j-th shuffled patch is in group j // S. The remaining ones get M or more, and are not mixed.
    group_of_patch = (place // group_size).view(rows, columns).to(images.device, non_blocking=True)
    group_of_pixel = group_of_patch.repeat_interleave(patch_size, 0).repeat_interleave(patch_size, 1)
    mixed = images
    # Lines 4 to 7, Eq. 4, 6, 7: group m of row i is of image (i + m) mod N, in row i of the batch rolled by -m.
    for m in range(1, num_mix):
        mixed = torch.where(group_of_pixel == m, images.roll(-m, 0), mixed)
    return mixed


def mix_targets(n, num_mix):
    """Return the positives of mixed images: their sources, and the mixed images that share some of them (Eq. 10-12).

    n: the number of images that are mixed with each other, N. num_mix: M.
    Returns (mto_index (n, M) int64, mto_weight (M,), mtm_index (n, 2M-1) int64, mtm_weight (2M-1,)), on the CPU:
    the paper's y, and weights in float32. The indices, from 0 to n - 1, are rows of these images' keys. Add
    rank * n if the keys of all processes are gathered. mto_weight is 1/M each. mtm_weight is 1/M, 2/M, ..., 1, ...,
    2/M, 1/M, which sum to M. With fewer than 2M - 1 images a positive can occur twice; its weights then add up.
    """
    i = torch.arange(n)[:, None]
    mto_index = (i + torch.arange(num_mix)) % n  # Eq. 10; Algorithm 1, line 8
    mto_weight = torch.full((num_mix,), 1 / num_mix)  # the 1/M of Eq. 13
    offset = torch.arange(2 * num_mix - 1) - (num_mix - 1)
    mtm_index = (i + offset) % n  # Eq. 11
    mtm_weight = 1 - offset.abs() / num_mix  # Eq. 12, where |M - j - 1| is |offset|
    return mto_index, mto_weight, mtm_index, mtm_weight


def soft_info_nce(q, k, index, weight, temperature, smoothing=0.0):
    """Return the cross-entropy of queries against weighted positives among the keys (Eq. 13-15).

    It is -1/n sum_i sum_j weight_j log softmax_t(sim(q_i, k_t) / tau)[index_ij], where sim is the cosine. q and k are
    L2-normalized here. The weights are used as given. At equal logits the loss is weight.sum() * log(N).

    q: (n, C) queries, the paper's h. k: (N, C) keys, the paper's z. index: (n, P) int64, the positives of each query as
    rows of k. weight: (P,), their weights. temperature: tau > 0. smoothing: label smoothing s in [0, 1] (D1); each
    weight is multiplied by 1 - s, and s of their sum is spread evenly over all keys.
    Gradients reach q and k; in the paper, k is detached. float16 and bfloat16 are converted to float32; call it outside
    autocast, which would undo that. Raises ValueError if the shapes do not fit.
    """
    if q.dim() != 2 or k.shape[1:] != q.shape[1:] or weight.dim() != 1 or index.shape != (len(q), len(weight)):
        shapes = [tuple(x.shape) for x in (q, k, index, weight)]
        raise ValueError(f"soft_info_nce takes q (n, C), k (N, C), index (n, P) and weight (P,), not {shapes}")
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / temperature
    index, weight = index.to(q.device, non_blocking=True), weight.to(logits, non_blocking=True)
    log_sum = logits.logsumexp(1, keepdim=True)
    loss = (weight * (log_sum - logits.gather(1, index))).sum(1).mean()
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * weight.sum() * (log_sum.mean() - logits.mean())
    return loss


# ============================================================= 3. augmentation


def augment(x, args, view):
    """Augment crops as in Table 10: uint8 -> normalized float (n, 3, S, S). view: 0 and 1, then local crops."""
    blur_p = args.blur_p[view] if view < 2 else 0.5  # of local crops (D6)
    x = common.horizontal_flip(x / 255, p=0.5)
    x = common.color_jitter(x, 0.4, 0.4, 0.2, 0.1, p=0.8)
    x = common.grayscale(x, p=0.2)
    x = common.gaussian_blur(x, sigma=(0.1, 2.0), p=blur_p)
    if view == 1:
        x = common.solarize(x, p=0.2)
    return common.normalize(x, *common.NORMS[args.norm])


# ==================================================================== 4. model


def mix_batch(x, num_mix, patch_size, slices):
    """Mix images by `patch_mix` within each of `slices` equal parts of a batch (D7): (n, 3, H, W) -> (n, 3, H, W)."""
    return torch.cat([patch_mix(part, num_mix, patch_size) for part in x.unflatten(0, (slices, -1))])


def batch_targets(n, num_mix, slices, first=0):
    """Return the positives of n images that are mixed by `mix_batch`, {term: (index (n, P) int64, weight (P,))}.

    slices: divides n. first: the row of their first key among the keys of all processes.
    """
    mto_index, mto_weight, mtm_index, mtm_weight = mix_targets(n // slices, num_mix)
    first_rows = torch.arange(first, first + n, n // slices)[:, None, None]  # of each slice
    return dict(
        oto=(first + torch.arange(n)[:, None], torch.ones(1)),
        mto=((first_rows + mto_index).flatten(0, 1), mto_weight),
        mtm=((first_rows + mtm_index).flatten(0, 1), mtm_weight),
    )


def head(*widths):
    """Return a head of Table 9: Linear, batch norm and ReLU per layer; the last norm has no ReLU and no parameters.

    widths: the sizes of the input, of each hidden layer and of the output. Without biases, as in the released code.
    """
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-2], nn.BatchNorm1d(widths[-1], affine=False))


class PatchMix(nn.Module):
    """Encoder F, projector G, predictor H, and the momentum encoder: slow copies of F and G (Algorithm 2).

    Copy it with TERMS, head, batch_targets, mix_batch, soft_info_nce, mix_targets, patch_mix and gather.
    On several GPUs convert it with timm.layers.convert_sync_batchnorm, and wrap it in DistributedDataParallel.

    backbone: (n, 3, H, W) -> (n, width). hidden, dim: hidden and output size of the heads. patch_size: the ViT's.
    num_mix: M. slices: see `mix_batch`. terms: {name: weight}, those of Eq. 16 to compute; None: all, with weight 1.
    temperature: tau. smoothing: label smoothing of oto (D1). key_encoder: "momentum", or "query" (D4).
    """

    def __init__(
        self, backbone, width, hidden=4096, dim=256, num_mix=3, patch_size=16, slices=1, terms=None, temperature=0.2,
        smoothing=0.0, key_encoder="momentum",
    ):  # fmt: skip
        super().__init__()
        if key_encoder not in ("momentum", "query"):
            raise ValueError(f"key_encoder is 'momentum' or 'query', not {key_encoder!r}")
        self.backbone = backbone  # line 1
        self.projector = head(width, hidden, hidden, dim)
        self.predictor = head(dim, hidden, dim)
        self.momentum_backbone, self.momentum_projector = self.backbone, self.projector  # stays so for "query" (D4)
        if key_encoder == "momentum":  # line 2
            self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
            self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
            for module in self.momentum_backbone.modules():
                if isinstance(module, timm.layers.DropPath):  # timm's; only the query encoder drops paths
                    module.drop_prob = 0.0
        self.num_mix, self.patch_size, self.slices = num_mix, patch_size, slices
        self.terms = dict.fromkeys(TERMS, 1.0) if terms is None else terms
        self.temperature, self.smoothing = temperature, smoothing

    def query(self, x):
        """Return the queries of images, h = H(G(F(x))): (n, 3, H, W) -> (n, dim), in the dtype of x."""
        return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    @torch.no_grad()
    def key(self, x):
        """Return the keys z = G(F(x)) of all processes: (n, 3, H, W) -> (N, dim), no gradient, in the dtype of x."""
        return gather(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype))

    def local_queries(self, local):
        """Return the queries of local crops, {term: one (n, dim) per crop} (D6). local: list of (n, 3, H, W)."""
        queries = {}
        if local and "oto" in self.terms:
            queries["oto"] = self.query(torch.cat(local)).chunk(len(local))
        if local and "mto" in self.terms:
            mixed = [mix_batch(x, self.num_mix, self.patch_size, self.slices) for x in local]
            queries["mto"] = self.query(torch.cat(mixed)).chunk(len(local))
        return queries

    def forward(self, views):
        """Return (loss, queries (n, dim), {name: metric}): Algorithm 2, lines 5 to 9, and the loss of line 10.

        views: this process's two views and its local crops, if any, each (n, 3, H, W), normalized. The first gives the
        mixed queries, the second the unmixed ones. Only the loss has a gradient, which reaches the query encoder only.
        """
        x1, x2, *local = views
        oto, mto, mtm = (term in self.terms for term in TERMS)
        mixing = self.num_mix, self.patch_size, self.slices
        x1_mixed = mix_batch(x1, *mixing) if mto or mtm else None  # line 5
        x2_mixed = mix_batch(x2, *mixing) if mtm else None  # line 6
        first = dist.get_rank() * len(x1) if dist.is_initialized() else 0  # the row of this process's first key
        targets = batch_targets(len(x1), self.num_mix, self.slices, first)  # lines 5 to 7
        h2 = self.query(x2) if oto else None  # line 8
        h1_mixed = self.query(x1_mixed) if mto or mtm else None
        z1 = self.key(x1) if oto or local else None  # line 9
        z2 = self.key(x2) if mto or local else None
        z2_mixed = self.key(x2_mixed) if mtm else None
        h_local = self.local_queries(local)

        def contrast(h, z, term):
            smoothing = self.smoothing if term == "oto" else 0.0  # as released (D1)
            return soft_info_nce(h, z, *targets[term], self.temperature, smoothing)

        pairs = dict(oto=(h2, z1), mto=(h1_mixed, z2), mtm=(h1_mixed, z2_mixed))  # Eq. 15, 13 and 14
        with torch.autocast(x1.device.type, enabled=False):  # the loss is computed in float32
            losses = {term: contrast(*pairs[term], term) for term in self.terms}
            for term, queries in h_local.items():  # as released, against the keys of both views
                losses[f"local_{term}"] = sum(contrast(h, z, term) for h in queries for z in (z1, z2)) / len(local)
        # Line 10, Eq. 16. As released, the terms of local crops have weight 1 (D6)
        loss = sum(self.terms.get(name, 1.0) * value for name, value in losses.items())
        metrics = dict(loss=loss.detach()) | {f"loss_{name}": value.detach() for name, value in losses.items()}
        return loss, (h2 if oto else h1_mixed).detach(), metrics

    @torch.no_grad()
    def update(self, m):
        """Update the momentum encoder (float32 or float64): Xi <- m Xi + (1 - m) Theta (Algorithm 2, line 11)."""
        for slow, fast in ((self.momentum_backbone, self.backbone), (self.momentum_projector, self.projector)):
            for xi, theta in zip(slow.parameters(), fast.parameters(), strict=True):
                xi.lerp_(theta, 1 - m)  # in bfloat16 the small change would be rounded away


# ================================================================= 5. training


def cosine(start, end, done):
    """Return a value on half a cosine from `start` to `end`. done: the fraction of the way, from 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def learning_rate(args, now):
    """Return the learning rate `now` epochs after the start: a linear warmup from 0, then a cosine down to --min-lr."""
    peak, last = args.lr * args.batch_size / 256, args.min_lr * args.batch_size / 256
    if now < args.warmup:
        return peak * now / args.warmup
    return cosine(peak, last, (now - args.warmup) / (args.epochs - args.warmup))


def main(args, train=None, test=None):
    """Train, resuming from args.out if it holds a run. train, test: datasets to use instead of --dataset."""
    device, rank, world = common.init_distributed(args.device)
    torch.manual_seed(args.seed)

    # Data: two views and the local crops of each image (Algorithm 2, line 4), cropped here and augmented in the loop
    train, test = common.open_data(args.dataset, args.data_dir, args.image_size, train, test)
    terms = chosen_terms(args)
    mixes = args.num_mix > 1 and ("mto" in terms or "mtm" in terms)
    split = dict(parts=args.mix_slices, flag="--mix-slices", smallest=args.num_mix) if mixes else {}
    slices = common.split_batch(args.batch_size, len(train), world, **split)  # per process, to mix within (D7)
    mixing = dict(num_mix=args.num_mix, patch_size=args.patch_size, slices=slices)
    bicubic = v2.InterpolationMode.BICUBIC  # as released
    crop = v2.RandomResizedCrop(args.image_size, args.crop_scale, interpolation=bicubic)
    local_crop = v2.RandomResizedCrop(args.local_size, args.local_scale, interpolation=bicubic)
    images = common.Views(train, [crop] * 2 + [local_crop] * args.local_crops)
    sampler = DistributedSampler(images, world, rank, seed=args.seed, drop_last=True)
    options = common.loader_options(args.workers, device)
    loader = DataLoader(images, args.batch_size // world, sampler=sampler, drop_last=True, **options)
    if args.show_views:
        views = [augment(x, args, i) for i, x in enumerate(next(iter(loader))[0])]
        names = ["view 1", "view 2"] + ["local crop"] * args.local_crops
        if mixes:
            views += [mix_batch(x, **mixing) for x in views]
            names += [f"mixed {name}" for name in names]
        return common.save_views(args.show_views, views, names, args.norm)

    # Model and optimizer. backbone.pt has `info` and the weights of the encoder that info["encoder"] names
    heads = dict(num_heads=args.num_heads) if args.num_heads else {}
    info = common.backbone_info(args.arch, args.image_size, args.patch_size, args.norm, "bicubic", **heads)
    info["encoder"] = args.key_encoder
    # Drop path is for training only, so `info` does not have it
    backbone = common.build_backbone(info, drop_path_rate=args.drop_path if common.is_vit(args.arch) else None)
    sizes = [args.image_size, args.local_size] if args.local_crops else [args.image_size]
    width = common.feature_width(backbone, *sizes)
    if args.init:
        common.load_weights(backbone, args.init, args.init_prefix)
    loss_options = dict(terms=terms, temperature=args.temperature, smoothing=args.smoothing)
    model = PatchMix(backbone, width, args.hidden, args.dim, key_encoder=args.key_encoder, **mixing, **loss_options)
    synchronize = world > 1 and device.type == "cuda"  # torch synchronizes batch norm on GPUs only
    model = timm.layers.convert_sync_batchnorm(model) if synchronize else model
    model.to(device)
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model), lr=0.0, fused=True)  # group 1 has the weights

    # The run
    amp = common.use_bf16(args.amp, device)
    state = dict(model=model, optimizer=optimizer)
    weight = sum(terms.values()) + (args.num_mix - 1) * terms.get("mtm", 0.0)  # of all positives: M in mtm, else 1
    if args.local_crops:
        weight += 2 * len(terms.keys() & {"oto", "mto"})  # against the keys of both views
    derived = dict(loss_at_uniform_logits=weight * math.log(args.batch_size), peak_lr=args.lr * args.batch_size / 256)
    derived |= dict(mix_slices=slices * world, batch_norm_groups=1 if synchronize else world, bf16=amp)
    config, records = common.open_run(args, train, state, derived)  # restores a saved run; one record per epoch
    if args.compile:
        model.backbone.compile(dynamic=False)
        model.momentum_backbone.compile(dynamic=False)
    ddp = DistributedDataParallel(model) if world > 1 else model
    ddp.broadcast_buffers = False  # batch norm does not need it; torch 2.13 renames the argument, not the attribute

    for epoch in range(len(records), args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(hash((args.seed, epoch, rank)))  # a resumed run gets the same seed: hashes of ints are fixed
        meter = common.Meter(epoch, args.epochs, len(loader), args.batch_size)
        for step, (crops, _) in enumerate(loader):
            now = epoch + step / len(loader)  # in epochs
            lr = learning_rate(args, now)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.param_groups[1]["weight_decay"] = cosine(*args.weight_decay, now / args.epochs)  # of weights only
            views = [augment(x.to(device, non_blocking=True), args, i) for i, x in enumerate(crops)]
            if args.variant == "released":  # the mixed queries are of view 2 (D5)
                views[:2] = views[1], views[0]
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss, q, metrics = ddp(views)  # Algorithm 2, lines 5 to 9
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()  # line 10
            m = cosine(*args.momentum, now / args.epochs)
            model.update(m)  # line 11
            meter.update(metrics | dict(grad_norm=grad_norm))

        if world > 1:
            timm.utils.distribute_bn(model, world, reduce=True)  # average the running statistics
        records.append(dict(epoch=epoch + 1, lr=lr, momentum=m) | meter.averages() | common.embedding_health(q))
        # lr and q are the last step's. Save before kNN, too, so that a test image that cannot be read costs no epoch
        common.save_run(args.out, config, info, state, records, args.keep_every)
        if test is not None and args.knn_every and ((epoch + 1) % args.knn_every == 0 or epoch + 1 == args.epochs):
            records[-1] |= common.knn_accuracy(model.momentum_backbone, info, train, test, device, args.workers, amp)
            common.save_run(args.out, config, info, state, records, args.keep_every)
        common.log_epoch(f"epoch {epoch + 1}/{args.epochs}", records, ("loss", "std", "images_per_s"))
    common.log_epoch(f"finished: {args.out}", records)


# ================================================================ 6. processes

# ------------------------------------------------------ gather (shared block)


def gather(x):
    """Concatenate the tensors (n, ...) of all processes, whose n is the same, in rank order: (N, ...). No gradient."""
    if not dist.is_initialized():
        return x.detach()
    whole = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather(list(whole.split(len(x))), x.contiguous())
    return whole


# ============ 7. differences between the paper, the released code and this file

# D1 The terms. Paper: each counts 1, and mtm's weights sum to M. Released: oto counts 1, mto and mtm 0.5, mtm's weights
#    sum to 1, and 0.1 of oto's targets is spread over all keys. So its M = 1 is not MoCo v3.
# D2 The number of images M. Paper: 3. Released: 2.
# D3 The attention heads of ViT-S. Paper (Table 8): 6. Released, and the paper's Fig. 11: 12.
# D4 ViT-T's keys. Paper: of a momentum encoder. Released: of the query encoder, in training mode, `--key-encoder
#    query`; both are then the same encoder. There, queries and keys share a forward pass; here, they have one each.
# D5 The mixed query. Paper: of view 1, and the original one of view 2. Released: the reverse.
# D6 Local crops. Paper ("4(224)" views): none. Released, on ImageNet: 8 of 96 px with 0.05 to 0.35 of the area, blurred
#    with probability 0.5; large ones from 0.35. They add the terms local_oto and local_mto to the loss: the mean over
#    local crops of the sum over the keys of both views. Each has weight 1, or 0 if that of oto (or mto) is 0.
# D7 The ring of images (Eq. 4, 10, 11: mod N). Paper: the batch. Released: a GPU's part. Here: a slice of the batch,
#    `--mix-slices`, at least one per process; 1 on one process is the paper's ring. Each slice has its own shuffle of
#    the patches (Eq. 2); the paper draws one for the batch.
# D8 The cosine after 10 epochs of warmup. Paper: "the rest 260" of 300 epochs. Released, and here: the other 290.
# D9 The baseline. Paper: MoCo v3 (Tables 2, 3). Here: `--num-mix 1 --terms oto,mto`. For M = 1 (Tables 5, 6), pass
#    `--num-mix 1`. Then mto and mtm are equal, except that with `--key-encoder query` their keys drop different paths.
#    For oto alone (Table 7), pass `--terms oto`.
# D10 The T mod M patches in no group. Paper: Eq. 3 and 6 assume that there are none. With M = 3, one patch of 196
#    or 256 remains. Released, and here: it is taken from image i.
# D11 Misprints. Paper: the group G_im begins at j = 0 (3.1), but at j = mS in Eq. 6, as here. The positives of "the
#    second sample" in App. A, (7, 8, 0, 1, 2), are the first one's; Eq. 11 gives (8, 0, 1, 2, 3).
# Differences in rounding, indices and precision are listed in tests/golden/README.md.
# Omitted: the other mixes of Table 5 (CutMix and Mixup, RegionSwap, ResizeMix), COCO (Table 4), and Figs. 4, 8 to 11.


if __name__ == "__main__":
    common.start(main, parse_args, "--dataset imagenet --data-dir DIR --arch vit_small")
