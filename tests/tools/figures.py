"""Makes README's pictures, by hand: python tests/tools/figures.py [FOLDER]. Needs matplotlib.

The photographs are in .github/photos. The methods' own files with their ImageNet recipes make every view, as they do
for --show-views, and every mix, ratio, choice and weight. The seeds were chosen by eye, so that something can be
recognized: if a method draws other numbers, look at its pictures again.
"""

import argparse
import contextlib
import io
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from bench import ROOT  # which puts the project's root on the path
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from PIL import Image
from torch.utils.data import DistributedSampler

import clim
import common
import jcl
import logo
import moco_jointcrop
import patchmix

WIDTH = 760  # px, as README shows it; written 1.6 times as large
FLOWERS = (40, 110, 240), (0, 20, 320)  # (top, left, side) of two crops of flower.jpg that stand for two images
QUERY, KEY, APART, GRAY = "#0969da", "#1a7f37", "#cf222e", "#57606a"
PLAIN = ("color_jitter", "grayscale", "solarize")  # without them only the crop, the blur and the flip are left
COLOR = (*PLAIN, "gaussian_blur", "horizontal_flip")


# ------------------------------------------------------------ what is shown


def shown(method, flags, images, seed, without=()):
    """Return the views that a method's main makes for --show-views: a list of (n, 3, S, S) in [0, 1].

    without: names of common's functions that leave images as they are.
    """
    views, groups = [], "--mix-slices 1" if method is patchmix else "--bn-groups 1"
    argv = f"--dataset imagenet --show-views x.png --device cpu --workers 0 {groups} --batch-size {len(images)} {flags}"
    args = method.parse_args([*argv.split(), "--seed", str(seed)])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(common, "save_views", lambda path, found, *more: views.extend(found)))
        stack.enter_context(mock.patch.object(DistributedSampler, "__iter__", lambda sampler: iter(range(len(images)))))
        for name in (*without, "normalize"):
            stack.enter_context(mock.patch.object(common, name, lambda x, *more, **options: x))
        method.main(args, train=[(image, -1) for image in images])
    return views


def views(method, flags, photo, seed, without=()):
    """A method's views of a photo, as `shown`, and their boxes on it, [(box, color), ...].

    A box is found on an image whose red and green tell the place: crops are drawn before colors.
    """
    width, height = photo.size
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    places = Image.fromarray(np.stack([red, green, 0 * red], 2).round().astype(np.uint8))
    boxes = []
    for v, (crop, _) in enumerate(shown(method, flags, [places] * 2, seed, COLOR)):  # main refuses one image
        size = crop.shape[-1]
        inner = np.arange(5, size - 5)  # values at the edges are those of fewer pixels
        rows_and_columns = torch.stack([height * crop[1].mean(1), width * crop[0].mean(0)], 1)
        slopes, starts = np.polyfit(inner + 0.5, rows_and_columns[inner], 1)
        is_key = v < 2 if method is logo else v > 0
        boxes.append(((*starts, *slopes * size), KEY if is_key else QUERY))
    return shown(method, flags, [photo] * 2, seed, without), boxes


def clim_views(photos, seed, without=()):
    """Two images of one photograph, CLIM's views of them, the box of the mix, and the first's share in it.

    The views are key and query of the image, and of the other as its positive (the seed draws it, no encoder chooses),
    and the mixed query.
    """
    images = [photos["flower"].crop((left, top, left + side, top + side)) for top, left, side in FLOWERS]
    found = [view[0] for view in shown(clim, "--image-size 224", images, seed, without)]
    changed = torch.nonzero((found[1] != found[4]).any(0))
    (top, left), (height, width) = changed.amin(0).tolist(), (changed.amax(0) - changed.amin(0) + 1).tolist()
    return images, found, ((top, left, height, width), QUERY), 1 - height * width / 224**2


