"""Makes the pages' pictures, by hand. Needs matplotlib.

    python tests/tools/figures.py explain [FOLDER]                 README's: what goes in, what is compared with what
    python tests/tools/figures.py corners [FOLDER] [--pairs N]     JointCrop, Fig. 7: how far apart the two crops are

The photographs are in .github/photos. Every view is declared and drawn by the method's own file with its ImageNet
recipe. Every mix, ratio, choice and weight is made by its own functions. Which draws are shown (the epochs below) was
chosen by eye, so that something can be recognised.
"""

import argparse
import functools
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyArrowPatch, Rectangle
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import clim  # noqa: E402
import common  # noqa: E402
import jcl  # noqa: E402
import logo  # noqa: E402
import moco_jointcrop  # noqa: E402
import patchmix  # noqa: E402

WIDTH = 760  # px, as README shows it; written 1.6 times as large
ASTRONAUT, CAT, COFFEE, SKY, RETINA, ROCKET, FLOWER, PALACE = range(8)
# Two crops each of three photographs, (top, left, side): they stand for six images, of which two are alike
ALIKE = {CAT: ((0, 0, 300), (70, 150, 230)), FLOWER: ((40, 110, 240), (0, 20, 320))}
ALIKE[PALACE] = (0, 10, 280), (60, 60, 260)
QUERY, KEY, APART, GRAY = "#0969da", "#1a7f37", "#cf222e", "#57606a"
PLAIN = "--jitter-p 0 --gray-p 0 "  # only the cuts, the blur and the flip are left of a view


# ------------------------------------------------------------ what is shown


def recipe(method, flags=""):
    return method.parse_args(["--dataset", "imagenet", *flags.split()])


def views(method, flags, images, index, epoch, positives=None):
    """What a method makes of the images of an index: [(n, 3, S, S) per view], and the views' boxes on the first image.

    positives: CLIM's table of positives.
    """
    args = recipe(method, flags)
    declared, how, index = [*method.augmentation(args).values()], {}, np.array(index)
    if method is moco_jointcrop:
        how = dict(draw=functools.partial(method.draw_views, args), extra_draws=method.SHARED_DRAWS)
    elif method is clim:  # an image's views, and its positive's
        declared *= 2
        how = dict(draw=functools.partial(method.draw_views, args, images, positives), extra_draws=1)
    data = common.ViewDataset(images, declared, 0, args.interpolation, **how)
    batch = data.__getitems__([(epoch, i) for i in index])
    draws = common.uniform(0, np.full(len(index), epoch), index, data.num_draws)
    cuts, _ = data.draw(index, images.sizes(index), draws)
    keys = (0, 1) if method is logo else range(1, len(cuts))
    boxes = [(box[0], KEY if v in keys else QUERY) for v, (_, box, _) in enumerate(cuts)]
    return common.color_views(batch, torch.device("cpu")), boxes


def pasted(view, mixed):
    """The box (top, left, height, width) in which two images (3, S, S) differ: what CutMix has pasted."""
    changed = torch.nonzero((view != mixed).any(0))
    first, last = changed.amin(0), changed.amax(0)
    return *first.tolist(), *(last - first + 1).tolist()


def clim_pair(photos, flags):
    """CLIM's pair, of six images of which two are always alike: [both images], views, the mix, the first's share in it.

    For an encoder, which finds the positive, stand 4 x 4 pixels, centered and L2-normalised.
    """
    crops = [common.cut(photos[i], (top, left, side, side), 256) for i in ALIKE for top, left, side in ALIKE[i]]
    images, anchor = common.ImageSet(np.stack(crops)), 2
    x = torch.from_numpy(np.stack([common.cut(image, (0, 0, 256, 256), 4) for image in crops])).flatten(1).float()
    x = F.normalize(x - x.mean(0), dim=1)
    centers, assignment = clim.kmeans(x, 3, generator=common.generator(0))
    table = clim.select_positives(x, centers, assignment, k=1, num_positives=1)
    seen, _ = views(clim, flags + "--resolutions 224", images, [anchor], 3, table)
    mixed, kept = clim.cutmix(seen[0], seen[2], 0.6, common.generator(2))
    return [crops[anchor], crops[table[anchor, 0]]], seen, mixed, kept


