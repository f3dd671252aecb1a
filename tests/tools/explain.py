"""The figures that explain the methods, by the methods' own functions: python tests/tools/figures.py explain FOLDER.

They show what goes in, and what is compared with what. The photographs are in .github/photos. Every view is declared
and drawn by the method's own file with its ImageNet recipe. Every mix, ratio, choice and weight is made by its own
functions. Which draws are shown (the epochs below) was chosen by eye, so that something can be recognised.
"""

import functools
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

import clim
import common
import jcl
import logo
import moco_jointcrop
import patchmix

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle

ROOT = Path(__file__).parents[2]
WIDTH = 760  # px, as README shows it; written 1.6 times as large
ASTRONAUT, CAT, COFFEE, SKY, RETINA, ROCKET, FLOWER, PALACE = range(8)
ALIKE = {  # two crops each of three photographs, (top, left, side): they stand for six images, of which two are alike
    CAT: ((0, 0, 300), (70, 150, 230)),
    FLOWER: ((40, 110, 240), (0, 20, 320)),
    PALACE: ((0, 10, 280), (60, 60, 260)),
}
LOGO_EPOCH = 3
QUERY, KEY, APART, GRAY = "#0969da", "#1a7f37", "#cf222e", "#57606a"


# ------------------------------------------------------------ what is shown


def arguments(method, *flags, colors=True):
    """A method's ImageNet recipe; without colors only the cuts, the blur and the flip are left of a view."""
    plain = () if colors else ("--jitter-p", "0", "--gray-p", "0")
    return method.parse_args(["--dataset", "imagenet", *flags, *plain])


def views(method, args, images, index, epoch, positives=None):
    """[each view of the images of an index (n, 3, S, S)] and [(whose image (n,), its box (n, 4)), ...].

    positives: CLIM's table of positives.
    """
    declared, how = [*method.augmentation(args).values()], {}
    if method is moco_jointcrop:
        how = dict(draw=functools.partial(method.draw_views, args), extra_draws=method.SHARED_DRAWS)
    elif method is clim:  # an image's views, and its positive's
        declared *= 2
        how = dict(draw=functools.partial(method.draw_views, args, images, positives), extra_draws=1)
    data, index = common.ViewDataset(images, declared, 0, args.interpolation, **how), np.array(index)
    batch = data.__getitems__([(epoch, i) for i in index])
    draws = common.uniform(0, np.full(len(index), epoch), index, data.num_draws)
    cuts, _ = data.draw(index, images.sizes(index), draws)
    return common.color_views(batch, torch.device("cpu")), [(rows, boxes) for rows, boxes, _ in cuts]


def marked(cuts, keys):
    """Boxes for `Page.image`: those of the first image in all views, of which `keys` are keys."""
    return [(boxes[0], KEY if v in keys else QUERY) for v, (_, boxes) in enumerate(cuts)]


def pasted(view, mixed):
    """The box (top, left, height, width) in which two images (3, S, S) differ: what CutMix has pasted."""
    rows, columns = torch.nonzero((view != mixed).any(0)).unbind(1)
    top, left = rows.min().item(), columns.min().item()
    return top, left, rows.max().item() - top + 1, columns.max().item() - left + 1


def clim_pair(photos, colors=True):
    """CLIM's pair, of six images of which two are always alike: [both images], views, the mix, the first's share in it.

    For an encoder, which finds the positive, stand 4 x 4 pixels, centered and L2-normalised.
    """
    crops = [common.cut(photos[i], (top, left, side, side), 256) for i in ALIKE for top, left, side in ALIKE[i]]
    images, anchor = common.ImageSet(np.stack(crops)), 2
    pixels = [common.cut(image, (0, 0, 256, 256), 4).reshape(-1) for image in crops]
    x = torch.tensor(np.array(pixels)).float()
    x = F.normalize(x - x.mean(0), dim=1)
    centers, assignment = clim.kmeans(x, 3, generator=common.generator(0))
    table = clim.select_positives(x, centers, assignment, k=1, num_positives=1)
    seen, _ = views(clim, arguments(clim, "--resolutions", "224", colors=colors), images, [anchor], 3, table)
    mixed, kept = clim.cutmix(seen[0], seen[2], 0.6, common.generator(2))
    return [crops[anchor], crops[table[anchor, 0]]], seen, mixed, kept


