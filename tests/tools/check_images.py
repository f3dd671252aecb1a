"""List every image of a data folder that cannot be read: python tests/tools/check_images.py DIR

It reads the files once, on all cores, as trainings and evaluations with --data-dir DIR do. Exit status 1 if any fails.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.data import ConcatDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import common


def main(folder):
    parts = [common.load_dataset("folder", folder, train) for train in (True, False)]
    images, failed = ConcatDataset(part for part in parts if part), 0

    def problem(index):
        try:
            images[index]
        except OSError as error:
            return str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside Python's lock
        for line in filter(None, pool.map(problem, range(len(images)))):
            common.log(line)
            failed += 1
    common.log(f"{len(images)} images, {failed} cannot be read")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("check_images.py", description=__doc__.partition(":")[0])
    parser.add_argument("folder", metavar="DIR", help="folder of images, as for --data-dir")
    common.start(main, lambda: parser.parse_args().folder)