class Page:
    """A sheet of WIDTH x height pixels, the origin top left."""

    def __init__(self, height, name="", idea=""):
        self.figure, self.height = pyplot.Figure(figsize=(WIDTH / 100, height / 100), dpi=160), height
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
        """An image (3, S, S), or (H, W, 3) as it is in the middle of the square; boxes: [(box, color), ...] on it."""
        image = image.clamp(0, 1).permute(1, 2, 0).numpy() if torch.is_tensor(image) else image
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
    rows = ("what\ngoes in", top, "black"), ("the\nquery", middle, QUERY), ("is pulled\nto", low, KEY)
    for text, y, color in (*rows, ("is pushed\nfrom", last + 20 - tile / 2, APART)):
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
            page.text(x + n * (size + 3) + size / 2, low + size + 12, f"{100 * share:.0f} %", color=KEY)

    photo = [photos[ASTRONAUT]]
    (query, key), boxes = views(moco_jointcrop, PLAIN + "--joint none", photos, [ASTRONAUT], 12)
    column(x[0], "MoCo v2", "the baseline: one\nview finds another", photo, query, key, boxes)

    (query, key), boxes = views(moco_jointcrop, PLAIN, photos, [ASTRONAUT], 2)
    column(x[1], "JointCrop", "the areas' ratio\nis drawn first", photo, query, key, boxes)

    (query, *keys), boxes = views(jcl, PLAIN, photos, [ASTRONAUT], 3)
    idea, note = "all keys of an image,\nin closed form", "their mean and\nhow they differ"
    column(x[2], "JCL", idea, photo, query, torch.cat(keys), boxes, note=note)

    pair, (one, key, _, other), mixed, kept = clim_pair(photos, PLAIN)
    keys, boxes = torch.cat([key, other]), [(pasted(one[0], mixed[0]), QUERY)]
    idea = "a similar image,\nmixed in, is a positive"
    column(x[3], "CLIM", idea, pair, mixed, keys, pasted=boxes, shares=(kept, 1 - kept))

    crops, boxes = views(logo, PLAIN, photos, [ASTRONAUT], 3)
    globals_, locals_ = torch.cat(crops[:2]), torch.cat(crops[2:])
    idea, note = "local crops, pushed\napart by a network", "both global crops"
    column(x[4], "LoGo", idea, photo, locals_, globals_, boxes, note=note)
    page.arrow((x[4] + 22.25, middle + 18.75), (x[4] + 68.975, middle + 18.75), APART, True, -0.4)

    three = [ASTRONAUT, CAT, COFFEE]
    (view, other), _ = views(patchmix, PLAIN, photos, three, 1)
    mixed = patchmix.patch_mix(view, 3, 32, torch.randperm(49, generator=common.generator(0)))
    idea, shares = "patches of M images:\nfind each image again", patchmix.mix_targets(3, 3)[1]
    column(x[5], "PatchMix", idea, [photos[i] for i in three], mixed[:1], other, shares=shares)

    (_, others), _ = views(moco_jointcrop, PLAIN + "--joint none", photos, [ROCKET, RETINA, SKY, COFFEE, CAT], 2)
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
        for n, (text, color) in enumerate((("photograph", "black"), ("query", QUERY), ("is pulled to", KEY))):
            page.head(x + n * (tile + 4) + tile / 2, top - 16, text, color)
    page.head(705, top - 16, "how often")
    # Both views of JointBlur's pairs are of the whole photograph, so that they differ by their blur alone
    blur = "--joint blur --blur-p 1 1 --crop-scale 1 1 --flip-p 0"
    rows = (
        ("RandomCrop", "the baseline: crops\nof random areas", "--joint none", (12, 6)),
        ("JointCrop", "beta = 0:\nevery ratio", "--beta 0", (2, 7)),
        ("JointCrop", "beta = -4: mostly\nextreme ratios", "--beta -4", (4, 9)),
        ("JointBlur", "one clear, one blurred\n(their centers,\nenlarged)", blur, (8, 7)),
    )
    for row, (name, how, flags, epochs) in enumerate(rows):
        y, args, blurs = top + row * (tile + 20), recipe(moco_jointcrop, flags), name == "JointBlur"
        page.head(10, y + tile / 2 - 14, name, size=9, ha="left")
        page.text(10, y + tile / 2 + 16 + 5 * how.count("\n"), how, 7.2, color=GRAY, ha="left")
        for x, photo, epoch in zip(starts, (ASTRONAUT, COFFEE), epochs, strict=True):
            pair, boxes = views(moco_jointcrop, PLAIN + flags, photos, [photo], epoch)
            if blurs:
                pair = [view[:, :, 70:154, 70:154] for view in pair]
            else:
                page.image(photos[photo], x, y, tile, boxes=boxes)
            page.image(pair[0][0], x + tile + 4, y, tile, QUERY)
            page.image(pair[1][0], x + 2 * (tile + 4), y, tile, KEY)
        low, high = args.blur_sigma if blurs else args.crop_scale
        beta = None if args.joint == "none" else args.beta
        first, second = moco_jointcrop.sample_joint(200_000, low, high, beta, common.generator(0))
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
    for place, text, color in zip(x, ("photograph", "query", "is pulled to"), ("black", QUERY, KEY), strict=False):
        page.head(place + tile / 2, top - 16, text, color)
    for row, (name, how, keys) in enumerate((("MoCo v2", "one key", 1), ("JCL", "M' = 5 keys", 5))):
        y = top + row * (tile + 24)
        page.head(10, y + tile / 2 - 8, name, size=9, ha="left")
        page.text(10, y + tile / 2 + 10, how, 7.5, color=GRAY, ha="left")
        seen, boxes = views(jcl, f"--num-keys {keys}", photos, [CAT], 1)
        page.image(photos[CAT], x[0], y, tile, boxes=boxes)
        page.image(seen[0][0], x[1], y, tile, QUERY)
        page.row(torch.cat(seen[1:]), x[2], y, tile, KEY, gap=8)
    note = "one key is one sample of what augmentation\ncan make of the image ..."
    page.text(x[3], top + tile / 2, note, color=GRAY, ha="left")
    y = top + 2 * (tile + 24)
    note = "... JCL estimates all keys from five: the query is pulled to their mean,\n"
    note += "and the loss is higher where the keys differ along the query"
    page.text((x[2] + x[6] + tile) / 2, y - 2, note, color=KEY)
    page.head(10, y + 74, "both are\npushed from", APART, size=9, ha="left")
    (_, keys), _ = views(jcl, "--num-keys 1", photos, [ASTRONAUT, COFFEE, ROCKET, RETINA, SKY], 9)
    page.row(keys, x[0], y + 44, tile * 0.7, APART, gap=6)
    page.text(x[4] - 24, y + 74, "...  keys of the images before, in a queue", ha="left")
    return page