# ------------------------------------------------------------------ drawing


class Page:
    """A sheet of WIDTH x height pixels, the origin top left."""

    def __init__(self, height, name="", idea=""):
        self.figure = pyplot.figure(figsize=(WIDTH / 100, height / 100), dpi=160)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        self.height = height
        self.head(12, 18, name, size=11, ha="left")
        self.text(12, 38, idea, 8.5, color=GRAY, ha="left")

    def text(self, x, y, text, size=8, **options):
        options = dict(ha="center", va="center", linespacing=1.25) | options
        if options["va"] == "center" and "\n" not in text and "rotation" not in options:  # one line for all of a row
            y, options["va"] = y + size / 2, "baseline"
        self.axes.text(x, y, text, fontsize=size, **options)

    def head(self, x, y, text, color="black", size=8.5, **options):
        self.text(x, y, text, size, color=color, weight="bold", **options)

    def image(self, image, x, y, size, frame=None, boxes=(), thick=2.2):
        """An image (3, S, S), or (H, W, 3) as it is in the middle of the square; boxes: [(box, color), ...] on it."""
        image = image.clamp(0, 1).permute(1, 2, 0).numpy() if torch.is_tensor(image) else image
        height, width = image.shape[:2]
        scale = size / max(height, width)
        left, top = x + (size - width * scale) / 2, y + (size - height * scale) / 2
        right, bottom = left + width * scale, top + height * scale
        self.axes.imshow(image, extent=(left, right, bottom, top), interpolation="antialiased", zorder=1, aspect="auto")
        for box, color in boxes:
            y, x, high, wide = (v * scale for v in box)
            for edge, lw in (("white", 2.6), (color, 1.6)):
                rectangle = Rectangle((left + x, top + y), wide, high, fill=False, ec=edge, lw=lw, zorder=2)
                self.axes.add_patch(rectangle)
        if frame:
            place = (left, top), right - left, bottom - top
            self.axes.add_patch(Rectangle(*place, fill=False, ec=frame, lw=thick, zorder=2))

    def arrow(self, start, end, color, both=False, bend=0.0):
        style = "<|-|>" if both else "-|>"
        options = dict(connectionstyle=f"arc3,rad={bend}", mutation_scale=10, lw=1.6, shrinkA=0, shrinkB=0, zorder=3)
        self.axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, color=color, **options))

    def plot(self, x, y, width, height, **options):
        """Axes of their own for a small plot."""
        place = (x / WIDTH, 1 - (y + height) / self.height, width / WIDTH, height / self.height)
        axes = self.figure.add_axes(place, **options)
        axes.tick_params(labelsize=6.5, length=2, pad=2)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        return axes

    def save(self, path):
        """With 256 colors, a third of the size."""
        self.figure.canvas.draw()
        Image.fromarray(np.asarray(self.figure.canvas.buffer_rgba())[..., :3]).quantize(256).save(path, optimize=True)
        pyplot.close(self.figure)
        print(f"{path}: {Path(path).stat().st_size / 1024:.0f} KB")


# ---------------------------------------------------------------- the figures


