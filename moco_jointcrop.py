"""MoCo with JointCrop and JointBlur (arXiv 2412.16522, AAAI 2025), on MoCo v1, v2 and v3.

Two random crops of an image usually have similar areas, and such pairs are easy positives. JointCrop draws the ratio of
the two areas first, and then the areas, from the same range. beta sets the distribution of the ratio: beta > 0 prefers
similar areas, beta = 0 makes its logarithm uniform, and beta < 0 prefers extreme ratios. JointBlur does the same with
the sigmas of the two blurs: one view can be sharp while the other is not. The rest is MoCo, with a queue (v1, v2) or
without one (v3). Inferred: only the paper's appendix was available, so JointBlur's form is our choice (see the end).

    Algorithm 1        joint_from_uniform, sample_joint    the two areas, or the sigmas of the two blurs
    App. H, Eq. 4-10   joint_from_uniform, beta=None       RandomCrop's areas, for the tests; training calls torchvision
    App. D             JointViews, --local-crops           JointCrop with multi-crop, and which pairs are drawn jointly
    App. F             JointViews, --joint either          JointCrop or JointBlur, one of the two per image
    App. G             center_suppressed, --css-alpha      center-suppressed sampling of a crop's position
    MoCo, Eq. 1, 2     info_nce; MoCoBase.update           the loss; the momentum encoder
    MoCo v3, Alg. 1    contrast, MoCoV3.forward            the symmetric loss

    python moco_jointcrop.py                                                  # a laptop, no data
    python moco_jointcrop.py --dataset cifar10 --joint none                   # the baseline, MoCo v2, on one GPU
    torchrun --nproc_per_node=8 moco_jointcrop.py --dataset imagenet --data-dir DIR --moco v1

The baseline is exactly MoCo: `--joint none` (on ImageNet, v1 has ContrastiveCrop's views). The two methods change:
    two areas, each drawn on its own          ->  two areas whose ratio is drawn first              (JointCrop)
    each view is blurred or not on its own    ->  one draw for both, and sigmas by the same rule    (draw_sigmas)
(D1), (D2), ... at the end are differences between the paper, the released code (`--variant released`) and this file.
"""

import argparse
import copy
import math
import os
from statistics import NormalDist

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.optim import Lars, param_groups_weight_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms import v2

import common

# ========================================================= 1. hyper-parameters


