"""Measures time and memory, by hand; the tests never do. Prints one table, and with --json the same as data.

python tests/bench.py positives                       CLIM's neighbours and k-means against the number of images
python tests/bench.py positives --sizes 12500 25000   other numbers
python tests/bench.py flat [--steps 2000]             memory and open files of each method over a run of many steps
"""

import argparse
import contextlib
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import clim  # noqa: E402

METHODS = ("moco_jointcrop", "jcl", "clim", "logo", "patchmix")


def alone(function, *arguments):
    """Call function in a fresh process: (its seconds, the memory in MiB by which the process grew at its peak)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (function, *arguments))


def _measured(function, *arguments):
    torch.set_flush_denormal(True)
    function(*(min(a, 256) if isinstance(a, int) else a for a in arguments))  # what the first call alone costs
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def embeddings(count):
    """Unit vectors (count, 128) about 100 directions, as an encoder's embeddings of a hundred kinds of images are."""
    draws = torch.Generator().manual_seed(0)
    kinds = torch.randn(100, 128, generator=draws)[torch.randint(100, (count,), generator=draws)]
    return torch.nn.functional.normalize(kinds + torch.randn(count, 128, generator=draws), dim=1)


def neighbors(count):
    clim.nearest_neighbors(embeddings(count), 40)


def clusters(count):
    clim.kmeans(embeddings(count), max(1, count // 128), generator=torch.Generator().manual_seed(0))


def positives(sizes):
    """One row a number of images: seconds and MiB of the 40 nearest neighbours, and of k-means with 128 images a cluster."""
    rows = []
    for count in sizes:
        (seconds, memory), (seconds_k, memory_k) = alone(neighbors, count), alone(clusters, count)
        rows.append(dict(images=count, neighbors_s=seconds, neighbors_mib=memory, kmeans_s=seconds_k, kmeans_mib=memory_k))
    return rows


def resident(pid):
    """(memory in MiB, open files) of a process and its loader's workers."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    pages = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in pids)
    return pages * resource.getpagesize() / 2**20, sum(len(list(Path(f"/proc/{p}/fd").iterdir())) for p in pids)


def flat(steps):
    """One row a method: memory and open files in the second and in the last quarter of a run of tiny batches, medians."""
    rows = []
    for method in METHODS:
        with tempfile.TemporaryDirectory() as out:
            flags = ["--batch-size", "4", "--knn-every", "1", "--workers", "1", "--max-steps", str(steps), "--out", out]
            flags += ["--clim-start", "0", "--refresh-every", "1"] if method == "clim" else []
            run = subprocess.Popen([sys.executable, ROOT / f"{method}.py", *flags], stdout=subprocess.DEVNULL)
            samples = []
            while run.poll() is None:
                time.sleep(0.5)
                if Path(out, "metrics.jsonl").exists():  # training has begun
                    with contextlib.suppress(OSError):  # it ended meanwhile
                        samples.append(resident(run.pid))
            if run.returncode:
                raise SystemExit(f"{method}.py ended with status {run.returncode}")
        n = len(samples) // 4
        (early, early_files), (late, late_files) = (np.median(part, axis=0) for part in (samples[n : 2 * n], samples[-n:]))
        rows.append(dict(method=method, mib=early, mib_at_the_end=late, files=int(early_files), files_at_the_end=int(late_files)))
    return rows


def table(rows):
    """Markdown of a list of equal dictionaries."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---:|" * len(rows[0])]
    lines += ["| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser("bench.py", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("positives", "flat"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[12_500, 25_000, 50_000, 100_000], metavar="N")
    parser.add_argument("--steps", type=int, default=2000, metavar="N")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    rows = positives(args.sizes) if args.what == "positives" else flat(args.steps)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n{table(rows)}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
