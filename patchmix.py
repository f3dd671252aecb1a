"""PatchMix: Inter-Instance Similarity Modeling for Contrastive Learning (Shen et al., arXiv 2306.12243).

Two images of a data set are rarely as unrelated as one-hot contrast claims. PatchMix makes images whose similarity is
known: the patches of M images are mixed into one, at the places they had, and a ViT learns to give each source its
share. Three contrasts are added up: mixed query against original keys (M positives), mixed query against the mixed keys
of the other view (2M - 1 positives, weighted by the sources they share), and original against original, which closes
the gap between mixed and natural images. A momentum encoder makes the keys; the other images of the batch are the
negatives.

    Eq. 1-7       patch_mix           M images into one, patch by patch (8-9: the same by flat indices, in the tests)
    Eq. 10-12     mix_targets         who is in a mixed image, and with what weight (17-19 repeat 9, 11, 12)
    Eq. 13-15     soft_info_nce       mix to origin (mto), mix to mix (mtm), origin to origin (oto)
    Eq. 16        PatchMix.forward    their sum
    Algorithm 1   patch_mix, mix_targets
    Algorithm 2   main, train_step, PatchMix

    python patchmix.py                                                        # laptop, no data
    python patchmix.py --dataset cifar10 --arch vit_tiny                      # one GPU
    torchrun --nproc_per_node=8 patchmix.py --dataset imagenet --data-dir DIR --arch vit_small

Baseline: MoCo v3 is `--num-mix 1 --terms oto,mto`, L(q2, k1) + L(q1, k2), its symmetric loss divided by 2 tau. New
relative to it: patch_mix, mix_targets, the weights in soft_info_nce, a third term.

Departures (the default is the paper; "released" is `--variant released` where nothing else is said):
    D1 weights of the terms: paper 1, 1, 1 with mix-to-mix weights that sum to M; released 1, 1/2, 1/2 and sum 1, and
       the labels of original to original smoothed by 0.1 over all keys, so that M = 1 is not MoCo v3 there
    D2 M: paper 3; released 2
    D3 heads of ViT-S: paper 6; released 12
    D4 ViT-T: paper has a momentum encoder; released none: the encoder itself makes the keys, in training mode
    D5 paper mixes the query of view 1 and keeps that of view 2; released the reverse
    D6 momentum: per step; the released loop overwrites its index, so it moves once an epoch (not reproduced)
    D7 the released ImageNet configurations add 8 crops of 96 px, with globals from 0.35: not in the paper, not here
    D8 the patch embedding is initialised as timm does it; released by Xavier's rule (not reproduced)
    D9 warm-up of W steps: i / W of the peak at step i; released i / (W - 1) (not reproduced)
    D10 paper: one permutation a view and batch (Eq. 2); here one for each slice; released one for all GPUs
    D11 momentum update after the optimiser's step (Algorithm 2); released before the forwards: m's index moves by one
        (not reproduced)
    D12 below 2M - 1 images repeated mix-to-mix targets add up; the released scatter keeps the last, so a row sums to
        less (not reproduced)
    D13 paper: images are mixed around the whole batch (Eq. 4, 10, 11: mod N); here, as released, around each slice of
        it, of which --mix-slices is the number (released: one a GPU; the recipes' 4 and 8 are ours)
    D14 released fp16; here bf16 in the encoders on CUDA (--amp off: float32, with products in TF32)
Not said in the paper, taken from the released code: drop-path 0.1, AdamW's betas, ImageNet's mean and std on CIFAR,
weight decay on all but 1-D tensors, the last learning rate, bicubic crops, heads without biases, batch norm over all
processes. The paper's "rest 260 epochs" of 300 with 10 of warm-up are taken as 290.
"""

import argparse
import copy
import math
import os
from itertools import pairwise

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common

# ================================================================== 1. recipes