def parse_args(argv=None):
    """Parse the command line. The defaults are MoCo v2's for ImageNet, with the changes that `recipe` returns."""
    parser = argparse.ArgumentParser(os.path.basename(__file__), description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--variant", choices=("paper", "released"), default="paper", help="paper: any MoCo; released: J-Crop(0) on v3")
    add("--moco", choices=("v1", "v2", "v3"), help="version of MoCo (D6), which also chooses the defaults")

    add = parser.add_argument_group("loss").add_argument
    add("--local-crops", type=common.nonnegative_int, default=0, help="local crops per image, as queries (App. D, D9)")
    add("--temperature", type=common.positive_float, default=0.2, help="softmax temperature tau")
    add("--queue", type=common.positive_int, default=65536, help="queue length; folder: a tenth of the images")

    add = parser.add_argument_group("model").add_argument
    add("--arch", default="resnet50", help="encoder: resnet_mini, resnet18, resnet50, vit_small, or any timm model")
    add("--image-size", type=common.positive_int, default=224, help="size of the views, in pixels")
    add("--patch-size", type=common.positive_int, default=16, help="patch size of a ViT, in pixels")
    add("--dim", type=common.positive_int, default=128, help="embedding dimension")
    add("--hidden", type=common.positive_int, default=4096, help="hidden size of projector and predictor (v3)")
    add("--bn-groups", type=common.positive_int, default=8, help="batch-norm groups per global batch, for ShuffleBN")
    add("--momentum", action=common.FractionPair, default=[0.999, 0.999], help="EMA momentum; two: initial and final")

    add = parser.add_argument_group("schedule").add_argument
    add("--epochs", type=common.positive_int, default=200, help="number of epochs")
    add("--batch-size", type=common.positive_int, default=256, help="global batch size, over all processes")
    add("--lr", type=common.positive_float, default=0.03, help="peak learning rate per 256 images")
    add("--min-lr", type=common.nonnegative_float, default=0.0, help="final learning rate per 256 images")
    add("--milestones", type=common.fraction, nargs="*", default=[], help="fractions of training at which the learning "
        "rate is divided by 10; none: a cosine")  # fmt: skip
    add("--warmup", type=common.nonnegative_float, default=0.0, help="linear warmup epochs, at most --epochs / 4")
    add("--weight-decay", type=common.nonnegative_float, default=1e-4, help="weight decay of SGD, or of LARS (v3)")

    add = parser.add_argument_group("augmentation").add_argument
    add("--joint", choices=("none", "crop", "blur", "either", "both"), default="crop", help="what is drawn jointly")
    add("--joint-pair", choices=("global", "local", "both"), default="global", help="crops drawn jointly (App. D)")
    add("--joint-prob", type=common.fraction, default=0.5, help="probability of JointCrop with --joint either (App. F)")
    finite = common.bounded("a finite number", float, math.isfinite)
    add("--beta", type=finite, default=0.0, help="beta of J-Crop(beta) and J-Blur(beta), of any sign")
    add("--css-alpha", type=common.concentration, default=1.0, help="alpha of center-suppressed crops (App. G)")
    add("--crop-scale", action=common.AreaRange, default=[0.2, 1.0], help="area range of RandomResizedCrop")
    add("--local-size", type=common.positive_int, default=96, help="size of a local crop, in pixels (App. D)")
    add("--local-scale", action=common.AreaRange, default=[0.05, 0.4], help="area range of local crops (App. D)")
    add("--blur-p", action=common.FractionPair, default=[0.5, 0.5], help="probability of blur; two values: query, key")

    args = common.parse_args(parser, argv, recipe)
    args.warmup = min(args.warmup, args.epochs / 4)  # a short run would not reach its peak learning rate
    common.needs(parser, args, ["patch_size"], common.is_vit(args.arch), "a ViT (--arch)")
    common.needs(parser, args, ["bn_groups"], not common.is_vit(args.arch), "batch norm, which no ViT (--arch) has")
    common.needs(parser, args, ["local_size", "local_scale"], args.local_crops, "local crops (--local-crops)")
    if args.local_crops and args.local_size > args.image_size:
        parser.error(f"--local-size {args.local_size} is larger than --image-size {args.image_size}")
    if args.joint in ("blur", "either", "both") and min(args.blur_p) == 0:
        parser.error(f"--joint {args.joint} needs blurs of both views: pass --blur-p 0.5")
    chosen = args.moco, args.joint, args.beta, args.css_alpha, args.local_crops
    if args.variant == "released" and chosen != ("v3", "crop", 0, 1, 0):
        parser.error("--variant released needs --moco v3 --joint crop --beta 0 --css-alpha 1 --local-crops 0 (D3, D6)")
    if args.moco == "v3" and common.is_vit(args.arch):
        parser.error("--moco v3 has recipes for ResNets only (D7): for a ViT, run the baseline of patchmix.py")
    common.needs(parser, args, ["queue", "bn_groups"], args.moco != "v3", "--moco v1 or v2")
    common.needs(parser, args, ["hidden"], args.moco == "v3", "--moco v3")
    common.needs(parser, args, ["min_lr"], not args.milestones, "a cosine (--milestones without numbers)")
    if args.min_lr > args.lr:
        parser.error(f"--min-lr {args.min_lr} is above --lr {args.lr}, the peak of the learning rate")
    common.needs(parser, args, ["beta"], args.joint != "none", "--joint crop, blur, either or both")
    common.needs(parser, args, ["joint_prob"], args.joint == "either", "--joint either")
    has_local_pairs = args.joint not in ("none", "blur") and args.local_crops >= 2
    common.needs(parser, args, ["joint_pair"], has_local_pairs, "JointCrop (--joint) and --local-crops 2 or more")
    return args


CIFAR = dict(  # MoCo's demo on CIFAR-10, with a warmup and the paper's areas (D4, D5). JointBlur needs --blur-p 0.5
    arch="resnet18", image_size=32, patch_size=4, epochs=200, batch_size=512, lr=0.03, warmup=1.0,  # 0.06 for 512
    weight_decay=5e-4, momentum=[0.99, 0.99], queue=4096, blur_p=[0.0, 0.0], local_size=16,
)  # fmt: skip
RECIPES = dict(  # what differs from MoCo v2's values for ImageNet
    patterns=dict(  # not in the paper: for a laptop
        arch="resnet_micro", image_size=32, patch_size=4, epochs=75, batch_size=64, lr=0.04, queue=128,
        blur_p=[0.1, 0.1], crop_scale=[0.3, 1.0], bn_groups=2, momentum=[0.95, 0.95], warmup=1.0, local_size=16,
    ),
    cifar10=CIFAR,
    cifar100=CIFAR,
    stl10=dict(CIFAR, image_size=96, patch_size=8, queue=8192, local_size=48),
    imagenet100=dict(arch="resnet18", queue=16384),  # our choice
    imagenet={},
    folder=dict(queue=None, bn_groups=2, momentum=[0.99, 0.99]),  # not in the paper; None: a tenth of the images
)  # fmt: skip
V1 = dict(temperature=0.07, milestones=[0.6, 0.8])  # ContrastiveCrop's for ImageNet (App. G; D8)
V1_CIFAR = dict(temperature=0.1, warmup=0.0, crop_scale=[0.08, 1.0])  # MoCo's demo, with a cosine
V3 = dict(  # the released code's and MoCo v3's for 100 epochs (for 300: --lr 0.3)
    lr=0.6, warmup=10.0, weight_decay=1e-6, momentum=[0.99, 1.0], temperature=1.0, dim=256, blur_p=[1.0, 0.1],
    queue=None, bn_groups=None,  # it has neither
)  # fmt: skip
V3_CIFAR = dict(V3, batch_size=512, hidden=2048, blur_p=[0.0, 0.0])  # our choice
V3_PATTERNS = dict(V3, lr=1.2, warmup=1.0, momentum=[0.98, 1.0], hidden=512)  # our choice


def recipe(args):
    """Return the defaults, {name: value}, that suit args, whose moco is None if not given."""
    values = dict(RECIPES[args.dataset], moco="v3" if args.variant == "released" else "v2")
    moco = args.moco or values["moco"]
    if common.is_vit(args.arch):
        values["bn_groups"] = 1  # a ViT has no batch norm
    if args.dataset == "patterns":
        values |= dict(v1=V1, v2={}, v3=V3_PATTERNS)[moco]
    elif args.dataset in ("cifar10", "cifar100", "stl10"):
        values |= dict(v1=V1_CIFAR, v2={}, v3=V3_CIFAR)[moco]
    else:
        values |= dict(v1=dict(V1, epochs=100), v2={}, v3=dict(V3, epochs=100, batch_size=4096))[moco]
    return values


# ================================================================ 2. the paper


def joint_from_uniform(u, v, low, high, beta, offset=0.0):
    """Return (a, b) in [low, high]: s_1, s_2 of Algorithm 1's lower part, which draws their ratio s_r = b / a first.

    ln s_r is in [-s_b, s_b], where s_b = ln(high / low - offset), or 0 if that is negative. beta = 0: it is uniform.
    beta > 0: it is normal with standard deviation s_b / beta, truncated to that interval. beta < 0: it is drawn as for
    -beta, and then replaced by s_b - ln s_r if it is positive, and by -s_b - ln s_r if it is negative. Given s_r, a is
    uniform where a and b are in range. beta None: a and b are uniform and independent (RandomCrop, Eq. 4).

    low, high: s_min, s_max. u, v: floats, uniform draws from [0, 1); u gives ln s_r, v gives a. beta: a finite number,
    or None: then u gives a, v gives b. offset: 0.1 in the released code (D1). Raises ValueError unless 0 < low <= high.
    """
    if not 0 < low <= high:
        raise ValueError(f"joint_from_uniform takes 0 < low <= high, not low {low} and high {high}")
    if beta is None:
        return low + (high - low) * u, low + (high - low) * v
    s_b = math.log(max(high / low - offset, 1.0))  # line 1
    if abs(beta) < 1e-6:
        log_ratio = s_b * (2 * u - 1)  # line 5, and the limit of both other cases
    else:  # lines 3 and 7: a normal, truncated at |beta| standard deviations, by its inverse distribution function
        tail = math.erfc(abs(beta) / math.sqrt(2)) / 2  # the probability below -|beta|, or above |beta|
        normal = NormalDist().inv_cdf(max(tail + u * (1 - 2 * tail), 1e-300))  # inv_cdf(0) is an error
        log_ratio = min(max(normal * s_b / abs(beta), -s_b), s_b)
    if beta < 0:  # lines 8-12: mirrored within each half, so that the extremes are the most likely
        log_ratio = -s_b - log_ratio if log_ratio < 0 else s_b - log_ratio
    ratio = math.exp(log_ratio)
    lowest, highest = max(low, low / ratio), min(high, high / ratio)
    a = lowest + v * max(highest - lowest, 0)  # line 14; rounding may cross the bounds where |ln ratio| = s_b
    return min(max(a, low), high), min(max(a * ratio, low), high)  # line 15


def sample_joint(n, low, high, beta, generator=None, offset=0.0):
    """Draw n pairs by Algorithm 1: two (n,) float64 tensors in [low, high], of areas (J-Crop) or sigmas (J-Blur).

    generator: a torch.Generator on the CPU, or None. Copy it with joint_from_uniform, which has the other arguments.
    """
    draws = torch.rand(n, 2, dtype=torch.float64, generator=generator).tolist()
    pairs = [joint_from_uniform(u, v, low, high, beta, offset) for u, v in draws]
    return torch.tensor(pairs, dtype=torch.float64).view(n, 2).unbind(1)


def center_suppressed(room, alpha):
    """Draw the position of a crop by center-suppressed sampling (App. G): an int in [0, room], from Beta(alpha, alpha).

    room: the largest position, in pixels. alpha: 0.01 or more; values below 1 prefer the edges; 1 is uniform.
    """
    fraction = torch.distributions.Beta(alpha, alpha).sample().item()
    return int(fraction * (room + 1))


def contrast(q, k, temperature, first):
    """Return MoCo v3's loss, ctr of its Algorithm 1: 2 tau times the cross-entropy of cosine similarities.

    q: (n, C), this process's queries. k: (N, C), the keys of all processes. Both are L2-normalized here. Row first + i
    of k is the positive of query i, and the other keys are its negatives. temperature: tau > 0.
    Gradients reach q, and also k unless it is detached. float16 and bfloat16 are converted to float32; call it outside
    autocast, which would undo that. Raises ValueError if the shapes do not fit, or first is out of range.
    """
    if q.dim() != 2 or k.shape[1:] != q.shape[1:] or not 0 <= first <= len(k) - len(q):
        found = f"{tuple(q.shape)}, {tuple(k.shape)} and {first}"
        raise ValueError(f"contrast takes q (n, C), k (N, C) and first from 0 to N - n, not {found}")
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / temperature
    return 2 * temperature * F.cross_entropy(logits, first + torch.arange(len(q), device=q.device))


# ---------------------------------------- InfoNCE with a queue (shared block)


def info_nce(q, k, queue, temperature):
    """Return MoCo's loss, InfoNCE with a queue (MoCo, Eq. 1).

    It is the mean of -log(exp(q.k / tau) / (exp(q.k / tau) + sum_j exp(q.queue_j / tau))), where a query's positive is
    the key in the same row. At equal logits it is log(K + 1).

    q, k: (N, C), L2-normalized. queue: (K, C), the negatives. temperature: tau > 0.
    Gradients reach q, and also k and queue unless these are detached. float16 and bfloat16 are converted to float32;
    call it outside autocast, which would undo that. Raises ValueError if the shapes do not fit.
    """
    if q.dim() != 2 or k.shape != q.shape or queue.shape[1:] != q.shape[1:]:
        shapes = [tuple(x.shape) for x in (q, k, queue)]
        raise ValueError(f"info_nce takes q and k (N, C) and queue (K, C), not {shapes}")
    q, k, queue = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, queue))
    positive = (q * k).sum(1, keepdim=True)
    logits = torch.cat([positive, q @ queue.T], dim=1) / temperature
    return F.cross_entropy(logits, logits.new_zeros(len(q), dtype=torch.int64))  # the positive is in column 0


