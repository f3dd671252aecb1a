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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", metavar="DIR")
    folder, done, bad = parser.parse_args().dir, 0, 0
    if not os.path.isdir(folder):
        common.fail(f"{folder} is not a folder")
    warnings.simplefilter("ignore")  # Pillow's, of images that can be used all the same
    found = common.find_images(folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside Python's lock
        while paths := list(itertools.islice(found, 1000)):
            for line in filter(None, pool.map(problem, paths)):
                common.log(line)
                bad += 1
            done += len(paths)
            common.progress(f"checking images: {done} read, {bad} cannot be used")
    common.log(f"{done} images read, {bad} cannot be used (other kinds of files are passed over)")
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