class Page:
    """A sheet of WIDTH x height pixels, the origin top left."""

    def __init__(self, height, name="", idea=""):
        self.figure, self.height = Figure(figsize=(WIDTH / 100, height / 100), dpi=160), height
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        self.head(12, 18, name, size=11, ha="left")
        self.text(12, 38, idea, 8.5, color=GRAY, ha="left")

    def text(self, x, y, text, size=8, **options):
        options = dict(ha="center", va="center", linespacing=1.25) | options
        if options["va"] == "center" and "\n" not in text and "rotation" not in options:  # one line for all of a row
            y, options["va"] = y + size / 2, "baseline"
        self.axes.text(x, y, text, fontsize=size, **options)

    def head(self, x, y, text, color="black", size=8.5, **options):
        self.text(x, y, text, size, color=color, weight="bold", **options)

    def box(self, x, y, width, height, color, thick):
        self.axes.add_patch(Rectangle((x, y), width, height, fill=False, ec=color, lw=thick, zorder=2))

    def image(self, image, x, y, size, frame=None, boxes=()):
        """A view (3, S, S), or a photo as it is in the middle of the square; boxes: [(box, color), ...] on it."""
        image = image.clamp(0, 1).permute(1, 2, 0).numpy() if torch.is_tensor(image) else np.asarray(image)
        scale = size / max(image.shape)
        height, width = (side * scale for side in image.shape[:2])
        left, top = x + (size - width) / 2, y + (size - height) / 2
        extent = (left, left + width, top + height, top)
        self.axes.imshow(image, extent=extent, interpolation="antialiased", zorder=1, aspect="auto")
        for box, color in boxes:
            y, x, high, wide = (v * scale for v in box)
            self.box(left + x, top + y, wide, high, "white", 2.6)
            self.box(left + x, top + y, wide, high, color, 1.6)
        if frame:
            self.box(left, top, width, height, frame, 2.2 if size > 50 else 1.5)

    def row(self, images, x, y, size, frame=None, boxes=(), gap=3):
        """Images side by side."""
        for n, image in enumerate(images):
            self.image(image, x + n * (size + gap), y, size, frame, boxes)

    def arrow(self, start, end, color, both=False, bend=0.0):
        style = "<|-|>" if both else "-|>"
        options = dict(connectionstyle=f"arc3,rad={bend}", mutation_scale=10, lw=1.6, shrinkA=0, shrinkB=0, zorder=3)
        self.axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, color=color, **options))

    def plot(self, x, y, width, height):
        """Axes of their own for a small plot."""
        place = (x / WIDTH, 1 - (y + height) / self.height, width / WIDTH, height / self.height)
        return self.figure.add_axes(place)

    def save(self, path):
        """With 256 colors, a third of the size."""
        canvas = FigureCanvasAgg(self.figure)
        canvas.draw()
        Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]).quantize(256).save(path, optimize=True)


# ---------------------------------------------------------------- the figures