# ============================================================= 3. augmentation


class JointCrop(v2.RandomResizedCrop):
    """Crop an image twice, with areas that are drawn jointly (Algorithm 1), and resize both crops.

        crop = JointCrop(224, scale=(0.2, 1.0), beta=0.0)
        view1, view2 = [transform(view) for view in crop(image)]  # later transforms draw for each view separately

    The image is an RGB PIL image or a tensor (..., C, H, W). Inside v2.Compose, later transforms change both crops
    alike; if the crops are plain tensors, they change only the first.

    Copy it with joint_from_uniform and center_suppressed. It has the arguments of torchvision's RandomResizedCrop, and
    these. beta, offset: see `joint_from_uniform`. css_alpha: see `center_suppressed`; 1 keeps torchvision's positions.
    whole: if no crop fits into the image, take all of it, not a center crop (D2). If a crop does not fit, torchvision
    draws another area and aspect ratio, up to ten in all. Here, ten aspect ratios are tried with the same area. In
    images of 640 x 320 px, none of them fits for 40% of the crops (areas from 0.2).

    This does the same without the class, with torchvision.transforms.RandomResizedCrop, and with resized_crop and
    gaussian_blur from torchvision.transforms.functional. The first three lines are JointCrop, the others JointBlur:

        areas = torch.cat(sample_joint(1, 0.2, 1.0, beta=0.0)).tolist()
        boxes = [RandomResizedCrop.get_params(image, scale=[area, area], ratio=[3 / 4, 4 / 3]) for area in areas]
        views = [resized_crop(image, *box, size=[224, 224]) for box in boxes]
        sigmas = torch.cat(sample_joint(1, 0.1, 2.0, beta=0.0)).tolist()
        if torch.rand(1) < 0.5:  # both views, or neither
            views = [gaussian_blur(view, 21, sigma) for view, sigma in zip(views, sigmas)]
    """

    def __init__(self, *args, beta=0.0, offset=0.0, css_alpha=1.0, whole=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.beta, self.offset, self.css_alpha, self.whole = beta, offset, css_alpha, whole

    def forward(self, image, *, joint=True):
        """Return two crops of an image. joint: False draws two independent areas, as RandomResizedCrop does."""
        if not joint:
            return [self.crop_once(image, self.scale) for _ in range(2)]
        u, v = torch.rand(2, dtype=torch.float64).tolist()
        areas = joint_from_uniform(u, v, *self.scale, self.beta, self.offset)
        return [self.crop_once(image, (area, area)) for area in areas]  # a range of one area

    def crop_once(self, image, scale):
        """Return a resized crop of an image. scale: (lowest, highest) fraction of the image's area."""
        image_height, image_width = v2.functional.get_size(image)
        box = top, left, height, width = self.get_params(image, scale, self.ratio)
        # The largest centered crop, which `get_params` returns if no aspect ratio fits, and rarely by chance
        max_height = min(image_height, round(image_width / self.ratio[0]))
        max_width = min(image_width, round(image_height * self.ratio[1]))
        center = (image_height - max_height) // 2, (image_width - max_width) // 2, max_height, max_width
        if box == center and self.whole:
            box = 0, 0, image_height, image_width
        elif box != center and self.css_alpha != 1:
            top = center_suppressed(image_height - height, self.css_alpha)
            left = center_suppressed(image_width - width, self.css_alpha)
            box = top, left, height, width
        return v2.functional.resized_crop(image, *box, self.size, self.interpolation, self.antialias)


class JointViews(Dataset):
    """Crops of each image: items ([uint8 (3, S, S), ...], whether the blurs are joint).

    The crops are the query view, the key view and local crops. images: a dataset with items (PIL image, label). crop,
    local_crop: JointCrop of the two views, and of two local crops. local_crops: their number per image. joint, pair,
    probability: --joint, --joint-pair and --joint-prob.
    """

    def __init__(self, images, crop, local_crop, local_crops=0, joint="crop", pair="global", probability=0.5):
        self.images, self.crop, self.local_crop, self.local_crops = images, crop, local_crop, local_crops
        self.joint, self.pair, self.probability = joint, pair, probability

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = common.to_rgb(self.images[index][0])
        joint_crop, joint_blur = self.joint in ("crop", "both"), self.joint in ("blur", "both")
        if self.joint == "either":  # App. F
            joint_crop = torch.rand(()).item() < self.probability
            joint_blur = not joint_crop
        crops = self.crop(image, joint=joint_crop and self.pair != "local")  # App. D
        for _ in range(0, self.local_crops, 2):  # in pairs; if their number is odd, the last crop is cut off below
            crops += self.local_crop(image, joint=joint_crop and self.pair != "global")
        return [common.to_tensor(x) for x in crops[: 2 + self.local_crops]], joint_blur


def draw_sigmas(args, joint_blur):
    """Draw the sigmas of the views' blurs, in pixels: (views, n), where 0 is no blur.

    joint_blur: (n,) bool. Where it is True, the sigmas are drawn by Algorithm 1, and one random number decides for both
    views. If their probabilities of a blur are equal, either both are blurred or neither is.
    """
    query_p, key_p = args.blur_p
    blur_p = torch.tensor([query_p, key_p] + [query_p] * args.local_crops)[:, None]  # local crops as the query view
    draws = torch.rand(len(blur_p), len(joint_blur))
    draws[1] = torch.where(joint_blur, draws[0], draws[1])
    sigmas = torch.empty_like(draws).uniform_(0.1, 2.0)
    if joint_blur.any():
        joint = torch.stack(sample_joint(len(joint_blur), 0.1, 2.0, args.beta)).float()
        sigmas[:2] = torch.where(joint_blur, joint, sigmas[:2])
    return torch.where(draws < blur_p, sigmas, 0.0)


def augment(x, args, view, sigma):
    """Augment view number `view` as MoCo v2 or v3 does: uint8 -> float (n, 3, S, S). sigma: see `draw_sigmas`."""
    v3 = args.moco == "v3"
    x = common.horizontal_flip(x / 255, p=0.5)
    x = common.color_jitter(x, 0.4, 0.4, 0.2 if v3 else 0.4, 0.1, p=0.8)
    x = common.grayscale(x, p=0.2)
    x = common.gaussian_blur(x, sigma, p=(sigma > 0).float())
    if v3 and view == 1:  # only the second view is solarized
        x = common.solarize(x, p=0.2)
    return common.normalize(x, *common.NORMS[args.norm])


# ==================================================================== 4. model


class MoCoBase(nn.Module):
    """What all versions of MoCo share: a query encoder, and a momentum encoder, which makes the keys."""

    def __init__(self, backbone, projector, temperature):
        super().__init__()
        self.backbone, self.projector, self.temperature = backbone, projector, temperature
        self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)

    def key(self, x):
        """Return the momentum encoder's keys of images: (n, 3, H, W) -> (n, dim), L2-normalized, in the dtype of x."""
        return F.normalize(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype), dim=1)

    @torch.no_grad()
    def update(self, m):
        """Update the momentum encoder (float32 or float64): theta_k <- m theta_k + (1 - m) theta_q (MoCo, Eq. 2)."""
        for slow, fast in ((self.momentum_backbone, self.backbone), (self.momentum_projector, self.projector)):
            for theta_k, theta_q in zip(slow.parameters(), fast.parameters(), strict=True):
                theta_k.lerp_(theta_q, 1 - m)  # in bfloat16 the small change would be rounded away


