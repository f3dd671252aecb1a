"""List every image below a folder that cannot be used, and what is passed over. Exits with 1 if any cannot be used.

    python tests/tools/check_images.py DIR

It reads every file once, on all cores, as a training does.
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

AT_ONCE = 1000  # files that are handed out before the first of them is waited for


def walk(folder, above=()):
    """Yield (path, kind) of all below a folder that is no folder itself, with the kinds of common.entries."""
    for name, kind in common.entries(folder, above):
        path = os.path.join(folder, name)
        if kind == "folder":
            yield from walk(path, (folder, *above))
        else:
            yield path, kind


def problem(path):
    """Return why an image cannot be used, as one line, or None."""
    try:
        common.read_image(path)
    except common.BadImage as error:
        reason = error.__cause__
        return f"{path}: {str(reason) or type(reason).__name__}".replace("\n", "\\n")


def main(args):
    if not args.dir.is_dir():
        common.fail(f"{args.dir} is no folder")
    warnings.simplefilter("ignore")  # Pillow's, of images that can be used all the same
    done, bad, passed_over = 0, 0, {}
    found = walk(args.dir)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside Python's lock
        while part := list(itertools.islice(found, AT_ONCE)):
            images = [path for path, kind in part if kind == "image"]
            problems = [line for line in pool.map(problem, images) if line]
            problems += [f"{path}: this link leads nowhere" for path, kind in part if kind == "link to nowhere"]
            for line in problems:
                common.say(line)
            done, bad = done + len(images), bad + len(problems)
            common.progress(f"checking images: {done} read, {bad} cannot be used")
            for path, kind in part:
                if kind not in ("image", "link to nowhere"):
                    name = os.path.splitext(path)[1].lower() or "without extension"
                    passed_over.setdefault(name if kind == "no image" else kind, []).append(path)
    for kind, paths in sorted(passed_over.items()):
        common.say(f"passed over: {len(paths)} ({kind}), such as {paths[0]}")
    common.say(f"{done} images read, {bad} cannot be used" + (": mend or remove them" if bad else ""))
    raise SystemExit(1 if bad else 0)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path, metavar="DIR", help="a folder with images, at any depth")
    return parser.parse_args(argv)


if __name__ == "__main__":
    common.start(main, parse_args)