def overview(photos):
    """All five ideas beside their baseline."""
    page, tile = Page(448), 92
    top, middle, low, last = 66, 170, 280, 394
    rows = ("what\ngoes in", top, "black"), ("the\nquery", middle, QUERY), ("is pulled\ntoward", low, KEY)
    for text, y, color in (*rows, ("is pushed\naway from", last + 20 - tile / 2, APART)):
        page.head(10, y + tile / 2, text, color, size=9, ha="left")
    x = [92 + 111.5 * n for n in range(6)]

    def column(x, name, idea, inputs, queries, keys, boxes=(), pasted=(), note="", shares=()):
        page.head(x + tile / 2, 14, name, size=10)
        page.text(x + tile / 2, 40, idea, 7.2, color=GRAY)
        page.arrow((x + tile / 2, middle + tile + 3), (x + tile / 2, low - 3), KEY)
        for y, images, color, marks in ((top, inputs, None, boxes), (middle, queries, QUERY, pasted)):
            size = (tile - 3 * (len(images) - 1)) / len(images)
            page.row(images, x, y + (tile - size) / 2, size, color, marks)
        across = min(len(keys), 3)
        size = (tile - 3 * (across - 1)) / across
        page.row(keys[:3], x, low, size, KEY)
        page.row(keys[3:], x + (size + 3) / 2, low + size + 3, size, KEY)
        page.text(x + tile / 2, low + (2 * size + 20 if len(keys) > 3 else size + 12), note, 7.2, color=KEY)
        for n, share in enumerate(shares):
            page.text(x + n * (size + 3) + size / 2, low + size + 12, f"{100 * share:.0f}%", color=KEY)

    photo = photos["astronaut"]
    (query, key), boxes = views(moco_jointcrop, "--joint none", photo, 13, PLAIN)
    column(x[0], "MoCo v2", "the baseline: one\nview finds another", [photo], query[:1], key[:1], boxes)

    (query, key), boxes = views(moco_jointcrop, "", photo, 6, PLAIN)
    column(x[1], "JointCrop", "the areas' ratio\nis drawn first", [photo], query[:1], key[:1], boxes)

    (query, *keys), boxes = views(jcl, "", photo, 13, PLAIN)
    idea, note = "all keys of an image,\nin closed form", "their mean, and\nwhere they agree"
    column(x[2], "JCL", idea, [photo], query[:1], [key[0] for key in keys], boxes, note=note)

    pair, (key, _, other_key, _, mixed), box, kept = clim_views(photos, 8, PLAIN)
    idea = "a similar image,\nmixed in, is a positive"
    column(x[3], "CLIM", idea, pair, [mixed], [key, other_key], pasted=[box], shares=(kept, 1 - kept))

    crops, boxes = views(logo, "", photo, 17, PLAIN)
    globals_, locals_ = ([crop[0] for crop in part] for part in (crops[:2], crops[2:]))
    idea, note = "local crops, pushed\napart by a network", "both global crops"
    column(x[4], "LoGo", idea, [photo], locals_, globals_, boxes, note=note)
    page.arrow((x[4] + 22.25, middle + 18.75), (x[4] + 68.975, middle + 18.75), APART, True, -0.4)

    three = [photos[name] for name in ("astronaut", "cat", "coffee")]
    _, other, mixed, _ = shown(patchmix, "--patch-size 32", three, 23, PLAIN)
    idea, shares = "patches of M images:\nfind each image again", patchmix.mix_targets(3, 3)[1]
    column(x[5], "PatchMix", idea, three, mixed[:1], other, shares=shares)

    five = [photos[name] for name in ("rocket", "retina", "deep_field", "coffee", "cat")]
    _, others = shown(moco_jointcrop, "--joint none", five, 5, PLAIN)
    page.row(others, x[0], last, 40, APART)
    text = "...  keys of other images: a queue of\nearlier ones, in PatchMix the batch"
    page.text(x[0] + 5 * 43 + 8, last + 20, text, ha="left")
    page.text(x[4] + tile / 2, last + 20, "also: a local crop\nfrom the other")
    return page


