"""Judge an encoder by weighted k-nearest-neighbour classification of its frozen features.

The k nearest training images vote for the class of a test image. A vote is exp(cosine similarity / temperature), as in
Wu et al. (arXiv 1805.01978). Nothing is trained, so the number is the representation's own. The same number is printed
for two floors: raw pixels, and the same encoder untrained.

    python eval_knn.py runs/patchmix-patterns-vit_micro-s0
    python eval_knn.py RUN/last.pt --encoder query --dataset cifar10 --data-dir DIR
    python eval_knn.py RUN --dump features.npz
    python eval_knn.py RUN --random-init                                       # its encoder, untrained
    python eval_knn.py FILE --arch resnet50 --dataset imagenet --data-dir DIR  # a checkpoint of others
    torchrun --nproc_per_node=8 eval_knn.py RUN --data-dir DIR

The encoder computes in bf16 on GPUs that have it (`--amp off`: in float32, with products in TF32). Neighbours are
always compared in float32.
Your own encoder and data: eval_knn.main(eval_knn.parse_args(["RUN"]), encoder=MODULE, train=DATASET, test=DATASET).
"""

import copy
import os
from pathlib import Path

import numpy as np
import torch.distributed as dist

import common

# ================================================================ 1. arguments


def parse_args(argv=None):
    """Return the command line, or a list of words, as a namespace. Exits with an error message on a mistake."""
    parser = common.evaluation_parser("eval_knn.py", __doc__)
    add = parser.add_argument_group("kNN").add_argument
    add("--k", type=common.number(int, 1), nargs="+", default=[10, 20, 100, 200], help="numbers of neighbours")
    add("--temperature", type=common.number(float, 1e-6), default=0.07, help="temperature of the votes")
    add("--batch-size", type=common.number(int, 1), default=256, metavar="N", help="images encoded at once per process")
    add("--dump", metavar="FILE.npz", help="write features, labels, class names and paths for numpy; needs no labels")
    return common.parse(parser, argv)[0]


# ================================================================= 2. the dump


def make_room(path):
    """Make the folder of a file that is to be written. Exits with an error message if the file cannot be new there."""
    if os.path.exists(path):
        common.fail(f"--dump {path} is there already: give another name")
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        common.fail(f"--dump {path} cannot be written: {error.strerror}")


def write_dump(path, lines, parts, encoded):
    """Write the features as one .npz without pickles, which numpy.load reads.

    lines: what the features are, as text. parts: {"train": images, "test": images}, the latter only if there is a test
    set. encoded: the same of (features (n, d), labels (n,)).
    The file has train_features (n, d) float32, as the encoder gives them, and train_labels (n,) int64, -1 where there
    is none. It has train_paths (n,) text or, if the images do not come from files, their numbers train_index (n,). It
    has the same for test, the names `classes` of the labels, and the text `protocol`.
    """
    arrays = {"classes": np.array(parts["train"].classes, str), "protocol": np.array(lines)}
    for name, part in parts.items():
        features, labels = encoded[name]
        arrays |= {f"{name}_features": features.numpy(), f"{name}_labels": labels.numpy()}
        if part.paths is None:
            arrays[f"{name}_index"] = np.arange(len(part))
        else:
            arrays[f"{name}_paths"] = np.array([part.path(i) for i in range(len(part))])

    def write(temporary):
        with open(temporary, "wb") as file:  # given a name, savez would add .npz to it
            np.savez(file, **arrays)

    if common.rank_and_world()[0] == 0:
        common.write_whole(path, write)
    common.say(f"features written to {path}")


# ===================================================================== 3. main


@common.own_generators()
def main(args, encoder=None, train=None, test=None):
    """Judge an encoder as args say. Return {"encoder" or a floor: {"knn20_top1": percent, ...}}.

    args: the namespace of `parse_args`. encoder: a module that maps (N, 3, H, W) to (N, width), instead of timm's.
    train, test: map-style Datasets of images and labels to use instead of --dataset. With --dump they need no labels:
    without two classes nothing is judged, and the result is {}.
    """
    own_group, args = not dist.is_initialized(), copy.copy(args)  # a caller's process group stays
    device, encoder, info = common.open_encoder(args, encoder)
    if args.dump:
        make_room(args.dump)
    train, test = common.open_data(args, info, train, test, labels=not args.dump)
    parts = {"train": train} if test is None else {"train": train, "test": test}
    judged = test is not None and (len(train.classes) > 1 or args.dataset == "own")  # else there is only a dump
    ks = list(dict.fromkeys(min(k, len(train)) for k in args.k))
    lines = f"{common.protocol(args, info, train, test)}\nkNN: cosine, votes exp(similarity / {args.temperature})"
    common.say(lines)
    networks = {"encoder": encoder, **(common.floor_encoders(args, info, device, len(train)) if judged else {})}
    results, how = {}, dict(batch_size=args.batch_size, workers=args.workers, amp=args.amp == "bf16")
    for name, network in networks.items():
        encoded = {}
        for part, images in parts.items():  # the bank stays shared out over the processes
            options = dict(how, whole=part == "test", what=f"features of {name}, {part}")
            encoded[part] = common.extract_features(network, images, info, device, **options)
        if name == "encoder" and args.dump:
            whole = tuple(common.gather_uneven(rows) for rows in encoded["train"])
            write_dump(args.dump, lines, parts, encoded | {"train": whole})
        if judged:
            (train_x, train_y), (test_x, test_y) = encoded["train"], encoded["test"]
            found = common.knn_accuracy(train_x.to(device), train_y, test_x.to(device), test_y, ks, args.temperature)
            results[name] = {f"knn{k}_top1": percent for k, percent in found.items()}
            common.say(f"{name:>10}  " + "  ".join(f"k={k} {percent:.2f} %" for k, percent in found.items()))
    if own_group and dist.is_initialized():
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    common.start(main, parse_args)
