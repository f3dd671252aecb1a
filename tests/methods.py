"""Describes each method for the tests: one record per method file, from which the tests build their parameters."""

from dataclasses import dataclass, field

import torch

VIEWS = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]  # each of four images
PAIRS = ([(0, 1), (1, 0)], [(2, 0)])  # LoGo's (query, key) views, with queries of global and of local crops
BLUR = "--blur-p 0.5 0.5"  # JointBlur needs it if a recipe does not blur
MOCO_V2, MOCO_V3 = (0.4, 0.4, 0.4, 0.1, 0.8), (0.4, 0.4, 0.2, 0.1, 0.8)  # strengths and probability of color jitter
PLAIN = [("", None, MOCO_V2, ((0.1, 2.0), 0.5), 0)]  # MoCo v2's augmentation, the same for all views
DRAWN = ([0.0, 1.5], [0.0, 1.0])  # moco_jointcrop.py's blur of two images: sigmas (0: no blur) and probabilities


@dataclass(kw_only=True)
class Method:
    """A record of a method. Flags are parts of a command line. Fields without a default are required."""

    # {flags that select a model: (name of its class, arguments except backbone, width and dim, inputs of forward)}
    models: dict
    # On ImageNet: (flags, view or None, color jitter, sigma and probability of blur, probability of solarization)
    augmentation: list
    refused: list  # flags, the last of which has no effect and is rejected
    processes: list  # flags for comparing several processes with one
    forms: list = field(default_factory=list)  # flags that select another recipe or form of the method
    needs: str = ""  # flags without which others have no effect within two steps
    four_views: str = ""  # flags for four views per step, of equal size and area range, with all random operations
    evaluated: str = "query"  # the encoder in backbone.pt


RECORDS = dict(
    moco_jointcrop=Method(
        models={"": ("MoCo", dict(queue=8), (VIEWS,)), "--moco v3": ("MoCoV3", dict(hidden=8), (VIEWS,))},
        augmentation=[*(("", view, MOCO_V2, DRAWN, 0) for view in range(3)),
                      *(("--moco v3", view, MOCO_V3, DRAWN, 0.2 * (view == 1)) for view in range(3))],
        refused=["--moco v3 --queue 9", "--moco v3 --bn-groups 4", "--milestones 0.5 --min-lr 1e-5",
                 "--joint none --beta 1", "--joint blur --local-crops 2 --joint-pair local", "--joint-pair local",
                 "--joint-prob 0.1", "--moco v1 --hidden 9", "--local-size 12"],
        processes=["--bn-groups 8 --local-crops 2 --local-size 8",
                   "--moco v3 --hidden 16 --local-crops 2 --local-size 8"],
        forms=["--moco v1", "--moco v3", f"--joint blur {BLUR}", f"--joint either {BLUR}", "--variant released"],
        four_views="--joint both --crop-scale 0.2 0.8 --blur-p 1 1 --local-crops 2 --local-size 16"),
    jcl=Method(
        models={"": ("JCL", dict(queue=8), (VIEWS, 4.0))},
        augmentation=PLAIN,
        refused=["--num-keys 1 --lam 1", "--vanilla --lam 1", "--vanilla --lam-schedule ramp",
                 "--arch vit_micro --bn-groups 4"],
        processes=["--bn-groups 8", "--bn-groups 16 --vanilla"],
        forms=["--variant released", "--vanilla"],
        four_views="--num-keys 3"),
    clim=Method(
        models={"": ("CLIM", dict(sizes=(8, 8), queue=8), (VIEWS[:2], [0.5, 0.3], VIEWS[1:3]))},
        augmentation=PLAIN,
        refused=["--selection none --mix none", "--selection none --num-positives 3", "--mix none --alpha 1",
                 "--selection none --refresh-every 3", "--selection none --clim-start 3", "--local-scale 0.1 0.2",
                 "--selection knn --num-clusters 3", "--selection kmeans --knn-k 3", "--local-size 12"],
        processes=["--bn-groups 8 --clim-start 0 --num-clusters 4 --knn-k 8 --image-size 16 12",
                   "--bn-groups 8 --clim-start 0 --num-clusters 4 --selection kmeans --local-crops 2 --local-size 8",
                   "--bn-groups 8 --clim-start 0 --selection random --mix none"],
        forms=["--selection none", "--selection knn", "--image-size 24 16"],
        needs="--clim-start 0 --num-clusters 4",  # to have positives
        four_views="--selection random --clim-start 0 --refresh-every 1"),
    logo=Method(
        models={"": ("MoCo", dict(pairs=PAIRS, queue=8), (VIEWS,)),
                "--base simsiam": ("SimSiam", dict(pairs=PAIRS, hidden=8), (VIEWS,))},
        augmentation=PLAIN,
        refused=["--base simsiam --queue 9", "--base simsiam --bn-groups 4", "--base simsiam --momentum 0.5",
                 "--base simsiam --temperature 1", "--local-crops 0 --pairs all", "--local-crops 0 --l2l",
                 "--no-l2l --affinity-lr 1", "--no-l2l --lam 1", "--l2l-weighting lambda --clip-ratio 1",
                 "--lam 1", "--hidden 9", "--layers 1", "--local-crops 0 --local-size 12",
                 "--local-crops 0 --variant paper", "--pairs all --variant paper"],
        processes=["--bn-groups 8 --local-size 8", "--bn-groups 8 --local-size 8 --variant paper --lam 0.5",
                   "--bn-groups 8 --local-size 8 --pairs all", "--bn-groups 8 --local-crops 0 --one-way",
                   "--local-size 8 --base simsiam --hidden 16 --lam 0.5"],
        forms=["--base simsiam", "--variant paper", "--affinity-form linear",
               "--base simsiam --local-crops 0 --one-way"],
        four_views="--local-size 16 --local-scale 0.2 1 --crop-scale 0.2 1"),
    patchmix=Method(
        models={"": ("PatchMix", dict(hidden=8, patch_size=4), (VIEWS,))},
        augmentation=[("", 0, MOCO_V3, ((0.1, 2.0), 1.0), 0), ("", 1, MOCO_V3, ((0.1, 2.0), 0.1), 0.2),
                      ("", 2, MOCO_V3, ((0.1, 2.0), 0.5), 0)],
        refused=["--terms oto --num-mix 3", "--terms oto --mix-slices 2", "--terms mto --smoothing 0.1",
                 "--arch resnet_mini --num-heads 4", "--arch resnet_mini --drop-path 0.1",
                 "--key-encoder query --momentum 0.5 1", "--local-size 12", "--local-scale 0.1 0.2"],
        processes=["--mix-slices 8 --num-mix 3 --hidden 16",
                   "--mix-slices 16 --hidden 16 --variant released --image-size 32 --local-crops 2"],
        forms=["--variant released", "--terms oto --patch-size 32"],  # unmixed images of one patch
        evaluated="momentum",
        needs="--patch-size 4",  # to have room for local crops
        four_views="--local-crops 2 --local-size 16 --patch-size 4"),
)  # fmt: skip