def joint(photos):
    """JointCrop and JointBlur: pairs of views, and the distribution of their ratio."""
    idea = "Two random crops mostly have similar areas, and match easily: draw the ratio of areas first"
    page, tile, top = Page(500, "JointCrop and JointBlur", idea), 82, 88
    starts = 108, 108 + 3 * tile + 20
    for x in starts:
        for n, (text, color) in enumerate((("photograph", "black"), ("query", QUERY), ("key", KEY))):
            page.head(x + n * (tile + 4) + tile / 2, top - 16, text, color)
    page.head(705, top - 16, "how often")
    # Both views of JointBlur's pairs are of the whole photograph, so that they differ by their blur alone
    blur = "--joint blur --blur-p 1 1 --crop-scale 1 1"
    rows = (
        ("RandomCrop", "the baseline: crops\nof random areas", "--joint none", (13, 16)),
        ("JointCrop", "beta = 0:\nevery ratio", "--beta 0", (21, 6)),
        ("JointCrop", "beta = -4: mostly\nextreme ratios", "--beta -4", (5, 7)),
        ("JointBlur", "one clear, one blurred\n(their centers,\nenlarged)", blur, (15, 15)),
    )
    for row, (name, how, flags, seeds) in enumerate(rows):
        y, blurs = top + row * (tile + 20), name == "JointBlur"
        page.head(10, y + tile / 2 - 14, name, size=9, ha="left")
        page.text(10, y + tile / 2 + 16 + 5 * how.count("\n"), how, 7.2, color=GRAY, ha="left")
        for x, photo, seed in zip(starts, (photos["astronaut"], photos["coffee"]), seeds, strict=True):
            pair, boxes = views(moco_jointcrop, flags, photo, seed, PLAIN + ("horizontal_flip",) * blurs)
            if blurs:
                pair = [view[:, :, 70:154, 70:154] for view in pair]
            else:
                page.image(photo, x, y, tile, boxes=boxes)
            page.image(pair[0][0], x + tile + 4, y, tile, QUERY)
            page.image(pair[1][0], x + 2 * (tile + 4), y, tile, KEY)
        args = moco_jointcrop.parse_args(["--dataset", "imagenet", *flags.split()])
        low, high = (0.1, 2.0) if blurs else args.crop_scale
        beta = None if args.joint == "none" else args.beta
        first, second = moco_jointcrop.sample_joint(200_000, low, high, beta, torch.Generator().manual_seed(0))
        plot, widest = page.plot(662, y + 4, 86, tile - 16), high / low
        plot.hist((second / first).log().numpy(), 40, color=GRAY)
        plot.tick_params(labelsize=6.5, length=2, pad=2)
        plot.set_xticks(np.log([1 / widest, 1, widest]), [f"1/{widest:.0f}", "1", f"{widest:.0f}"])
        plot.set_yticks([])
        plot.spines[["top", "right", "left"]].set_visible(False)
        words = "ratio of the blurs" if blurs else "ratio of the areas"
        plot.text(0.5, -0.32, words, fontsize=6.5, ha="center", transform=plot.transAxes)
    return page


def joint_contrast(photos):
    """JCL: one key per image against M' keys, and what their agreement is worth."""
    idea = "A query is not compared with one key of its image, but with all that augmentation could make"
    page, tile, top = Page(420, "JCL", idea), 84, 88
    x = [112 + n * (tile + 8) for n in range(7)]
    for place, text, color in zip(x, ("photograph", "query", "its key"), ("black", QUERY, KEY), strict=False):
        page.head(place + tile / 2, top - 16, text, color)
    seen, boxes = views(jcl, "", photos["cat"], 15)
    for row, (name, how, keys) in enumerate((("MoCo v2", "one key", 1), ("JCL", "M' = 5 keys", 5))):
        y = top + row * (tile + 24)
        page.head(10, y + tile / 2 - 8, name, size=9, ha="left")
        page.text(10, y + tile / 2 + 10, how, 7.5, color=GRAY, ha="left")
        page.image(photos["cat"], x[0], y, tile, boxes=boxes[: 1 + keys])
        page.image(seen[0][0], x[1], y, tile, QUERY)
        page.row([key[0] for key in seen[1 : 1 + keys]], x[2], y, tile, KEY, gap=8)
    note = "one key is one sample of what augmentation\ncan make of the image ..."
    page.text(x[3], top + tile / 2, note, color=GRAY, ha="left")
    y = top + 2 * (tile + 24)
    note = "... JCL estimates all keys from five: the query is pulled toward their mean,\n"
    note += "and the loss is higher where the keys differ along the query"
    page.text((x[2] + x[6] + tile) / 2, y - 2, note, color=KEY)
    page.head(10, y + 74, "both are\npushed\naway from", APART, size=9, ha="left")
    five = [photos[name] for name in ("astronaut", "coffee", "rocket", "retina", "deep_field")]
    _, keys = shown(jcl, "--num-keys 1", five, 4)
    page.row(keys, x[0], y + 44, tile * 0.7, APART, gap=6)
    page.text(x[4] - 24, y + 74, "...  keys of the images before, in a queue", ha="left")
    return page


