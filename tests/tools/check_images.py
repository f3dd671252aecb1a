"""List every image below a folder that cannot be used: python tests/tools/check_images.py DIR

It reads every file once, on all cores, as a training does. Exits with 1 if any cannot be used.
"""

import argparse
import itertools
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import common


def problem(path):
    """Return why an image cannot be used, or None."""
    try:
        common.read_image(path)
    except common.BadImage as error:
        return str(error)


def main(args):
    if not os.path.isdir(args.dir):
        common.fail(f"{args.dir} is not a folder")
    warnings.simplefilter("ignore")  # Pillow's, of images that can be used all the same
    found, done, bad = common.find_images(args.dir), 0, 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside Python's lock
        while paths := list(itertools.islice(found, 1000)):
            for line in filter(None, pool.map(problem, paths)):
                common.log(line)
                bad += 1
            done += len(paths)
            common.progress(f"checking images: {done} read, {bad} cannot be used")
    common.log(f"{done} images read, {bad} cannot be used (other kinds of files are passed over)")
    raise SystemExit(1 if bad else 0)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", metavar="DIR")
    parser.set_defaults(device="cpu", arch=None)  # `start` asks for them
    return parser.parse_args()


if __name__ == "__main__":
    common.start(main, parse_args)