def mixture(photos):
    """CLIM: whom an image is mixed with, the mix, and what the mix is pulled to."""
    idea = "Other images are positives, too: neighbours nearer to their cluster's center, mixed in by CutMix"
    page, tile, top = Page(306, "CLIM", idea), 104, 92
    page.head(128, top - 20, "1. choose positives")
    plot = page.plot(14, top - 6, 228, 172)
    random = common.generator(5)
    places = torch.tensor([[0.0, 0.0], [2.6, 0.6], [1.1, 2.3]])
    points = places.repeat_interleave(60, 0) + 0.62 * torch.randn(180, 2, generator=random)
    centers, assignment = clim.kmeans(points, 3, generator=random)
    anchor = 7
    near = clim.nearest_neighbors(points, 16)[anchor]
    distance = (points - centers[assignment]).square().sum(1)
    count = ((distance <= distance[anchor]) & (assignment == assignment[anchor]))[near].sum().item()  # Eq. 2
    chosen = clim.select_positives(points, centers, assignment, 16, count)[anchor]
    for m, color in enumerate(("#9ec5f8", "#c9b8f0", "#f4c79a")):
        plot.scatter(*points[assignment == m].T, s=9, color=color)
    plot.scatter(*centers.T, marker="x", s=46, color="black", lw=1.6, label="center of a cluster")
    plot.scatter(*points[near].T, s=22, facecolors="none", edgecolors=GRAY, lw=0.9, label="neighbour of the image")
    plot.scatter(*points[chosen].T, s=22, color=KEY, label="its positives")
    plot.scatter(*points[anchor], s=80, marker="*", color=QUERY, zorder=3, label="the image")
    plot.axis("off")
    plot.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, 0.04), frameon=False, ncol=2, handletextpad=0.2)

    _, seen, mixed, kept = clim_pair(photos, "")
    x, y, side = (262, 374, 506, 638), top + 34, 76
    below, across = y + tile + 14, y + tile / 2
    page.head((x[0] + x[1] + tile) / 2, top - 20, "2. an image, and a positive")
    page.head(x[2] + tile / 2, top - 20, "3. mixed: the query", QUERY)
    page.head(x[3] + tile / 2, top - 20, "4. is pulled to", KEY)
    for place, view, text in ((x[0], seen[0], "the image"), (x[1], seen[2], "its positive")):
        page.image(view[0], place, y, tile)
        page.text(place + tile / 2, below, text, color=GRAY)
    note = "(here: both are of one photograph, and chosen\nfrom six images by 4 x 4 pixels of each)"
    page.text((x[0] + x[1] + tile) / 2, below + 20, note, 7, color=GRAY)
    page.image(mixed[0], x[2], y, tile, QUERY, boxes=[(pasted(seen[0][0], mixed[0]), QUERY)])
    page.text(x[2] + tile / 2, below, f"{100 * kept:.0f} % of the image", color=QUERY)
    page.arrow((x[1] + tile + 4, across), (x[2] - 4, across), GRAY)
    keys = (top - 6, seen[1], kept, "its own key"), (top + side + 22, seen[3], 1 - kept, "the positive's key")
    for y, key, share, text in keys:
        page.image(key[0], x[3] + 14, y, side, KEY)
        page.text(x[3] + 14 + side / 2, y + side + 12, f"{100 * share:.0f} %: {text}", color=KEY)
        page.arrow((x[2] + tile + 4, across), (x[3] + 10, y + side / 2), KEY)
    return page


