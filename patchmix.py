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
    Algorithm 2   PatchMix (lines 1, 2), main (3, 4, 5, 6, 10 and 11), PatchMix.forward (7, 8, 9, the loss of 10)

    python patchmix.py                                                        # a laptop, no data
    python patchmix.py --dataset cifar10 --arch vit_tiny                      # one GPU
    torchrun --nproc_per_node=8 patchmix.py --dataset imagenet --data-dir DIR --arch vit_small

The baseline is MoCo v3, without its frozen patch projection and fixed positions. `--num-mix 1 --terms oto,mto` is
L(q2, k1) + L(q1, k2), its symmetric loss divided by 2 tau. (With M = 1, mtm is mto.) What PatchMix changes in it:
    queries of both views                     one view's queries are of mixed images      mix_views
    L(q2, k1) + L(q1, k2)                     oto + mto + mtm, with mixed keys            PatchMix.forward
    one positive per query                    M, or 2M - 1, positives with weights        mix_targets
    InfoNCE                                   its sum over the weighted positives         soft_info_nce
Not here: the other mixes of Table 5 (CutMix and Mixup, RegionSwap, ResizeMix), COCO (Table 4), and Figs. 4, 8 to 11.

Where the paper, which is the default, and the released code, `--variant released`, differ:
    D1 The terms. Paper: each counts 1, and mtm's weights sum to M. Released: oto counts 1, mto and mtm 0.5, mtm's
       weights sum to 1, and 0.1 of oto's targets is spread over all keys. So its M = 1 is not MoCo v3.
    D2 The number of images M. Paper: 3. Released: 2.
    D3 The attention heads of ViT-S. Paper (Table 8): 6. Released, and the paper's Fig. 11: 12.
    D4 ViT-T's keys. Paper: of a momentum encoder. Released: of the encoder, in training mode; `--momentum 0 0` is
       nearly this, but for a forward pass that queries and keys share there.
    D5 The mixed query. Paper: of view 1, and the original one of view 2. Released: the reverse, `--mixed-view 2`.
    D6 Local crops. Paper ("4(224)" views): none. Released, on ImageNet: 8 of 96 px; large ones from 0.35 of the area.
    D7 The ring of images. Paper (Eq. 4, 10, 11: mod N): the batch. Released: a GPU's part. Here: a slice of the batch.