def mixture(photos):
    """CLIM: whom an image is mixed with, the mix, and what the mix is pulled toward."""
    idea = "Other images are positives, too: neighbors nearer to their cluster's center, mixed in by CutMix"
    page, tile, top = Page(306, "CLIM", idea), 104, 92
    page.head(128, top - 20, "1. choose positives")
    plot = page.plot(14, top - 6, 228, 172)
    random = torch.Generator().manual_seed(5)
    places = torch.tensor([[0.0, 0.0], [2.6, 0.6], [1.1, 2.3]])
    points = places.repeat_interleave(60, 0) + 0.62 * torch.randn(180, 2, generator=random)
    centers, assignment = clim.kmeans(points, 3, generator=random)
    anchor = 7
    neighbors = clim.nearest_neighbors(points, 16)
    near = neighbors[anchor]
    distance = (points - centers[assignment]).square().sum(1)
    count = ((distance <= distance[anchor]) & (assignment == assignment[anchor]))[near].sum().item()  # Eq. 2
    chosen = clim.select_positives(points, centers, assignment, neighbors, count)[anchor]
    for m, color in enumerate(("#9ec5f8", "#c9b8f0", "#f4c79a")):
        plot.scatter(*points[assignment == m].T, s=9, color=color)
    plot.scatter(*centers.T, marker="x", s=46, color="black", lw=1.6, label="center of a cluster")
    plot.scatter(*points[near].T, s=22, facecolors="none", edgecolors=GRAY, lw=0.9, label="neighbor of the image")
    plot.scatter(*points[chosen].T, s=22, color=KEY, label="its positives")
    plot.scatter(*points[anchor], s=80, marker="*", color=QUERY, zorder=3, label="the image")
    plot.axis("off")
    plot.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, 0.04), frameon=False, ncol=2, handletextpad=0.2)

    _, (own_key, one, other_key, two, mixed), box, kept = clim_views(photos, 4)
    x, y, side = (262, 374, 506, 638), top + 34, 76
    below, across = y + tile + 14, y + tile / 2
    page.head((x[0] + x[1] + tile) / 2, top - 20, "2. an image, and a positive")
    page.head(x[2] + tile / 2, top - 20, "3. mixed: the query", QUERY)
    page.head(x[3] + tile / 2, top - 20, "4. the keys", KEY)
    for place, view, text in ((x[0], one, "the image"), (x[1], two, "its positive")):
        page.image(view, place, y, tile)
        page.text(place + tile / 2, below, text, color=GRAY)
    page.text((x[0] + x[1] + tile) / 2, below + 14, "(here: both are of one photograph)", 7, color=GRAY)
    page.image(mixed, x[2], y, tile, QUERY, boxes=[box])
    page.text(x[2] + tile / 2, below, f"{100 * kept:.0f}% of the image", color=QUERY)
    page.arrow((x[1] + tile + 4, across), (x[2] - 4, across), GRAY)
    keys = (top - 6, own_key, kept, "its own key"), (top + side + 22, other_key, 1 - kept, "the positive's key")
    for y, key, share, text in keys:
        page.image(key, x[3] + 14, y, side, KEY)
        page.text(x[3] + 14 + side / 2, y + side + 12, f"{100 * share:.0f}%: {text}", color=KEY)
        page.arrow((x[2] + tile + 4, across), (x[3] + 10, y + side / 2), KEY)
    return page


def local_global(photos):
    """LoGo: which crops are pulled together, and which are pushed apart."""
    idea = "Large crops see the same things. Small ones may see different things, so they are pushed apart"
    page, top = Page(356, "LoGo", idea), 92
    seen, boxes = views(logo, "", photos["astronaut"], 17)
    photo, size, small = 230, 96, 74
    page.head(14 + photo / 2, top - 18, "photograph, four crops")
    page.image(photos["astronaut"], 14, top, photo, boxes=boxes)
    x, low = (300, 452), top + size + 62
    page.head((x[0] + x[1] + size) / 2, top - 18, "global crops", KEY)
    for n in (0, 1):
        page.image(seen[n][0], x[n], top, size, KEY)
        page.image(seen[2 + n][0], x[n] + (size - small) / 2, low, small, QUERY)
    for n, m in ((0, 0), (0, 1), (1, 0), (1, 1)):  # a local, a global
        start, end = x[n] + size / 2 + 8 * (m - n), x[m] + size / 2 + 14 * (n - m)
        page.arrow((start, low - 4), (end, top + size + 4), KEY)
    page.arrow((x[0] + size + 4, top + size / 2), (x[1] - 4, top + size / 2), KEY, True)
    y = low + small / 2
    page.arrow((x[0] + (size + small) / 2 + 4, y), (x[1] + (size - small) / 2 - 4, y), APART, True)
    page.head((x[0] + x[1] + size) / 2, low + small + 16, "local crops", QUERY)
    apart = "pushed apart, by what a\nsmall network has learned\nto tell: are two locals\nof one image?"
    notes = (
        (top + size / 2, "global to global:", "each is pulled toward\nthe other's key", KEY),
        (top + size + 32, "local to global:", "pulled toward both; the\nglobals stay as they are", KEY),
        (y, "local to local:", apart, APART),
    )
    for place, head, text, color in notes:
        page.head(576, place - 18, head, color, ha="left", va="top")
        page.text(576, place, text, ha="left", va="top")
    return page