def local_global(photos):
    """LoGo: which crops are pulled together, and which are pushed apart."""
    idea = "Large crops see the same things. Small ones may see different things, so they are pushed apart"
    page, top = Page(356, "LoGo", idea), 92
    seen, boxes = views(logo, "", photos, [ASTRONAUT], 3)
    photo, size, small = 230, 96, 74
    page.head(14 + photo / 2, top - 18, "photograph, four crops")
    page.image(photos[ASTRONAUT], 14, top, photo, boxes=boxes)
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
        (top + size / 2, "global to global:", "each is pulled to the\nother's key", KEY),
        (top + size + 32, "local to global:", "pulled to both; the\nglobals stay as they are", KEY),
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
    order = [ASTRONAUT, CAT, COFFEE, FLOWER, PALACE, ROCKET]
    (one, two), _ = views(patchmix, PLAIN, photos, order, 1)
    orders = [torch.randperm(49, generator=common.generator(n)) for n in (0, 1)]
    mixed, other = patchmix.patch_mix(one, 3, 32, orders[0]), patchmix.patch_mix(two, 3, 32, orders[1])
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
        page.text(x0 + 4 * (side + 2), y0 - 40, "is pulled to: " + across, 7.5, color=KEY)
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


def explain(folder):
    by_name = common.load_images("folder", str(ROOT / ".github" / "photos"))
    photos = by_name.subset(np.array([0, 1, 2, 3, 6, 7, 4, 5]))  # ASTRONAUT, CAT, ...
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw(photos).save(Path(folder) / f"{name}.png")


def corners(folder, pairs):
    """How far apart two crops' corners are on average, by beta: ours, with the released offset, and the paper's."""
    sys.path.append(str(Path(__file__).parents[1]))
    from test_moco_jointcrop import FIGURE7, RANDOM_CROP, mean_corner_distance  # needs pytest

    beta = [4 - i / 2 for i in range(len(FIGURE7))]
    ours, offset = ([mean_corner_distance(b, shift, pairs) for b in beta] for shift in (0.0, 0.1))
    random_crop = mean_corner_distance(None, 0.0, pairs)
    print("  beta    ours  offset 0.1   paper")
    for row in zip(beta, ours, offset, FIGURE7, strict=True):
        print("{:6.1f} {:7.2f} {:11.2f} {:7.2f}".format(*row))
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="tight")
    axes.plot(beta, ours, label="here: the paper's distribution")
    axes.plot(beta, offset, ls="--", label="here: --variant released, offset 0.1")
    axes.plot(beta, FIGURE7, "k.", markersize=9, label="read from the paper's Fig. 7")
    axes.axhline(random_crop, c="gray", ls=":", label=f"here: RandomCrop, {random_crop:.2f} (paper: {RANDOM_CROP})")
    axes.set(xlabel="beta of J-Crop(beta)", ylabel="mean distance of the top-left corners, px (image: 224 x 224)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(Path(folder) / "jointcrop_corners.png", dpi=100)


def main():
    parser = argparse.ArgumentParser("tests/tools/figures.py", description=__doc__.splitlines()[0])
    parser.add_argument("figure", choices=("explain", "corners"))
    parser.add_argument("folder", nargs="?", default=".github", metavar="FOLDER")
    parser.add_argument("--pairs", type=int, default=100_000, metavar="N", help="of crops, for each beta")
    args = parser.parse_args()
    explain(args.folder) if args.figure == "explain" else corners(args.folder, args.pairs)


if __name__ == "__main__":
    main()