What differs by rounding, by an index or by precision is in tests/golden/README.md.
"""

import argparse
import copy
import math
import time
from itertools import pairwise

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
    recipe=dict(variant=("paper", "follow the paper, or the authors' code", ("paper", "released"))),
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
        num_heads=(None, "heads of the ViT's attention; default: timm's (D3)", (1, math.inf)),
        drop_path=(0.1, "drop-path rate of the ViT's last block; earlier ones have less", (0, 1)),  # released
        hidden=(4096, "hidden size of the projector and the predictor (Table 9)", (1, math.inf)),
        dim=(256, "dimension of queries and keys (Table 9)", (1, math.inf)),
        momentum=((0.996, 1.0), "momentum mu, first and last; 0 0: no such encoder (D4)", (0, 1)),
    ),
    schedule=dict(
        epochs=(300, "epochs of the whole training", (1, math.inf)),  # its 10 of warm-up and "rest 260" make 270
        batch_size=(1024, "images per step, over all processes", (2, math.inf)),
        lr=(1e-3, "peak learning rate at --lr-batch, scaled linearly", (1e-9, math.inf)),  # ours; ViT-S: 2e-3
        min_lr=(1e-6, "last learning rate, scaled as --lr is"),  # released
        lr_batch=(1024, "batch size for which the learning rates are given", (1, math.inf)),
        warmup=(10.0, "epochs of linear warm-up, at most a quarter of the run"),
        weight_decay=((0.04, 0.4), "weight decay of AdamW, at the start and at the end"),
        betas=((0.9, 0.999), "betas of AdamW", (0, 0.999999)),  # released
    ),
    augmentation=dict(
        crop_scale=((0.05, 1.0), "smallest and largest share of the image that a crop has", (1e-9, 1)),
        local_size=(96, "side of a local crop, in pixels", (1, math.inf)),  # released
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
    index, weight = index.to(q.device, non_blocking=True), weight.to(logits, non_blocking=True)
    log_sum = logits.logsumexp(1, keepdim=True)
    loss = (weight * (log_sum - logits.gather(1, index))).sum(1).mean()
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * weight.sum() * (log_sum.mean() - logits.mean())
    return loss


# ============================================================= 3. augmentation


def augmentation(args):
    """Return the two views per image, drawn by T_1 and T_2 of Table 10, and the local crops (D6): {name: View}."""
    crop = dict(size=args.image_size, area=args.crop_scale, ratio=args.crop_ratio)
    color = dict(jitter=args.jitter, jitter_p=args.jitter_p, gray_p=args.gray_p, solarize_p=args.solarize_p[0])
    blur = dict(blur_p=args.blur_p[0], blur_sigma=args.blur_sigma)
    view = common.View(**crop, **color, **blur, flip_p=args.flip_p)
    view2 = view._replace(blur_p=args.blur_p[1], solarize_p=args.solarize_p[1])
    local = view._replace(size=args.local_size, area=args.local_scale, blur_p=args.local_blur_p, solarize_p=0.0)
    return {"view 1": view, "view 2": view2} | {f"local {i + 1}": local for i in range(args.local_crops)}


def image_sizes(args):
    """Return the sides of the images that the encoder gets, in pixels."""
    return [args.image_size, *[args.local_size] * args.local_crops]


def mix_views(views, num_mix, patch_size, slices=1, generators=None):
    """Mix each view's images by `patch_mix`, within equal slices of the batch (D7): a list of (n, 3, H, W).

    views: list of this process's images (n, 3, H, W). slices: of this process. generators: a torch CPU generator per
    view, of its permutation (Eq. 2), which is the same in all slices and on all processes; torch's global one if None.
    """
    mixed = []
    for view, generator in zip(views, generators or [None] * len(views), strict=True):
        permutation = torch.randperm((view.shape[-1] // patch_size) ** 2, generator=generator)
        mixed.append(torch.cat([patch_mix(x, num_mix, patch_size, permutation) for x in view.chunk(slices)]))
    return mixed


# ==================================================================== 4. model

TERMS = ("oto", "mto", "mtm")  # of Eq. 16


def batch_targets(n, slices, num_mix, first=0):
    """Return the positives of n images, mixed in equal slices, {term: (index (n, P) int64, weight (P,))}.

    first: the row of their first key among the keys of all processes.
    """
    size = n // slices
    of_slices = [mix_targets(size, num_mix, first + i * size) for i in range(slices)]
    mto_index, mto_weight, mtm_index, mtm_weight = zip(*of_slices, strict=True)
    return dict(
        oto=(first + torch.arange(n)[:, None], torch.ones(1)),
        mto=(torch.cat(mto_index), mto_weight[0]),
        mtm=(torch.cat(mtm_index), mtm_weight[0]),
    )


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

    Copy it with TERMS, mlp, batch_targets, mix_targets, soft_info_nce and gather; mix_views needs patch_mix.
    backbone: (n, 3, H, W) -> (n, width). hidden, dim: of the heads. num_mix, slices: as given to `mix_views`. terms:
    some of TERMS, {term: weight}. smoothing: of oto (D1). slow: have a momentum encoder (D4). amp: encode in bf16.
    """

    def __init__(
        self, backbone, width, hidden=4096, dim=256, num_mix=3, slices=1, terms=dict.fromkeys(TERMS, 1.0),
        temperature=0.2, smoothing=0.0, slow=True, amp=False,
    ):  # fmt: skip
        super().__init__()
        self.backbone = backbone  # Algorithm 2, line 1
        self.projector = mlp([width, hidden, hidden, dim])
        self.predictor = mlp([dim, hidden, dim])
        self.momentum_backbone, self.momentum_projector = backbone, self.projector
        if slow:  # line 2
            self.momentum_backbone = copy.deepcopy(backbone).requires_grad_(False)
            self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
            for module in self.momentum_backbone.modules():
                if isinstance(module, timm.layers.DropPath):  # only the encoder drops paths
                    module.drop_prob = 0.0
        self.num_mix, self.slices, self.terms = num_mix, slices, dict(terms)
        self.temperature, self.smoothing, self.amp = temperature, smoothing, amp

    def query(self, x):
        """Return the queries of images, h = H(G(F(x))): (n, 3, H, W) -> (n, dim), not normalised, in the dtype of x."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    @torch.no_grad()
    def key(self, x):
        """Return the keys of all processes' images, sg(z) of Eq. 16, z = G(F(x)) by the momentum encoder.

        (n, 3, H, W) of this process -> (N, dim), not normalised, in the dtype of x. No gradient.
        """
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return gather(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype))

    def forward(self, views, mixed):
        """Return (loss, None, queries (n, dim) without gradient, {name: metric}): lines 7 to 9, and the loss of 10.

        views: this process's two views and its local crops, if any, each (n, 3, H, W), normalised; the mixed queries
        are of the first. mixed: the same, mixed by `mix_views`. No keys are enqueued. Gradients reach the encoder only.
        Local crops (D6), as released: the plain ones are queries as in oto, the mixed ones as in mto, against the
        original keys of both views; the loss is the mean over the crops, summed over the two.
        """
        (x1, x2, *crops), (mixed1, mixed2, *mixed_crops) = views, mixed
        n = len(x1)
        first = n * dist.get_rank() if dist.is_initialized() else 0
        targets = batch_targets(n, self.slices, self.num_mix, first)  # line 7; y_mto of 5 and 6

        def contrast(term, h, z):
            smoothing = self.smoothing if term == "oto" else 0.0  # D1
            return soft_info_nce(h, z, *targets[term], self.temperature, smoothing)

        h, z, losses = {}, {}, {}  # by term, and only what the terms need: lines 8 and 9
        if "oto" in self.terms:
            h["oto"], z["oto"] = self.query(x2), self.key(x1)  # Eq. 15
        if "mto" in self.terms or "mtm" in self.terms:
            h["mto"] = h["mtm"] = self.query(mixed1)
        if "mto" in self.terms:
            z["mto"] = self.key(x2)  # Eq. 13
        if "mtm" in self.terms:
            z["mtm"] = self.key(mixed2)  # Eq. 14
        for term in self.terms:
            losses[term] = contrast(term, h[term], z[term])
        loss = sum(weight * losses[term] for term, weight in self.terms.items())  # line 10: Eq. 16
        if crops:
            z1 = z["oto"] if "oto" in z else self.key(x1)
            z2 = z["mto"] if "mto" in z else self.key(x2)
            for term, images in dict(oto=crops, mto=mixed_crops).items():
                if term in self.terms:
                    queries = self.query(torch.cat(images)).chunk(len(images))
                    values = [contrast(term, query, keys) for query in queries for keys in (z1, z2)]
                    losses[f"local_{term}"] = sum(values) / len(images)
            loss = loss + sum(value for term, value in losses.items() if term not in self.terms)
        metrics = dict(loss=loss, **{f"loss_{term}": value for term, value in losses.items()})
        return loss, None, next(iter(h.values())).detach(), {name: value.detach() for name, value in metrics.items()}

    @torch.no_grad()
    def update(self, m):
        """Move the momentum encoder's parameters: Xi <- m Xi + (1 - m) Theta (Algorithm 2, line 11), m in [0, 1]."""
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


