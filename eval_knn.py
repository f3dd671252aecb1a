"""Evaluate an encoder by weighted k-nearest-neighbour classification of its frozen features.

The k nearest training images vote for the class of a test image. A vote is exp(cosine similarity / temperature), as in
Wu et al. (arXiv 1805.01978). Nothing is trained, so the number is the representation's own. The same number is printed
for two baselines: raw pixels, and the same encoder untrained.

    python eval_knn.py runs/patchmix-patterns-vit_micro-s0
    python eval_knn.py RUN/last.pt --encoder query --dataset cifar10 --data-dir DIR
    python eval_knn.py RUN --dump features.npz
    python eval_knn.py FILE --arch resnet50 --dataset imagenet --data-dir DIR  # a checkpoint of others
    torchrun --nproc_per_node=8 eval_knn.py RUN --data-dir DIR

The encoder computes in bf16 on GPUs that have it (`--amp off`: in float32, convolutions in TF32). Neighbours are
always compared in float32. PatchMix's released kNN differs: its features go through a head that was never trained, and
CIFAR's images are resized to 36 px, of which the middle is cut. LoGo's resizes ImageNet's images bicubically.
Your own encoder and images, which are a common.ImageSet each:
    eval_knn.main(eval_knn.parse_args(["RUN"]), encoder=MODULE, train=IMAGES, test=IMAGES)
"""

import copy
import math
import os
from pathlib import Path

import numpy as np

import common

# {name: (value, what it is, its limits)}
VALUES = dict(
    k=([10, 20, 100, 200], "numbers of neighbours", (1, math.inf)),
    temperature=(0.07, "temperature of the votes", (1e-6, math.inf)),
    batch_size=(256, "images encoded at once per process", (1, math.inf)),
    dump=(None, "write features, labels, class names and paths to this .npz, for numpy; needs no labels"),
)


def parse_args(argv=None):
    """Return the command line, or a list of words, as a namespace. Exits with an error message on a mistake."""
    args = common.parse("eval_knn", __doc__, argv, common.EVALUATION | {"kNN": VALUES})
    if not args.k:
        common.fail("--k: give one number of neighbours at least")
    return args


def write_dump(path, lines, parts, features):
    """Write features as one .npz without pickles, which numpy.load reads.

    lines: what the features are, as text. parts: {"train": images, "test": images}, the latter only if there is a test
    set. features: the same of (n, d).
    The file has train_features (n, d) float32, as the encoder gives them, train_labels (n,) int64, -1 where there is
    none and, if the images come from files, train_paths (n,) text. It has the same for test, the names `classes` of the
    labels, and the text `protocol`.
    """
    arrays = {"classes": np.array(parts["train"].classes, str), "protocol": np.array(lines)}
    for name, part in parts.items():
        arrays |= {f"{name}_features": features[name].numpy(), f"{name}_labels": part.labels}
        if part.paths is not None:
            arrays[f"{name}_paths"] = np.array([part.path(i) for i in range(len(part))])
    common.write_file(path, lambda file: np.savez(file, **arrays))
    common.log(f"features written to {path}")


def main(args, encoder=None, train=None, test=None):
    """Evaluate an encoder as args say. Return {"encoder" or a baseline: {"knn20_top1": percent, ...}}.

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of timm's; a
    copy of it is evaluated. train, test: common.ImageSet of images and labels to use instead of --dataset. With --dump
    they need no labels: images without one are in the file only, and without two classes the result is {}.
    """
    args = copy.copy(args)
    folder = Path(args.dump or ".").absolute().parent
    if args.dump and (os.path.exists(args.dump) or not (folder.is_dir() and os.access(folder, os.W_OK))):
        common.fail(f"--dump {args.dump} is there already, or its folder is missing or read-only")  # before the work
    device, encoder, info = common.open_encoder(args, encoder)
    train, test = common.open_data(args, info, train, test, labels=not args.dump)
    parts = {"train": train} if test is None else {"train": train, "test": test}
    evaluated = test is not None and len(train.classes) > 1 and len(test.classes) > 0  # else there is only a dump
    if evaluated:
        common.check_labels(train, test)  # with --dump, too
    lines = f"{common.protocol(args, info, train, test)}\nkNN: cosine, votes exp(similarity / {args.temperature})"
    common.log(lines)
    count = len(train.labelled())
    ks = list(dict.fromkeys(min(k, count) for k in args.k))  # as the scores' names say
    networks = {"encoder": encoder, **(common.baseline_encoders(args, info, device, count) if evaluated else {})}
    results, how = {}, dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp == "bf16")
    for name, network in networks.items():
        if name != "encoder":  # images without labels are for the dump only
            parts = {part: images.labelled() for part, images in parts.items()}
        x = {}
        for part, images in parts.items():  # the bank stays shared out over the processes
            options = dict(how, whole=part == "test", what=f"features of {name}, {part}")
            x[part] = common.extract_features(network, images, info, device, **options)
        if name == "encoder" and args.dump:
            write_dump(args.dump, lines, parts, x | {"train": common.gather_uneven(x["train"])})
        if evaluated:
            bank, queries = ((rows.to(device), parts[part]) for part, rows in x.items())
            results[name] = common.knn_scores(*bank, *queries, ks, args.temperature)
            found = zip(ks, results[name].values(), strict=True)
            common.log(f"{name:>10}  " + "  ".join(f"k={k} {percent:.2f} %" for k, percent in found))
    return results


if __name__ == "__main__":
    common.start(main, parse_args)