# fmt: off
BASE = dict(  # section 4.1.2, Tables 9 and 10 (blur and solarisation of T_1, T_2); the rate is that of batch lr_batch
    num_mix=3, terms="oto,mto,mtm", smoothing=0.0, temperature=0.2, momentum=(0.996, 1.0), min_lr=1e-6, bn_groups=1,
    hidden=4096, dim=256, drop_path=0.1, norm="imagenet", interpolation="bicubic", jitter=(0.4, 0.4, 0.2, 0.1),
    jitter_p=0.8, gray_p=0.2, blur_p=(1.0, 0.1), solarize_p=(0.0, 0.2),
    lr=1e-3, weight_decay=(0.04, 0.4),  # for encoders of which the paper does not speak
)
CIFAR = dict(
    BASE, arch="vit_tiny", image_size=32, patch_size=2, epochs=800, warmup=100, batch_size=512, lr_batch=512,
    mix_slices=4, crop_scale=(0.1, 1.0),
)
IMAGENET = dict(
    BASE, arch="vit_small", image_size=224, patch_size=16, epochs=300, warmup=10, batch_size=1024, lr_batch=1024,
    mix_slices=8, crop_scale=(0.05, 1.0),
)
RECIPES = dict(
    patterns=dict(  # ours, for two CPU cores: small heads, few patches, weak views
        BASE, arch="vit_micro", image_size=32, patch_size=8, epochs=50, warmup=1, batch_size=64, lr_batch=64,
        weight_decay=(0.02, 0.2), num_mix=2, mix_slices=1, hidden=512, dim=128, drop_path=0.0, crop_scale=(0.3, 1.0),
        blur_p=(0.1, 0.1), norm="patterns", momentum=(0.98, 1.0),
    ),
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
IMAGENET_ENCODERS = dict(vit_small=dict(lr=2e-3), vit_base=dict(lr=3e-3))
RELEASED = dict(num_mix=2, smoothing=0.1)  # D2, D1
# fmt: on


def recipe(given):
    """The hyper-parameters that the data set, the encoder and the variant of a command line stand for."""
    values = dict(RECIPES[given.dataset])
    arch = (given.arch or values["arch"]).removesuffix("_patch16_224")  # timm's own names, too
    if given.dataset in ("cifar10", "cifar100", "stl10"):
        values |= CIFAR_ENCODERS.get(arch, {})
    elif given.dataset != "patterns":
        values |= IMAGENET_ENCODERS.get(arch, {})
    if given.variant == "released":
        values |= RELEASED
        if arch == "vit_tiny":
            values |= dict(momentum=(0.0, 0.0))  # D4
    return values


# ================================================================ 2. the paper


def patch_mix(images, num_mix, patch_size, permutation=None):
    """Mix each image with the num_mix - 1 that follow it in the batch, patch by patch (Algorithm 1, Eq. 1-7).

    images (N, C, H, W), any values; patch_size p or (p_h, p_w), which divide H and W; permutation (T,) int64, the
    shuffle k of Eq. 2, T = H/p_h * W/p_w (drawn if None). Mixed image i takes from image (i + m) mod N the m-th of M
    groups of floor(T / M) shuffled patches, each at its own place; the T mod M patches that are left over stay with
    image i, though its share in Eq. 13 remains 1/M. Returns (N, C, H, W), with M = 1 the images themselves; gradients
    pass through. Raises ValueError where these do not fit.
    """
    n, _, height, width = images.shape
    ph, pw = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    if height % ph or width % pw:
        raise ValueError(f"patches of {ph} x {pw} do not tile an image of {height} x {width}")
    tokens = (height // ph) * (width // pw)  # T, Eq. 1
    if not 1 <= num_mix <= tokens:
        raise ValueError(f"num_mix must be from 1 to the {tokens} patches of an image, not {num_mix}")
    if permutation is None:
        permutation = torch.randperm(tokens)  # k, Eq. 2
    if sorted(permutation.tolist()) != list(range(tokens)):
        raise ValueError(f"permutation must hold each of 0 to {tokens - 1} once")
    size = tokens // num_mix  # S
    of_shuffled = torch.arange(tokens) // size  # Eq. 3: the group of the j-th shuffled patch
    of_shuffled[size * num_mix :] = 0
    of_patch = of_shuffled[permutation.cpu().argsort()]  # Eq. 5, 7: unshuffled, the group of each place
    of_patch = of_patch.to(images.device, non_blocking=True).view(height // ph, width // pw)
    of_pixel = of_patch.repeat_interleave(ph, 0).repeat_interleave(pw, 1)
    mixed = images
    for m in range(1, num_mix):  # Eq. 4, 6: u(i, m) = (i + m) mod N, which is the batch rolled by -m
        mixed = torch.where(of_pixel == m, images.roll(-m, 0), mixed)
    return mixed


def mix_targets(n, num_mix):
    """The images in each mixed image, and the mixed images that share some with it (Eq. 10-12).

    Returns mto_index (n, M) int64, mto_weight (M,) = 1/M, mtm_index (n, 2M-1) int64, mtm_weight (2M-1,): 1/M, 2/M, ...,
    1, ..., 1/M, which sum to M. Indices are of the n images, counted around; below n = 2M - 1 some repeat, and their
    weights add up.
    """
    i = torch.arange(n)[:, None]
    mto_index = (i + torch.arange(num_mix)) % n  # Eq. 10
    mto_weight = torch.full((num_mix,), 1 / num_mix)  # the 1/M of Eq. 13
    offset = torch.arange(2 * num_mix - 1) - (num_mix - 1)
    mtm_index = (i + offset) % n  # Eq. 11
    mtm_weight = 1 - offset.abs() / num_mix  # Eq. 12: |M - j - 1| = |offset|
    return mto_index, mto_weight, mtm_index, mtm_weight


def batch_targets(n, slices, num_mix):
    """{term of Eq. 16: (index (n, P) int64, weight (P,))}: the positives of each image of a batch that mixes in slices.

    Indices are rows of the whole batch.
    """
    mto_index, mto_weight, mtm_index, mtm_weight = mix_targets(n // slices, num_mix)
    first = torch.arange(0, n, n // slices)[:, None, None]  # the first row of each slice
    return dict(
        oto=(torch.arange(n)[:, None], torch.ones(1)),
        mto=((first + mto_index).flatten(0, 1), mto_weight),
        mtm=((first + mtm_index).flatten(0, 1), mtm_weight),
    )


def soft_info_nce(q, k, index, weight, temperature, smoothing=0.0):
    """Cross-entropy of each query against weighted positives among the keys (Eq. 13-15).

    -1/n sum_i sum_j weight_j log softmax_t(sim(q_i, k_t) / temperature)[index_ij], sim the cosine: q (n, C) and k (N,
    C) are normalised here, the weights never. index (n, P) int64 into k, weight (P,). Gradients go to q and k; detach k
    for the paper's sg(). smoothing s (D1): 1 - s of each weight stays, s of their sum is spread over all N keys. No n x
    N target matrix is made. Returns a scalar: weight.sum() * log(N) at equal logits.
    """
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / temperature
    index, weight = index.to(q.device), weight.to(logits)
    log_sum = logits.logsumexp(1, keepdim=True)
    loss = (weight * (log_sum - logits.gather(1, index))).sum(1).mean()
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * weight.sum() * (log_sum.mean() - logits.mean())
    return loss


# ==================================================================== 3. views

DRAWS = common.CROP_DRAWS + common.COLOUR_DRAWS  # of one view


def make_sample(args):
    """T_1 and T_2 of Table 10: what common.Views calls with sizes and uniform draws, and the number of draws."""

    def sample(index, sizes, draws):
        cuts, colours = [], []
        for view, draw in enumerate(draws.reshape(len(index), 2, DRAWS).swapaxes(0, 1)):
            crop, colour = draw[:, : common.CROP_DRAWS], draw[:, common.CROP_DRAWS :]
            cuts.append((index, common.random_resized_crop(sizes, crop, args.crop_scale), args.image_size))
            change = dict(blur_p=args.blur_p[view], solarize_p=args.solarize_p[view])
            colours.append(common.random_colour(colour, args.jitter, args.jitter_p, args.gray_p, **change))
        return cuts, colours

    return sample, 2 * DRAWS


def mix_slices(images, args, step, view):
    """patch_mix within each of this process's slices of the batch, each slice and view with its own permutation."""
    rank, world = common.rank_and_world()
    local, tokens = args.mix_slices // world, (args.image_size // args.patch_size) ** 2
    mixed = []
    for i, part in enumerate(images.chunk(local)):
        number = rank * local + i if args.variant == "paper" else 0  # D10
        permutation = torch.randperm(tokens, generator=common.generator(args.seed, step, 10 + view, number))
        mixed.append(patch_mix(part, args.num_mix, args.patch_size, permutation))
    return torch.cat(mixed)


# ==================================================================== 4. model


def mlp(widths):
    """Table 9: Linear + BN + ReLU, and at the end Linear + BN without parameters."""
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-2], nn.BatchNorm1d(widths[-1], affine=False))


class PatchMix(nn.Module):
    """Encoder F, projector G, predictor H, and the momentum copies of F and G (Algorithm 2)."""

    def __init__(self, args, encoder=None):
        super().__init__()
        self.args, self.terms = args, args.terms.split(",")
        drop = dict(drop_path_rate=args.drop_path) if args.arch.startswith(("vit_", "deit")) else {}
        self.backbone = encoder or common.build_backbone(args.backbone, **drop)
        width = common.output_width(self.backbone, args.image_size)
        self.projector = mlp([width, args.hidden, args.hidden, args.dim])
        self.predictor = mlp([args.dim, args.hidden, args.dim])
        if any(args.momentum):
            self.momentum_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
            self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
            for module in self.momentum_backbone.modules():
                if isinstance(module, timm.layers.DropPath):  # of the encoder only
                    module.drop_prob = 0.0
        else:  # D4
            self.momentum_backbone, self.momentum_projector = self.backbone, self.projector
        self.term_weights = dict(oto=1.0, mto=1.0, mtm=1.0)
        if args.variant == "released":
            self.term_weights = dict(oto=1.0, mto=0.5, mtm=0.5 / args.num_mix)  # D1
        for term, (index, weight) in batch_targets(args.batch_size, args.mix_slices, args.num_mix).items():
            self.register_buffer(f"{term}_index", index, persistent=False)
            self.register_buffer(f"{term}_weight", weight, persistent=False)

    def chance(self):
        """The loss at equal logits: the weights' sum times log N."""
        weight = sum(self.term_weights[term] * getattr(self, f"{term}_weight").sum().item() for term in self.terms)
        return weight * math.log(self.args.batch_size)

    def query(self, x):
        """h = H(G(F(x))): (n, 3, H, W) -> (n, dim), in x's dtype."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.predictor(self.projector(self.backbone(x))).to(x.dtype)

    @torch.no_grad()
    def key(self, x):
        """sg(z), z = G(F(x)) of the momentum encoder, of all processes: (n, 3, H, W) -> (N, dim), in x's dtype."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            return gather(self.momentum_projector(self.momentum_backbone(x)).to(x.dtype))

    def contrast(self, term, h, z):
        """A term of Eq. 16: this process's h (n, dim) against all processes' z (N, dim)."""
        index = getattr(self, f"{term}_index").unflatten(0, (-1, len(h)))[common.rank_and_world()[0]]  # of these h
        weight = getattr(self, f"{term}_weight")
        smoothing = self.args.smoothing if term == "oto" else 0.0  # D1
        return soft_info_nce(h, z, index, weight, self.args.temperature, smoothing)

    def forward(self, views, step):
        """views: this process's two (n, 3, H, W). Returns (Eq. 16, metrics: scalars, and q, k (n, dim))."""
        x1, x2 = views if self.args.variant == "paper" else views[::-1]  # D5
        pairs = {}  # {term: (h, z)}
        if "oto" in self.terms:
            pairs["oto"] = self.query(x2), self.key(x1)  # Eq. 15
        if "mto" in self.terms or "mtm" in self.terms:
            h_mix1 = self.query(mix_slices(x1, self.args, step, 0))  # Algorithm 2, line 5
        if "mto" in self.terms:
            pairs["mto"] = h_mix1, self.key(x2)  # Eq. 13
        if "mtm" in self.terms:
            pairs["mtm"] = h_mix1, self.key(mix_slices(x2, self.args, step, 1))  # line 6; Eq. 14
        losses = {term: self.contrast(term, h, z) for term, (h, z) in pairs.items()}
        loss = sum(self.term_weights[term] * value for term, value in losses.items())  # Eq. 16
        q, z = pairs[self.terms[0]]
        k = z.split(len(q))[common.rank_and_world()[0]]  # of this process's images
        return loss, dict(loss=loss, q=q, k=k) | {f"loss_{term}": value for term, value in losses.items()}

    @torch.no_grad()
    def update(self, m):
        """After the optimiser's step: Xi <- m Xi + (1 - m) Theta (Algorithm 2, line 11).

        Parameters only: the copies keep their own batch-norm statistics.
        """
        slow = [*self.momentum_backbone.parameters(), *self.momentum_projector.parameters()]
        fast = [*self.backbone.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, fast, 1 - m)


# ================================================================= 5. training


def some_terms(text):
    """The argparse type of --terms: some of oto, mto and mtm."""
    known, chosen = ("oto", "mto", "mtm"), text.split(",")
    if not set(chosen) <= set(known):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {', '.join(known)}, with commas and without blanks")
    return ",".join(term for term in known if term in chosen)


def parse_args(argv=None):
    """The command line as a namespace with every value of the recipe. Exits with a line on a mistake."""
    parser = common.run_parser("patchmix.py", __doc__, evaluated="momentum")
    group = parser.add_argument_group("PatchMix")
    group.add_argument("--num-mix", type=common.COUNT, metavar="M", help="images mixed into one (Table 6)")
    group.add_argument("--terms", type=some_terms, metavar="T,...", help="of Eq. 16: some of oto, mto, mtm (Table 7)")
    group.add_argument("--mix-slices", type=common.COUNT, metavar="N", help="mix within N equal slices of a batch")
    args = common.parse_run(parser, argv, recipe)
    if args.variant == "released" and args.arch.removesuffix("_patch16_224") == "vit_small":
        args.backbone["create_kwargs"]["num_heads"] = 12  # D3
    fit_mix(args)
    return args


def fit_mix(args):
    """Fit --mix-slices to the processes; exit with a line if batch, slices, patches and M do not go together."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if args.mix_slices % world:  # a slice must lie within one process
        common.say(f"mix slices: {args.mix_slices} cannot be shared out over {world} processes, so {world} are used")
        args.mix_slices = world
    if args.batch_size % args.mix_slices:
        common.fail(f"--batch-size {args.batch_size} cannot be divided into {args.mix_slices} equal --mix-slices")
    if args.image_size % args.patch_size:
        common.fail(f"--patch-size {args.patch_size} does not divide --image-size {args.image_size}")
    images, patches = args.batch_size // args.mix_slices, (args.image_size // args.patch_size) ** 2
    if args.num_mix > min(images, patches):
        common.fail(f"--num-mix {args.num_mix} is too large: a slice has {images} images, an image {patches} patches")


def train_step(args, model, ddp, optimizer, batch, step, steps, device):
    """Lines 4-11 of Algorithm 2; steps: of an epoch. Returns the metrics, on the device."""
    lr, weight_decay, momentum = schedule(args, step, steps)
    for group in optimizer.param_groups:  # a weight decay of 0: a group that never decays
        group.update(lr=lr, weight_decay=weight_decay if group["weight_decay"] else 0.0)
    views = [common.normalize(view, *args.norm) for view in common.colour_views(batch, device)]
    common.seed_step(args.seed, step)  # of what still draws from the global generator: drop-path
    loss, metrics = ddp(views, step)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    metrics |= dict(grad_norm=gradient_norm(model), lr=lr, momentum=momentum)
    optimizer.step()
    model.update(momentum)
    average_buffers(model)
    return metrics


def main(args, train=None, test=None, encoder=None):
    """Train. train, test: map-style Datasets of images instead of --dataset's; encoder: (N, 3, H, W) -> (N, width)."""
    device = common.join_processes(args)
    args.bn_groups = batch_norm_groups(args)
    run = common.Run(args, device, train, encoder)
    train, test = common.open_images(args, train, test)
    loader = common.make_loader(args, common.Views(train, *make_sample(args), args.seed, args.interpolation), device)
    if args.show_views:
        views = common.colour_views(next(iter(loader)), device)
        mixed = [mix_slices(view, args, 0, i) for i, view in enumerate(views)]
        names = ("view 1", "view 2", f"mix 1, M={args.num_mix}", f"mix 2, M={args.num_mix}")
        return common.save_views(args.show_views, views + mixed, names)

    torch.manual_seed(args.seed)
    model = group_batch_norms(PatchMix(args, encoder).to(device), args.bn_groups)
    groups = param_groups_weight_decay(model, args.weight_decay[0])
    optimizer = torch.optim.AdamW(groups, lr=0.0, fused=True)
    ddp = in_parallel(args, model)
    terms = ", ".join(f"{term} x {model.term_weights[term]:.3g}" for term in model.terms)
    about = f"M = {args.num_mix} in {args.mix_slices} slice(s), terms {terms}, {args.batch_size} keys a query"
    run.begin(model, optimizer, train, test, model.momentum_backbone, chance=model.chance(), about=about)
    while run.goes_on():
        for batch in run.batches(loader):
            run.log(train_step(args, model, ddp, optimizer, batch, run.step, run.steps, device))
        run.end_epoch()
    del ddp  # before the process group: in torch 2.11 a DDP that goes last can hang for ever
    run.finish()


# ============ 6. machine room (the same in all five files: read it once)


class AllReduce(torch.autograd.Function):
    """The sum over the processes; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return AllReduce.apply(gradient)


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose statistics are taken over `groups` equal slices of the global batch, for (N, C) or (N, C, H, W).

    Several groups stand for the separate batch norms of as many GPUs, on any number of processes that divides them; one
    is one set of statistics over all processes. Running statistics are the mean over this process's groups;
    `average_buffers` then takes the mean over the processes.
    """

    def _check_input_dim(self, x):
        pass

    def forward(self, x):
        world = common.rank_and_world()[1]
        if not self.training or self.groups == world:  # this process is one group
            y = super().forward(x)
        elif self.groups == 1:
            y = self.over_processes(x, world)
        else:
            y = self.in_groups(x, self.groups // world)
        return self.after(y)

    def in_groups(self, x, g):
        mean, var = self.running_mean.repeat(g, 1), self.running_var.repeat(g, 1)
        options = self.weight, self.bias, True, self.momentum, self.eps
        y = torch.cat([F.batch_norm(part, m, v, *options) for part, m, v in zip(x.chunk(g), mean, var, strict=True)])
        self.running_mean.copy_(mean.mean(0))
        self.running_var.copy_(var.mean(0))
        return y

    @torch.compiler.disable  # collectives
    def over_processes(self, x, world):
        wide, others = x.to(self.running_mean.dtype), [0, *range(2, x.dim())]
        mean = AllReduce.apply(wide.mean(others, keepdim=True)) / world
        var = AllReduce.apply((wide - mean).square().mean(others, keepdim=True)) / world
        count = world * x.numel() // x.shape[1]
        self.running_mean.lerp_(mean.detach().flatten(), self.momentum)
        self.running_var.lerp_(var.detach().flatten() * count / (count - 1), self.momentum)
        shape = (-1, *[1] * (x.dim() - 2))
        scale, shift = (1.0, 0.0) if self.weight is None else (self.weight.view(shape), self.bias.view(shape))
        return ((wide - mean) * (var + self.eps).rsqrt() * scale + shift).to(x.dtype)


def batch_norm_groups(args):
    """The recipe's groups, or, with a line: one a process where these do not divide them, or fewer for the batch."""
    world, asked = common.rank_and_world()[1], args.bn_groups
    most = asked if asked == 1 or asked % world == 0 else world
    fitting = [g for g in range(most, 1, -1) if g % world == 0 and args.batch_size % g == 0 and args.batch_size > g]
    groups = (fitting or [1])[0]
    if groups != asked:
        common.say(f"batch-norm groups: {groups} for {asked}, with {world} process(es), batch {args.batch_size}")
    return groups


def group_batch_norms(module, groups):
    """Make every batch norm of a module one over `groups` slices of the global batch, in place; returns the module."""
    if groups == 1 and dist.is_initialized() and next(module.parameters()).is_cuda:
        return timm.layers.convert_sync_batchnorm(module)
    for norm in [m for m in module.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]:
        after = [norm.drop, norm.act] if hasattr(norm, "act") else []  # timm's BatchNormAct2d
        norm.after = nn.Sequential(*after)
        norm.__class__, norm.groups = GroupedBatchNorm, groups  # parameters and statistics stay where they are
    return module


def average_buffers(model):
    """Make batch norm's running statistics the mean over the processes: one collective."""
    world = common.rank_and_world()[1]
    buffers = [b for m in model.modules() if isinstance(m, GroupedBatchNorm) for b in (m.running_mean, m.running_var)]
    if world > 1 and buffers:
        flat = torch.cat(buffers)
        dist.all_reduce(flat)
        torch._foreach_copy_(buffers, flat.div_(world).split([len(b) for b in buffers]))


def gather(x):
    """(n, ...) of each process -> (N, ...) of all, in rank order, without gradient."""
    world = common.rank_and_world()[1]
    if world == 1:
        return x
    out = x.new_empty(world * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def gradient_norm(model):
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def in_parallel(args, model):
    """The model as --grad-checkpoint, --compile and torchrun want it run."""
    if args.grad_checkpoint:
        model.backbone.set_grad_checkpointing()
    if args.compile:
        for backbone in {model.backbone, getattr(model, "momentum_backbone", model.backbone)}:
            backbone.compile()
    if not dist.is_initialized():
        return model
    options = dict(broadcast_buffers=False, gradient_as_bucket_view=True)
    return DistributedDataParallel(model, find_unused_parameters=args.arch == "own", **options)


def schedule(args, step, steps_per_epoch):
    """(learning rate, weight decay, momentum of the momentum encoder) of a step.

    The rate warms up linearly, then falls by a cosine to min_lr, or by 10 at each of the recipe's milestones (shares of
    the run). A pair of weight decays or momenta is the start and the end of a cosine.
    """
    epoch, done = step / steps_per_epoch, step / (args.epochs * steps_per_epoch)
    peak, warmup = args.lr * args.batch_size / args.lr_batch, args.warmup

    def cosine(start, end, t):
        return end + (start - end) * (1 + math.cos(math.pi * t)) / 2

    if epoch < warmup:
        lr = peak * epoch / warmup
    elif getattr(args, "milestones", None):
        lr = peak * 0.1 ** sum(done >= m for m in args.milestones)
    else:
        lr = cosine(peak, args.min_lr, (epoch - warmup) / (args.epochs - warmup))
    pair = [v if isinstance(v, (tuple, list)) else (v, v) for v in (args.weight_decay, args.momentum)]
    return lr, *(cosine(start, end, done) for start, end in pair)


if __name__ == "__main__":
    main(parse_args())