# ================================================================= 5. training

STREAM_EPOCH = 0  # random streams, see common.generator
STREAM_PERMUTATION = 10  # 10 and 11 for the two views, then one per local crop; a 0 follows, as it did in older runs

# fmt: off
IMAGENET = common.defaults(HYPERPARAMETERS)
CIFAR = dict(  # section 4.1.2; released: ImageNet's mean and standard deviation; ours: the slices
    IMAGENET, arch="vit_tiny", image_size=32, patch_size=2, epochs=800, warmup=100.0, batch_size=512, lr_batch=512,
    mix_slices=4, crop_scale=(0.1, 1.0), local_size=16,
)
SMALL_ENCODER = dict(  # ours, for CPUs: small heads, few patches, weak views
    batch_size=64, lr_batch=64, weight_decay=(0.02, 0.2), patch_size=8, num_mix=2, mix_slices=1, hidden=512, dim=128,
    drop_path=0.0, crop_scale=(0.3, 1.0), blur_p=(0.1, 0.1), momentum=(0.98, 1.0), local_size=16,
)
RECIPES = dict(
    patterns=IMAGENET | SMALL_ENCODER | dict(arch="vit_micro", image_size=32, epochs=50, warmup=1.0, norm="patterns"),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(CIFAR, image_size=96, patch_size=6, local_size=48),  # ours
    imagenet100=IMAGENET,  # ours
    imagenet=dict(IMAGENET, knn_every=50),  # its kNN takes minutes
    folder=dict(IMAGENET, mix_slices=1),  # ours: a folder of one's own may be small
)
CIFAR_ENCODERS = dict(  # section 4.1.2
    vit_micro=dict(lr=2e-3, weight_decay=(0.02, 0.2), patch_size=8, hidden=512, dim=128),  # ours, for CPUs
    vit_tiny=dict(lr=4e-3, weight_decay=(0.02, 0.2)),
    vit_small=dict(lr=1e-3),
    vit_base=dict(lr=1.5e-3),
)
IMAGENET_ENCODERS = dict(  # section 4.1.2; vit_tiny: released
    vit_tiny=dict(lr=8e-3, weight_decay=(0.02, 0.2)), vit_small=dict(lr=2e-3), vit_base=dict(lr=3e-3)
)
RELEASED = dict(num_mix=2, smoothing=0.1, mixed_view=2)  # D2, D1, D5
RELEASED_IMAGENET = dict(RELEASED, local_crops=8, crop_scale=(0.35, 1.0))  # D6; without local crops it is RELEASED
RELEASED_ENCODERS = dict(vit_small=dict(num_heads=12), vit_tiny=dict(momentum=(0.0, 0.0)))  # D3, D4
# fmt: on


