"""Pictures of runs, made by hand (needs matplotlib): learning curves of one or more runs.

python tests/figures.py curves OUT.png RUN [RUN ...]
"""

import json
import sys
from pathlib import Path


def curves(out, runs):
    """kNN accuracy and loss below chance over the epochs, one line a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for run in runs:
        records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        epochs = [r for r in records if "epoch" in r]
        judged = [(r["epoch"], r["knn20_top1"]) for r in epochs if "knn20_top1" in r]
        if "knn20_top1_untrained" in records[0]:
            judged = [(0, records[0]["knn20_top1_untrained"]), *judged]
            left.axhline(records[0]["knn20_top1_pixels"], color="gray", linestyle=":", linewidth=1)
        left.plot(*zip(*judged, strict=True), marker="o", label=Path(run).name)
        right.plot([r["epoch"] for r in epochs], [r["below_chance"] for r in epochs], label=Path(run).name)
    left.set(xlabel="epoch", ylabel="kNN top-1, % (k = 20); dotted: raw pixels")
    right.set(xlabel="epoch", ylabel="chance level - loss")
    left.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] != "curves":
        sys.exit(__doc__)
    curves(sys.argv[2], sys.argv[3:])