class MoCo(MoCoBase):
    """MoCo v2's query encoder, momentum encoder and queue. With a projector of one layer it is MoCo v1.

    Copy it with MoCoBase, info_nce, Queue, gather, shard and encode_shuffled_keys. With one process, ShuffleBN needs
    convert_split_batchnorm. With several, wrap it in DistributedDataParallel, which first broadcasts rank 0's weights
    and, unless broadcast_buffers=False, its queue.
    backbone: (n, 3, H, W) -> (n, width). layers: number of projector layers, 1 or 2. dim: embedding dimension. queue:
    number of negatives. temperature: tau.
    """

    def __init__(self, backbone, width, layers=2, dim=128, queue=65536, temperature=0.2):
        hidden = [nn.Linear(width, width), nn.ReLU(inplace=True)] if layers == 2 else []
        super().__init__(backbone, nn.Sequential(*hidden, nn.Linear(width, dim)), temperature)
        self.queue = Queue(queue, dim)

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), L2-normalized, in the dtype of x."""
        return F.normalize(self.projector(self.backbone(x)).to(x.dtype), dim=1)

    def forward(self, views):
        """Return (loss, keys to enqueue (N, dim), queries (n, dim), {name: metric}): MoCo, Algorithm 1.

        views: this process's query view, key view and local crops, each (n, 3, H, W), normalized. The keys are those
        of all processes. Only the loss has a gradient, which reaches the query encoder only.
        """
        query_view, key_view, *local_crops = views
        queries = [self.query(view) for view in (query_view, *local_crops)]  # local crops: App. D
        keys = encode_shuffled_keys(self.key, [key_view])[0]  # (N, dim)
        k = shard(keys)  # (n, dim)
        with torch.autocast(k.device.type, enabled=False):  # the loss is computed in float32
            losses = [info_nce(q, k, self.queue.keys, self.temperature) for q in queries]  # MoCo, Eq. 1
            loss = sum(losses) / len(losses)
        return loss, keys, queries[0].detach(), dict(loss=loss.detach())


class MoCoV3(MoCoBase):
    """MoCo v3's query encoder with a predictor, and its momentum encoder. It has no queue.

    Copy it with MoCoBase, contrast, mlp and gather. On several GPUs convert it with timm.layers.convert_sync_batchnorm,
    and wrap it in DistributedDataParallel. hidden: size of the hidden layers. For the other arguments see `MoCo`.
    """

    def __init__(self, backbone, width, hidden=4096, dim=256, temperature=1.0):
        super().__init__(backbone, mlp(width, hidden, dim).append(nn.BatchNorm1d(dim, affine=False)), temperature)
        self.predictor = mlp(dim, hidden, dim)  # for ViTs MoCo v3 has a batch norm at its end (D7)

    def query(self, x):
        """Return the queries of images: (n, 3, H, W) -> (n, dim), not normalized, in the dtype of x."""
        return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    def forward(self, views):
        """Return what `MoCo.forward` does, with None for the keys: MoCo v3, Algorithm 1, symmetric in the two views."""
        q1, q2, *q_local = [self.query(view) for view in views]
        k1, k2 = [gather(self.key(view)) for view in views[:2]]  # (N, dim), of all processes
        first = dist.get_rank() * len(q1) if dist.is_initialized() else 0  # the row of this process's first key
        with torch.autocast(q1.device.type, enabled=False):  # the loss is computed in float32
            pairs = [(q1, k2), (q2, k1)] + [(q, k) for q in q_local for k in (k1, k2)]  # of local crops: App. D
            losses = [contrast(q, k, self.temperature, first) for q, k in pairs]
            loss = 2 * sum(losses) / len(losses)  # without local crops the sum of two terms
        return loss, None, q1.detach(), dict(loss=loss.detach())


def mlp(inputs, hidden, outputs):
    """Return a head of MoCo v3: linear, batch norm, ReLU, linear."""
    first = nn.Linear(inputs, hidden, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs, bias=False))


# ------------------------------------------------------- queue (shared block)


class Queue(nn.Module):
    """The last `length` keys, (length, dim), the oldest first. It starts with random L2-normalized vectors."""

    def __init__(self, length, dim):
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(length, dim), dim=1))

    @torch.no_grad()
    def enqueue(self, keys):
        """Append the (N, dim) keys of all processes and drop the oldest. Call it after backward, which needs those."""
        self.keys.copy_(torch.cat([self.keys, keys])[-len(self.keys) :])


# ================================================================= 5. training


def cosine(start, end, done):
    """Return a value on half a cosine from `start` to `end`. done: the fraction of the way, from 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def learning_rate(args, now):
    """Return the learning rate `now` epochs after the start: a linear warmup, then a cosine, or --milestones (D8)."""
    peak, last = args.lr * args.batch_size / 256, args.min_lr * args.batch_size / 256
    if now < args.warmup:
        return peak * now / args.warmup
    if args.milestones:
        return peak * 0.1 ** sum(now / args.epochs >= fraction for fraction in args.milestones)
    return cosine(peak, last, (now - args.warmup) / (args.epochs - args.warmup))