def patches(photos):
    """PatchMix: the mix, and the shares that it is to find."""
    idea = "Patches of M images make one mix. A ViT learns to find each image again, with its share"
    page, top, tile = Page(566, "PatchMix", idea), 84, 92
    order = [photos[name] for name in ("astronaut", "cat", "coffee", "flower", "palace", "rocket")]
    one, two, mixed, other = shown(patchmix, "--patch-size 32", order, 23, PLAIN)
    x, y = [60 + n * (tile + 26) for n in range(3)], top + tile / 2
    page.head((x[0] + x[2] + tile) / 2, top - 14, "three images of the batch")
    page.row(one[:3], x[0], top, tile, gap=26)
    for place in x[1:]:
        page.text(place - 13, y, "+", 13)
    end = x[2] + tile
    page.arrow((end + 12, y), (end + 60, y), GRAY)
    page.head(end + 120, top - 14, "one mix, M = 3", QUERY)
    page.image(mixed[0], end + 74, top, tile, QUERY)
    note = "every patch stays\nat its place; each mix\nbegins with another\nimage of the batch"
    page.text(end + tile + 92, y, note, ha="left")
    index, weight, near, triangle = patchmix.mix_targets(6, 3)
    side, y0 = 44, top + tile + 84
    tables = (
        (62, two, index, weight, "a mix finds its images", "other views of the images"),
        (432, other, near, triangle, "mixes find those that share images", "mixes of the other views"),
    )
    for x0, columns, where, share, head, across in tables:
        page.head(x0 + 3.5 * (side + 2), y0 - 58, head, size=9)
        page.text(x0 + 4 * (side + 2), y0 - 40, "is pulled toward: " + across, 7.5, color=KEY)
        page.text(x0 - 14, y0 + 3.5 * (side + 2), "query: the mixes", 7.5, color=QUERY, rotation=90)
        page.row(columns, x0 + side + 2, y0 - 26, side, KEY, gap=2)
        target = torch.zeros(6, 6).scatter_add_(1, where, share.expand(6, -1))
        for i in range(6):
            y = y0 + 22 + i * (side + 2)
            page.image(mixed[i], x0 - 2, y, side, QUERY)
            for j, value in enumerate(target[i].tolist()):
                x = x0 + (j + 1) * (side + 2)
                look = dict(color=KEY, alpha=0.75 * value) if value else dict(color=GRAY, alpha=0.06)
                page.axes.add_patch(Rectangle((x, y), side, side, lw=0, **look))
                page.text(x + side / 2, y + side / 2, ("", "1/3", "2/3", "1")[round(3 * value)], 8.5)
    return page


FIGURES = {"overview": overview, "jointcrop": joint, "jcl": joint_contrast}
FIGURES |= {"clim": mixture, "logo": local_global, "patchmix": patches}


def main(folder):
    photos = {path.stem: Image.open(path).convert("RGB") for path in ROOT.glob(".github/photos/*.jpg")}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw(photos).save(Path(folder) / f"{name}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make README's pictures")
    parser.add_argument("folder", nargs="?", default=ROOT / ".github", help="where they are written (default: .github)")
    main(parser.parse_args().folder)