def overview(photos, path):
    """All five ideas beside their baseline."""
    page, left, step, tile = Page(448), 92, 111.5, 92
    half, third = (tile - 3) / 2, (tile - 6) / 3
    top, middle, low, last = 66, 170, 280, 394
    ideas = {
        "MoCo v2": "the baseline: one\nview finds another",
        "JointCrop": "the areas' ratio\nis drawn first",
        "JCL": "all keys of an image,\nin closed form",
        "CLIM": "a similar image,\nmixed in, is a positive",
        "LoGo": "local crops, pushed\napart by a network",
        "PatchMix": "patches of M images:\nfind each image again",
    }
    rows = {"what\ngoes in": (top, "black"), "the\nquery": (middle, QUERY), "is pulled\nto": (low, KEY)}
    rows["is pushed\nfrom"] = last + 20 - tile / 2, APART
    for text, (y, color) in rows.items():
        page.head(10, y + tile / 2, text, color, size=9, ha="left")
    x = [left + step * i for i in range(6)]
    for place, (name, idea) in zip(x, ideas.items(), strict=True):
        page.head(place + tile / 2, 14, name, size=10)
        page.text(place + tile / 2, 40, idea, 7.2, color=GRAY)
        page.arrow((place + tile / 2, middle + tile + 3), (place + tile / 2, low - 3), KEY)

    def small(image, place, n, y, color=None, size=half):
        page.image(image, place + n * (size + 3), y, size, color, thick=1.5)

    def under(text, place, n, y, size=half, color=KEY):
        page.text(place + n * (size + 3) + size / 2, y, text, 8, color=color)

    for place, flags, epoch in ((x[0], ("--joint", "none"), 12), (x[1], (), 2)):
        args = arguments(moco_jointcrop, *flags, colors=False)
        (q, k), cuts = views(moco_jointcrop, args, photos, [ASTRONAUT], epoch)
        page.image(photos[ASTRONAUT], place, top, tile, boxes=marked(cuts, (1,)))
        page.image(q[0], place, middle, tile, QUERY)
        page.image(k[0], place, low, tile, KEY)

    seen, cuts = views(jcl, arguments(jcl, colors=False), photos, [ASTRONAUT], 3)
    page.image(photos[ASTRONAUT], x[2], top, tile, boxes=marked(cuts, range(1, 6)))
    page.image(seen[0][0], x[2], middle, tile, QUERY)
    for n, key in enumerate(seen[1:]):
        small(key[0], x[2] + n // 3 * (third + 3) / 2, n % 3, low + n // 3 * (third + 3), KEY, third)
    page.text(x[2] + tile / 2, low + 2 * third + 20, "their mean and\nhow they differ", 7.2, color=KEY)

    pair, seen, mixed, kept = clim_pair(photos, colors=False)
    for n, image in enumerate(pair):
        small(image, x[3], n, top + (tile - half) / 2)
    page.image(mixed[0], x[3], middle, tile, QUERY, boxes=[(pasted(seen[0][0], mixed[0]), QUERY)])
    for n, share in enumerate((kept, 1 - kept)):
        small(seen[1 + 2 * n][0], x[3], n, low, KEY)
        under(f"{100 * share:.0f} %", x[3], n, low + half + 12)

    seen, cuts = views(logo, arguments(logo, colors=False), photos, [ASTRONAUT], LOGO_EPOCH)
    page.image(photos[ASTRONAUT], x[4], top, tile, boxes=marked(cuts, (0, 1)))
    for n in (0, 1):
        small(seen[2 + n][0], x[4], n, middle + (tile - half) / 2, QUERY)
        small(seen[n][0], x[4], n, low, KEY)
    y = middle + (tile - half) / 2 - 5
    page.arrow((x[4] + half * 0.5, y), (x[4] + half * 1.55, y), APART, True, -0.4)
    page.text(x[4] + tile / 2, low + half + 12, "both global crops", 7.2, color=KEY)

    three = [ASTRONAUT, CAT, COFFEE]
    (view, other), _ = views(patchmix, arguments(patchmix, colors=False), photos, three, 1)
    mixed = patchmix.patch_mix(view, 3, 32, torch.randperm(49, generator=common.generator(0)))
    page.image(mixed[0], x[5], middle, tile, QUERY)
    for n, share in enumerate(patchmix.mix_targets(3, 3)[1]):
        small(photos[three[n]], x[5], n, top + (tile - third) / 2, None, third)
        small(other[n], x[5], n, low, KEY, third)
        under(f"{100 * share:.0f} %", x[5], n, low + third + 12, third)

    args = arguments(moco_jointcrop, "--joint", "none", colors=False)
    (_, others), _ = views(moco_jointcrop, args, photos, [ROCKET, RETINA, SKY, COFFEE, CAT], 2)
    for n, image in enumerate(others):
        small(image, left, n, last, APART, 40)
    text = "...  keys of other images: a queue of\nearlier ones, in PatchMix the batch"
    page.text(left + 5 * 43 + 8, last + 20, text, 8, ha="left")
    page.text(x[4] + tile / 2, last + 20, "also: a local crop\nfrom the other", 8)
    page.save(path)


def joint(photos, path):
    """JointCrop and JointBlur: pairs of views, and the distribution of their ratio."""
    idea = "Two random crops mostly have similar areas, and match easily: draw the ratio of areas first"
    page, tile, top = Page(500, "JointCrop and JointBlur", idea), 82, 88
    x = [108 + n * (tile + 4) for n in range(3)]
    for x0 in (x, [v + 3 * tile + 20 for v in x]):
        for place, text, color in zip(x0, ("photograph", "query", "is pulled to"), ("black", QUERY, KEY), strict=True):
            page.head(place + tile / 2, top - 16, text, color)
    page.head(705, top - 16, "how often")
    # Both views of JointBlur's pairs are of the whole photograph, so that they differ by their blur alone
    blur = ("--joint", "blur", "--blur-p", "1", "1", "--crop-scale", "1", "1", "--flip-p", "0")
    rows = (
        ("RandomCrop", "the baseline: crops\nof random areas", ("--joint", "none"), (12, 6)),
        ("JointCrop", "beta = 0:\nevery ratio", ("--beta", "0"), (2, 7)),
        ("JointCrop", "beta = -4: mostly\nextreme ratios", ("--beta", "-4"), (4, 9)),
        ("JointBlur", "one clear, one blurred\n(their centers,\nenlarged)", blur, (8, 7)),
    )
    for row, (name, how, flags, epochs) in enumerate(rows):
        y, args = top + row * (tile + 20), arguments(moco_jointcrop, *flags, colors=False)
        page.head(10, y + tile / 2 - 14, name, size=9, ha="left")
        page.text(10, y + tile / 2 + 16 + 5 * how.count("\n"), how, 7.2, color=GRAY, ha="left")
        for n, (photo, epoch) in enumerate(zip((ASTRONAUT, COFFEE), epochs, strict=True)):
            (q, k), cuts = views(moco_jointcrop, args, photos, [photo], epoch)
            shift = n * (3 * tile + 20)
            if args.joint == "blur":
                q, k = (v[:, :, 70:154, 70:154] for v in (q, k))
            else:
                page.image(photos[photo], x[0] + shift, y, tile, boxes=marked(cuts, (1,)))
            page.image(q[0], x[1] + shift, y, tile, QUERY)
            page.image(k[0], x[2] + shift, y, tile, KEY)
        beta = None if args.joint == "none" else args.beta
        low, high = args.blur_sigma if args.joint == "blur" else args.crop_scale
        first, second = moco_jointcrop.sample_joint(200_000, low, high, beta, common.generator(0))
        plot, widest = page.plot(662, y + 4, 86, tile - 16), high / low
        plot.hist((second / first).log().numpy(), 40, color=GRAY)
        plot.set_xticks(np.log([1 / widest, 1, widest]), [f"1/{widest:.0f}", "1", f"{widest:.0f}"])
        plot.set_yticks([])
        plot.spines["left"].set_visible(False)
        words = "ratio of the blurs" if args.joint == "blur" else "ratio of the areas"
        plot.text(0.5, -0.32, words, fontsize=6.5, ha="center", transform=plot.transAxes)
    page.save(path)


def joint_contrast(photos, path):
    """JCL: one key an image against M' keys, and what their agreement is worth."""
    idea = "A query is not compared with one key of its image, but with all that augmentation could make"
    page, tile, top = Page(420, "JCL", idea), 84, 88
    x = [112 + n * (tile + 8) for n in range(7)]
    heads = ("photograph", "black"), ("query", QUERY), ("is pulled to", KEY)
    for place, (text, color) in zip(x, heads, strict=False):
        page.head(place + tile / 2, top - 16, text, color)
    for row, (name, how, keys) in enumerate((("MoCo v2", "one key", 1), ("JCL", "M' = 5 keys", 5))):
        y, args = top + row * (tile + 24), arguments(jcl, "--num-keys", str(keys))
        page.head(10, y + tile / 2 - 8, name, size=9, ha="left")
        page.text(10, y + tile / 2 + 10, how, 7.5, color=GRAY, ha="left")
        seen, cuts = views(jcl, args, photos, [CAT], 1)
        page.image(photos[CAT], x[0], y, tile, boxes=marked(cuts, range(1, 6)))
        for n, view in enumerate(seen):
            page.image(view[0], x[1 + n], y, tile, KEY if n else QUERY)
    note = "one key is one sample of what augmentation\ncan make of the image ..."
    page.text(x[3], top + tile / 2, note, 8, color=GRAY, ha="left")
    y = top + 2 * (tile + 24)
    note = "... JCL estimates all keys from five: the query is pulled to their mean,\n"
    note += "and the loss is higher where the keys differ along the query"
    page.text((x[2] + x[6] + tile) / 2, y - 2, note, 8, color=KEY)
    page.head(10, y + 74, "both are\npushed from", APART, size=9, ha="left")
    (_, keys), _ = views(jcl, arguments(jcl, "--num-keys", "1"), photos, [ASTRONAUT, COFFEE, ROCKET, RETINA, SKY], 9)
    for n, view in enumerate(keys):
        page.image(view, x[0] + n * (tile * 0.7 + 6), y + 44, tile * 0.7, APART)
    page.text(x[4] - 24, y + 74, "...  keys of the images before, in a queue", 8, ha="left")
    page.save(path)


def mixture(photos, path):
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
    _, seen, mixed, kept = clim_pair(photos)
    x = 262, 374, 506, 638
    page.head((x[0] + x[1] + tile) / 2, top - 20, "2. an image, and a positive")
    page.head(x[2] + tile / 2, top - 20, "3. mixed: the query", QUERY)
    page.head(x[3] + tile / 2, top - 20, "4. is pulled to", KEY)
    for n, text in enumerate(("the image", "its positive")):
        page.image(seen[2 * n][0], x[n], top + 34, tile)
        page.text(x[n] + tile / 2, top + 34 + tile + 14, text, 8, color=GRAY)
    note = "(here: both are of one photograph, and chosen\nfrom six images by 4 x 4 pixels of each)"
    page.text((x[0] + x[1] + tile) / 2, top + 34 + tile + 34, note, 7, color=GRAY)
    page.image(mixed[0], x[2], top + 34, tile, QUERY, boxes=[(pasted(seen[0][0], mixed[0]), QUERY)])
    page.text(x[2] + tile / 2, top + 34 + tile + 14, f"{100 * kept:.0f} % of the image", 8, color=QUERY)
    page.arrow((x[1] + tile + 4, top + 34 + tile / 2), (x[2] - 4, top + 34 + tile / 2), GRAY)
    side = 76
    for n, (share, text) in enumerate(((kept, "its own key"), (1 - kept, "the positive's key"))):
        y = top - 6 + n * (side + 28)
        page.image(seen[1 + 2 * n][0], x[3] + 14, y, side, KEY)
        page.text(x[3] + 14 + side / 2, y + side + 12, f"{100 * share:.0f} %: {text}", 8, color=KEY)
        page.arrow((x[2] + tile + 4, top + 34 + tile / 2), (x[3] + 10, y + side / 2), KEY)
    page.save(path)


def local_global(photos, path):
    """LoGo: which crops are pulled together, and which are pushed apart."""
    idea = "Large crops see the same things. Small ones may see different things, so they are pushed apart"
    page, top = Page(356, "LoGo", idea), 92
    seen, cuts = views(logo, arguments(logo), photos, [ASTRONAUT], LOGO_EPOCH)
    photo, size, small = 230, 96, 74
    page.head(14 + photo / 2, top - 18, "photograph, four crops")
    page.image(photos[ASTRONAUT], 14, top, photo, boxes=marked(cuts, (0, 1)))
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
        page.text(576, place, text, 8, ha="left", va="top")
    page.save(path)


def patches(photos, path):
    """PatchMix: the mix, and the shares that it is to find."""
    idea = "Patches of M images make one mix. A ViT learns to find each image again, with its share"
    page, top, tile = Page(566, "PatchMix", idea), 84, 92
    order = [ASTRONAUT, CAT, COFFEE, FLOWER, PALACE, ROCKET]
    (one, two), _ = views(patchmix, arguments(patchmix, colors=False), photos, order, 1)
    permutations = [torch.randperm(49, generator=common.generator(n)) for n in (0, 1)]
    mixed, other = (patchmix.patch_mix(v, 3, 32, p) for v, p in zip((one, two), permutations, strict=True))
    x = [60 + n * (tile + 26) for n in range(3)]
    page.head((x[0] + x[2] + tile) / 2, top - 14, "three images of the batch")
    for n in range(3):
        page.image(one[n], x[n], top, tile)
        if n:
            page.text(x[n] - 13, top + tile / 2, "+", 13)
    page.arrow((x[2] + tile + 12, top + tile / 2), (x[2] + tile + 60, top + tile / 2), GRAY)
    page.head(x[2] + tile + 120, top - 14, "one mix, M = 3", QUERY)
    page.image(mixed[0], x[2] + tile + 74, top, tile, QUERY)
    note = "every patch stays\nat its place; each mix\nbegins with another\nimage of the batch"
    page.text(x[2] + 2 * tile + 92, top + tile / 2, note, 8, ha="left")
    index, weight, near, triangle = patchmix.mix_targets(6, 3)
    side, y0 = 44, top + tile + 84
    tables = (
        (62, two, index, weight, "a mix finds its images", "other views of the images"),
        (432, other, near, triangle, "mixes find those that share images", "mixes of the other views"),
    )
    for x0, columns, where, share, head, across in tables:
        page.head(x0 + 3.5 * (side + 2), y0 - 58, head, size=9)
        page.text(x0 + 4 * (side + 2), y0 - 40, "is pulled to: " + across, 7.5, color=KEY)
        page.text(x0 - 14, y0 + 3.5 * (side + 2), "query: the mixes", 7.5, color=QUERY, rotation=90, va="center")
        target = torch.zeros(6, 6).scatter_add_(1, where, share.expand(6, -1))
        for i in range(6):
            y = y0 + 22 + i * (side + 2)
            page.image(columns[i], x0 + (i + 1) * (side + 2), y0 - 26, side, KEY, thick=1.5)
            page.image(mixed[i], x0 - 2, y, side, QUERY, thick=1.5)
            for j, value in enumerate(target[i].tolist()):
                x = x0 + (j + 1) * (side + 2)
                look = dict(color=KEY, alpha=0.75 * value) if value else dict(color=GRAY, alpha=0.06)
                page.axes.add_patch(Rectangle((x, y), side, side, lw=0, **look))
                page.text(x + side / 2, y + side / 2, ("", "1/3", "2/3", "1")[round(3 * value)], 8.5)
    page.save(path)


FIGURES = dict(overview=overview, jointcrop=joint, jcl=joint_contrast)
FIGURES |= dict(clim=mixture, logo=local_global, patchmix=patches)


def explain(folder):
    by_name = common.load_images("folder", str(ROOT / ".github" / "photos"))
    photos = by_name.subset(np.array([0, 1, 2, 3, 6, 7, 4, 5]))  # ASTRONAUT, CAT, ...
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw(photos, Path(folder) / f"{name}.png")
