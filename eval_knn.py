"""Evaluate an encoder by weighted k-nearest-neighbor classification of its frozen features.

The k nearest training images vote for the class of a test image, each with the weight exp(cosine similarity /
temperature), as in Wu et al. (arXiv 1805.01978). Raw pixels (of up to 200,000 images) and the untrained encoder are
evaluated, too.

    python eval_knn.py runs/patchmix-patterns-vit_micro-s0
    python eval_knn.py RUN/last.pt --encoder query --dataset cifar10 --data-dir DIR
    python eval_knn.py RUN --dump features.npz
    python eval_knn.py FILE --arch resnet50 --prefix module.encoder_q. --dataset imagenet --data-dir DIR
    torchrun --nproc_per_node=8 eval_knn.py RUN

The encoder computes in bf16 on GPUs that support it (`--amp off`: in float32). Neighbors are compared in float32.
PatchMix's released kNN differs: its features go through a head that was never trained, and CIFAR's images are resized
to 36 px and center-cropped. LoGo's released kNN resizes ImageNet's images bicubically.
"""

import argparse
import json
import os

import numpy as np
import torch

import common


def parse_args(argv=None):
    """Parse the command line."""
    parser = argparse.ArgumentParser("eval_knn.py", description="Evaluate by k-nearest-neighbor classification")
    common.add_evaluation_arguments(parser)
    add = parser.add_argument_group("kNN").add_argument
    add("--k", type=common.positive_int, nargs="+", default=[10, 20, 100, 200], help="numbers of neighbors")
    add("--temperature", type=common.positive_float, default=0.07, help="temperature of the votes")
    add("--batch-size", type=common.positive_int, default=256, help="batch size per process")
    add("--dump", type=os.path.abspath, metavar="FILE.npz", help="write features, labels and paths, and exit")
    args = parser.parse_args(argv)
    if args.dump and (os.path.exists(args.dump) or not os.access(os.path.dirname(args.dump), os.W_OK)):
        parser.error(f"--dump: {args.dump} already exists, or cannot be written")
    return args


@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
def main(args, train=None, test=None):
    """Evaluate an encoder. Return {"encoder" or a baseline: {"knn20_top1": percent, ...}}.

    args: from `parse_args`. train, test: datasets with items (PIL image, label), `targets` and `classes`, which are
    used instead of --dataset. With --dump, which needs no labels and no test images, the result is empty.
    """
    device, *_ = common.init_distributed(args.device)
    encoder, info = common.open_encoder(args)
    train, test, info = common.open_evaluation_data(args.dataset, args.data_dir, info, not args.dump, train, test)
    options = dict(batch_size=args.batch_size, workers=args.workers, amp=common.use_bf16(args.amp, device))
    if args.dump:
        arrays = dict(protocol=json.dumps(info))
        for part, images in ("train", train), ("test", test):
            if images is not None:
                x = common.extract_features(encoder.to(device), images, info, device, **options)
                arrays[f"{part}_features"] = common.gather_rows(x, to_first=True)
                arrays[f"{part}_labels"] = common.labels_of(images)
                arrays[f"{part}_classes"] = np.array([*map(str, getattr(images, "classes", []))], str)
            if hasattr(images, "samples"):
                arrays[f"{part}_paths"] = np.array([path for path, _ in images.samples])
        common.write_file(args.dump, lambda file: np.savez(file, **arrays))
        common.log(f"wrote the features to {args.dump}")
        return {}
    common.log(f"{'kNN':10}neighbors vote with weight exp(cosine similarity / {args.temperature})")
    options |= dict(k=args.k, temperature=args.temperature)
    encoders = {"encoder": encoder} | ({} if args.no_baselines else common.baselines(info, args.seed, len(train)))
    results = {}
    for name, network in encoders.items():
        results[name] = common.knn_accuracy(network.to(device), info, train, test, device, **options)
        common.log(f"{name:>10}  " + "  ".join(f"{score} {value:.2f}%" for score, value in results[name].items()))
    return results


if __name__ == "__main__":
    common.start(main, parse_args)