def lars(model, weight_decay):
    """Return MoCo v3's optimizer, LARS. Biases and batch norms have neither weight decay nor a trust ratio."""
    without_decay, weights = param_groups_weight_decay(model)  # told of a decay of 0, it would return a single group
    weights |= dict(weight_decay=weight_decay, always_adapt=True)  # a trust ratio even if the weight decay is 0
    return Lars([without_decay, weights], lr=0.0, momentum=0.9, trust_coeff=0.001)


def main(args, train=None, test=None):
    """Train, resuming from args.out if it holds a run. train, test: datasets to use instead of --dataset."""
    device, rank, world = common.init_distributed(args.device)
    torch.manual_seed(args.seed)
    v3 = args.moco == "v3"

    # Data: the views of each image (Algorithm 1), cropped here and augmented in the loop
    train, test = common.open_data(args.dataset, args.data_dir, args.image_size, train, test)
    groups = common.split_batch(args.batch_size, len(train), world, args.bn_groups or 1, "--bn-groups")  # per process
    released = args.variant == "released"
    sampling = dict(beta=args.beta, offset=0.1 if released else 0.0, css_alpha=args.css_alpha, whole=released)  # D1, D2
    crop = JointCrop(args.image_size, args.crop_scale, **sampling)
    local_crop = JointCrop(args.local_size, args.local_scale, **sampling)
    images = JointViews(train, crop, local_crop, args.local_crops, args.joint, args.joint_pair, args.joint_prob)
    sampler = DistributedSampler(images, world, rank, seed=args.seed, drop_last=True)
    options = common.loader_options(args.workers, device)
    loader = DataLoader(images, args.batch_size // world, sampler=sampler, drop_last=True, **options)
    if args.show_views:
        crops, joint_blur = next(iter(loader))
        sigmas = draw_sigmas(args, joint_blur)
        views = [augment(x, args, i, sigmas[i]) for i, x in enumerate(crops)]
        names = (["view 1", "view 2"] if v3 else ["query", "key"]) + ["local crop"] * args.local_crops
        return common.save_views(args.show_views, views, names, args.norm)

    # Model and optimizer. backbone.pt has `info` and the weights of the encoder that info["encoder"] names
    info = common.backbone_info(args.arch, args.image_size, args.patch_size, args.norm) | dict(encoder="query")
    backbone = common.build_backbone(info, zero_init=v3)
    sizes = [args.image_size, args.local_size] if args.local_crops else [args.image_size]
    width = common.feature_width(backbone, *sizes)
    if args.init:
        common.load_weights(backbone, args.init, args.init_prefix)
    if v3:
        negatives = args.batch_size - 1  # the other keys of the batch
        model = MoCoV3(backbone, width, args.hidden, args.dim, args.temperature)
    else:
        negatives = common.queue_length(args.queue, args.batch_size, len(train))
        model = MoCo(backbone, width, 1 if args.moco == "v1" else 2, args.dim, negatives, args.temperature)
    synchronize = v3 and world > 1 and device.type == "cuda"  # torch synchronizes batch norm on GPUs only
    model = timm.layers.convert_sync_batchnorm(model) if synchronize else model
    model = convert_split_batchnorm(model, groups) if groups > 1 else model  # as on that many GPUs, for ShuffleBN
    model.to(device, memory_format=torch.channels_last)
    sgd = dict(lr=0.0, momentum=0.9, weight_decay=args.weight_decay, fused=True)
    optimizer = lars(model, args.weight_decay) if v3 else torch.optim.SGD(model.parameters(), **sgd)

    # The run
    amp = common.use_bf16(args.amp, device)
    state = dict(model=model, optimizer=optimizer)
    uniform = (4 * args.temperature if v3 else 1) * math.log(negatives + 1)  # v3's loss is two terms of 2 tau each
    derived = dict(negatives=negatives, loss_at_uniform_logits=uniform, peak_lr=args.lr * args.batch_size / 256)
    derived |= dict(batch_norm_groups=1 if synchronize else groups * world, bf16=amp)
    config, records = common.open_run(args, train, state, derived)  # restores a saved run; one record per epoch
    if args.compile:
        model.backbone.compile(dynamic=False)
        model.momentum_backbone.compile(dynamic=False)
    ddp = DistributedDataParallel(model) if world > 1 else model
    ddp.broadcast_buffers = False  # queues stay equal without it; torch 2.13 renames the argument, not the attribute

    for epoch in range(len(records), args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(hash((args.seed, epoch, rank)))  # a resumed run gets the same seed: hashes of ints are fixed
        meter = common.Meter(epoch, args.epochs, len(loader), args.batch_size)
        for step, (crops, joint_blur) in enumerate(loader):
            now = epoch + step / len(loader)  # in epochs
            lr = learning_rate(args, now)
            for group in optimizer.param_groups:
                group["lr"] = lr
            sigmas = draw_sigmas(args, joint_blur)
            views = [augment(x.to(device, non_blocking=True), args, i, sigmas[i]) for i, x in enumerate(crops)]
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss, keys, q, metrics = ddp(views)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            m = cosine(*args.momentum, now / args.epochs)
            model.update(m)
            if not v3:  # it has no queue
                model.queue.enqueue(keys)
            meter.update(metrics | dict(grad_norm=grad_norm))

        if world > 1:
            timm.utils.distribute_bn(model, world, reduce=True)  # average the running statistics
        records.append(dict(epoch=epoch + 1, lr=lr, momentum=m) | meter.averages() | common.embedding_health(q))
        # lr and q are the last step's. Save before kNN, too, so that a test image that cannot be read costs no epoch
        common.save_run(args.out, config, info, state, records, args.keep_every)
        if test is not None and args.knn_every and ((epoch + 1) % args.knn_every == 0 or epoch + 1 == args.epochs):
            records[-1] |= common.knn_accuracy(model.backbone, info, train, test, device, args.workers, amp)
            common.save_run(args.out, config, info, state, records, args.keep_every)
        common.log_epoch(f"epoch {epoch + 1}/{args.epochs}", records, ("loss", "std", "images_per_s"))
    common.log_epoch(f"finished: {args.out}", records)


# ================================================================ 6. ShuffleBN

# ------------------------------------------------------ gather (shared block)


def gather(x):
    """Concatenate the tensors (n, ...) of all processes, whose n is the same, in rank order: (N, ...). No gradient."""
    if not dist.is_initialized():
        return x.detach()
    whole = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather(list(whole.split(len(x))), x.contiguous())
    return whole


# --------------------------------------------------- ShuffleBN (shared block)


def shard(x, dim=0):
    """Return this process's part, along dim, of a tensor that all processes have. For dim 0 it undoes `gather`."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()] if dist.is_initialized() else x


@torch.no_grad()
def encode_shuffled_keys(encode, views):
    """Return the keys (V, N, C) of the views of all processes, on every process, encoded with ShuffleBN.

    Copy it with gather and shard. On one process it has no effect without SplitBatchNorm.
    encode: a function, images (n, 3, H, W) -> keys (n, C). views: list of V views of this process, each (n, 3, H, W).

    A query and its key must not share batch statistics, from which the encoder could tell that they belong together
    (MoCo, section 3.3). So the images of all processes are shuffled, each process encodes its part, and the keys are
    put back in order. All V views are encoded at once, as in JCL (App. C). Gathering 512 views of 224 px takes 0.6 GB.
    """
    images = torch.cat([gather(view) for view in views])  # row v * N + i is view v of image i
    shuffle = torch.randperm(len(images), device=images.device)
    if dist.is_initialized():
        dist.broadcast(shuffle, 0)  # each process has drawn its own
    keys = gather(encode(images[shard(shuffle)]))
    return keys[shuffle.argsort()].view(len(views), -1, keys.shape[1])


class SplitBatchNorm(nn.BatchNorm2d):
    """Batch norm over each of `groups` equal slices of the batch, as on that many GPUs. x: (N, C) or (N, C, H, W).

    In training it returns torch.cat([norm(part) for part in x.chunk(groups)]), but calls F.batch_norm once, with the
    groups as channels: a loop would launch many more operations on a GPU. As in MoCo's notebook, running statistics are
    averages over the groups. Raises ValueError if the groups do not divide a batch.
    """

    def __init__(self, num_features, groups, **kwargs):
        super().__init__(num_features, **kwargs)
        self.groups = groups
        self.drop = self.act = nn.Identity()  # timm's BatchNormAct2d has both; convert_split_batchnorm takes them over

    def forward(self, x):
        weight, bias, groups = self.weight, self.bias, self.groups
        if not self.training:
            x = F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.eps)
            return self.act(self.drop(x))
        if len(x) % groups:
            raise ValueError(f"a batch of {len(x)} cannot be split into {groups} equal groups of batch norm")
        x = torch.cat(x.chunk(groups), dim=1)  # the groups' channels side by side: (N / groups, groups * C, ...)
        means, variances = self.running_mean.repeat(groups), self.running_var.repeat(groups)
        if weight is not None:
            weight, bias = weight.repeat(groups), bias.repeat(groups)
        x = F.batch_norm(x, means, variances, weight, bias, training=True, momentum=self.momentum, eps=self.eps)
        self.running_mean.copy_(means.view(groups, -1).mean(0))  # F.batch_norm has updated those of each group
        self.running_var.copy_(variances.view(groups, -1).mean(0))
        return self.act(self.drop(torch.cat(x.chunk(groups, dim=1))))


def convert_split_batchnorm(module, groups):
    """Convert the batch norms of a module to SplitBatchNorm, like torch's convert_sync_batchnorm. Return the module.

    It converts BatchNorm1d, BatchNorm2d and timm's BatchNormAct2d that have running statistics and a momentum. All
    others, including subclasses of these, stay as they are. Copy it with SplitBatchNorm.
    """
    result = module
    is_plain = type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, timm.layers.BatchNormAct2d)
    if is_plain and module.track_running_stats and module.momentum is not None:
        result = SplitBatchNorm(module.num_features, groups, eps=module.eps, momentum=module.momentum)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training"):
            setattr(result, name, getattr(module, name))
    for name, child in module.named_children():  # those of BatchNormAct2d are drop and act
        setattr(result, name, convert_split_batchnorm(child, groups))
    return result


# ============ 7. differences between the paper, the released code and this file

# D1 s_b, line 1. Paper: ln(s_max / s_min). Released: ln(s_max / s_min - 0.1).
# D2 If none of ten aspect ratios fits. Paper: as RandomCrop, so a center crop. Released: the whole image.
# D3 Scope. Paper: JointCrop and JointBlur, any beta, App. D and G. Released: JointCrop with beta 0 on two views.
# D4 The areas of crops. Paper: typically from 0.2 (App. H). Released: from 0.2 (its README's command), or 0.08 (its
#    default). Here: 0.2; MoCo v1 on small datasets: 0.08, as in MoCo's demo (D5). With 0.08, JointCrop lost to
#    MoCo v2 on CIFAR-10 (tests/results/README.md).
# D5 Small datasets. ContrastiveCrop: `--epochs 500 --lr 0.25 --min-lr 0.025 --warmup 0 --momentum 0.999 --weight-decay
#    1e-4 --crop-scale 0.2 1 --queue 65536`, where the learning rate is 0.5 for 512 images. Here: MoCo's own demo on
#    CIFAR-10 (facebookresearch/moco, branch colab-notebook), which is `--moco v1 --joint none`. MoCo v2 has its own
#    head, temperature and areas, and one epoch of warmup, without which JointCrop's embeddings were nearly equal for
#    three epochs (with areas from 0.08). STL-10: a queue of 8,192, and ImageNet's stem.
# D6 The version of MoCo. Paper: v1 in App. F and G, all three in Table 9. Released: v3. Here: v2, or `--moco`.
# D7 MoCo v3 on a ViT. Released: AdamW, a projector of three layers, a batch norm at the end of the predictor. Here:
#    refused. The baseline of patchmix.py is MoCo v3 on a ViT.
# D8 MoCo v1's learning rate from 60% of the epochs. ContrastiveCrop's file: 0. Here: a tenth; from 80%, a hundredth.
# D9 Multi-crop (App. D). Paper: DINO (Table 10). Here (not in the paper): local crops are queries only, and are blurred
#    as the query view is in MoCo. Each is compared with the key view's key (v1, v2), or with the keys of both views
#    (v3). Two local crops form a pair (`--joint-pair`), but are not compared with each other (our reading). The loss
#    is the mean over all terms, in v3 twice that mean, which is the sum of v3's two terms if there are no local crops.
#    For App. D's sizes, with the areas of its example, pass `--image-size 160 --crop-scale 0.4 1 --local-crops 4`, and
#    `--joint-pair local` or global.
# Differences in rounding, indices and precision are listed in tests/golden/README.md.
# Inferred: the main text, which was not available, defines JointBlur and the settings of small datasets. So it is our
# choice that JointBlur draws the two sigmas like areas, from 0.1 to 2.0 px, and that one draw decides for both views
# (MoCo v3 always blurs the first view, and one in ten second views, so JointBlur has little effect there). With
# `--joint either`, every image has one of the two, as we read App. F. The second parameter of Algorithm 1's
# N_T(0, s_b / beta) is taken to be the standard deviation, not the variance. On ImageNet, MoCo v1 has ContrastiveCrop's
# views, encoder, number of epochs and learning rate. App. G's alpha is also ContrastiveCrop's: 0.6 on ImageNet, 0.1 on
# small datasets.
# Omitted: SimSiam, BYOL, SimCLR and DINO (Tables 9 and 10), whose own code needs only the lines in JointCrop's
# docstring; and ContrastiveCrop's semantic-aware localization (Table 11, second row).


if __name__ == "__main__":
    common.start(main, parse_args, "--dataset imagenet --data-dir DIR --moco v1")