def recipe(chosen):
    """Return the hyper-parameters {name: value}. chosen: what is given, a namespace, with None for the rest."""
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
    if chosen.image_size:  # local crops follow it: at most half of a view's side, in whole patches
        patch_size = chosen.patch_size or values["patch_size"]
        values["local_size"] = min(values["local_size"], chosen.image_size // 2) // patch_size * patch_size
    return values


def parse_args(argv=None):
    """Return the command line (argv, or sys.argv's) as a namespace of all values. Exits with an error on a mistake."""
    args = common.parse("patchmix", __doc__, argv, HYPERPARAMETERS | common.RUN, recipe)
    terms = args.terms.split(",")
    if not set(terms) <= set(TERMS) or (args.local_crops and terms == ["mtm"]):
        common.fail(f"--terms {args.terms}: give some of {','.join(TERMS)}; --local-crops are queries of oto and mto")
    for size in image_sizes(args):
        if size % args.patch_size or args.num_mix > (size // args.patch_size) ** 2:
            common.fail(f"--patch-size {args.patch_size} does not cut {size} px into --num-mix {args.num_mix} patches")
    return args


def cosine(start, end, done):
    """Half a cosine from `start` to `end`; done: the share of the way, from 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def learning_rate(args, epoch):
    """Return the learning rate at a time, in epochs from 0: a linear warm-up from 0, then a cosine down to --min-lr."""
    peak, last = (lr * args.batch_size / args.lr_batch for lr in (args.lr, args.min_lr))
    warmup = min(args.warmup, args.epochs / 4)
    if epoch < warmup:
        return peak * epoch / warmup
    return cosine(peak, last, (epoch - warmup) / (args.epochs - warmup))


def term_weights(args):
    """Return the weights of the terms of the loss that --terms chooses, {term: weight}."""
    return {t: w for t, w in zip(TERMS, args.term_weights, strict=True) if t in args.terms.split(",")}


def uniform_loss(args):
    """Return the loss at uniform logits: each contrast is then the sum of its targets' weights times log N."""
    terms = term_weights(args)
    weights = sum(weight * (args.num_mix if term == "mtm" else 1) for term, weight in terms.items())
    if args.local_crops:
        weights += 2 * sum(term in terms for term in ("oto", "mto"))  # against the keys of both views
    return weights * math.log(args.batch_size)


def main(args, train=None, test=None, encoder=None):
    """Train as args say. The same call goes on after the last whole epoch that --out holds.

    args: the namespace of `parse_args`. train, test: common.ImageSet of images to use instead of --dataset.
    encoder: a module that maps (N, 3, H, W) to (N, width), to train instead of --arch; a copy of it is trained.
    """
    args = argparse.Namespace(**vars(args) | dict(arch=args.arch if encoder is None else "custom"))
    device, rank, world = common.join_processes(args.device)

    # Data
    train, test = common.open_images(args, train, test)
    declared = augmentation(args)
    loader = common.make_loader(args, train, [*declared.values()], device)
    layout, norm = common.memory_format(device, args.arch), common.NORMS[args.norm]
    slices = common.slices_per_process(args, "mix_slices")
    if args.show_views:
        views = common.color_views(next(iter(loader)), device)
        permutations = [common.generator(args.seed, i) for i in range(len(views))]
        views += mix_views(views, args.num_mix, args.patch_size, slices, permutations)
        return common.save_views(args.show_views, views, [*declared, *(f"{name}, mixed" for name in declared)])

    # Model and optimizer
    torch.manual_seed(args.seed)
    info = common.encoder_info(args, method="patchmix", encoder="momentum")  # the encoder that is evaluated
    drop_path = dict(drop_path_rate=args.drop_path) if common.is_vit(args.arch) else {}
    backbone = common.build_backbone(info, **drop_path) if encoder is None else common.copy_module(encoder)
    width = common.output_width(backbone, *image_sizes(args), check_gradient=True)
    amp = common.use_bf16(args.amp, device, args.arch, image_sizes(args))
    losses = term_weights(args), args.temperature, args.smoothing
    slow = max(args.momentum) > 0  # D4
    model = PatchMix(backbone, width, args.hidden, args.dim, args.num_mix, slices, *losses, slow, amp).to(device)
    groups = world
    if world > 1 and device.type == "cuda":  # of the whole batch, as released; torch has it on GPUs only
        model, groups = timm.layers.convert_sync_batchnorm(model), 1
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model), betas=args.betas, fused=True)

    # The run
    config = common.open_run(args, train)
    state = dict(model=model, optimizer=optimizer)
    records = common.load_run(args, config, state)  # one for each epoch that is done
    if args.compile:
        model.backbone.compile()
        model.momentum_backbone.compile()
    ddp = DistributedDataParallel(model, find_unused_parameters=encoder is not None) if dist.is_initialized() else model
    ddp.broadcast_buffers = False  # at each step; when it is made, all get the first process's weights and buffers
    facts = dict(batch_norm_groups=groups, bf16=amp, slices=slices * world)
    facts |= dict(loss_at_uniform_logits=uniform_loss(args))
    common.log_table(args, HYPERPARAMETERS | common.RUN, train=train, test=test, **facts)

    # The last epoch's kNN, if a kill came before it
    common.add_knn(args, config, info, state, records, model.momentum_backbone, train, test, device, amp)
    for epoch in range(len(records), args.epochs):
        loader.batch_sampler.epoch = epoch
        torch.manual_seed(common.generator(args.seed, epoch, STREAM_EPOCH, rank).initial_seed())  # for drop-path
        history, began = [], time.perf_counter()
        for step, batch in enumerate(loader, epoch * len(loader)):
            lr = learning_rate(args, step / len(loader))
            for group in optimizer.param_groups:
                group["lr"] = lr
            done = step / (args.epochs * len(loader))
            _, with_decay = optimizer.param_groups  # as released, 1-D tensors and biases have none
            with_decay["weight_decay"] = cosine(*args.weight_decay, done)
            momentum = cosine(*args.momentum, done)
            # Algorithm 2, line 4: two views per image, cut by the loader and colored here
            views = common.color_views(batch, device, layout, norm)
            if args.mixed_view == 2:  # D5
                views[:2] = views[1], views[0]
            # Lines 5 and 6: the mixed images
            permutations = [common.generator(args.seed, step, STREAM_PERMUTATION + i, 0) for i in range(len(views))]
            mixed = mix_views(views, args.num_mix, args.patch_size, slices, permutations)
            # Lines 7 to 9, and the loss of 10
            loss, _, q, metrics = ddp(views, mixed)
            # Line 10: update the encoder. Line 11: move the momentum encoder
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            model.update(momentum)
            history.append(metrics | dict(grad_norm=grad_norm))
            if (step + 1) % 10 == 0:
                common.show_progress(args, history, began, step + 1, args.epochs * len(loader))

        record = dict(epoch=epoch + 1, lr=lr, momentum=momentum)
        records.append(record | common.means(args, history, began) | common.embedding_health(q))
        common.save_run(args, config, info, state, records)  # before the kNN, which may fail
        common.add_knn(args, config, info, state, records, model.momentum_backbone, train, test, device, amp)
        common.log_epoch(args, records[-1])
    common.log_end(args, train)


# ------------------------------------------------------ gather (shared block)


def gather(x):
    """Concatenate the tensors (n, ...) of all processes to (N, ...), in rank order. No gradient."""
    if not dist.is_initialized():
        return x
    out = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather([*out.chunk(dist.get_world_size())], x.contiguous())
    return out


if __name__ == "__main__":
    common.start(main, parse_args)
