"""What once went wrong in silence, or lost steps: each in its shortest form."""

import collections
import copy
import errno
import importlib
import itertools
import runpy

import numpy as np
import pytest
import timm
import tiny
import torch
from conftest import METHODS
from tiny import load, refused, run
from torch import nn

import common
import eval_linear

_tiny = tiny._tiny
pytestmark = pytest.mark.usefixtures("_tiny")
CLIM = "--clim-start 0 --num-clusters 4 --knn-k 8".split()


class Own(torch.utils.data.Dataset):
    """Images of noise with labels. broken: {index: how often it cannot be read}."""

    def __init__(self, labels, broken=()):
        self.labels, self.broken = labels, dict(broken)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        if self.broken.get(i, 0) > 0:
            self.broken[i] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return np.random.default_rng(i).integers(0, 256, (16, 16, 3), np.uint8), self.labels[i]


# ------------------------------------------------------------------ going on


def test_clim_without_selection_leaves_the_positives_of_another_run(tmp_path):
    run("clim", tmp_path / "a", *CLIM)
    assert load(tmp_path / "a" / "last.pt")["positives"].min() >= 0
    run("clim", tmp_path / "b", "--selection", "none", "--resume", tmp_path / "a" / "last.pt")
    assert load(tmp_path / "b" / "last.pt")["positives"].max() == -1


def test_logos_affinity_decays_as_this_runs_flags_say(tmp_path):
    run("logo", tmp_path / "a", "--max-steps", 2)
    run("logo", tmp_path / "b", "--max-steps", 3, "--weight-decay", 0.1, "--resume", tmp_path / "a")  # a folder, too
    state = load(tmp_path / "b" / "last.pt")
    groups = state["optimizer"]["param_groups"] + state["affinity_optimizer"]["param_groups"]
    assert state["step"] == 3 and {group["weight_decay"] for group in groups} == {0.1}


def test_resume_is_taken_where_out_has_a_run_without_a_step(tmp_path, monkeypatch):
    run("jcl", tmp_path / "a", "--max-steps", 2)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(common, "signals_noted", lambda: 1 / 0)  # after the first save
        run("jcl", tmp_path / "b")
    assert load(tmp_path / "b" / "last.pt")["step"] == 0
    said = run("jcl", tmp_path / "b", "--max-steps", 3, "--resume", tmp_path / "a" / "last.pt")
    assert "going on from" in said and "at step 2" in said and load(tmp_path / "b" / "last.pt")["step"] == 3


def test_only_a_runs_own_unfinished_files_are_removed(tmp_path, capsys):
    (tmp_path / "thesis.2026.tmp").write_text("mine")
    assert "is not empty" in refused(capsys, run, "jcl", tmp_path)
    run("jcl", tmp_path / "run", "--max-steps", 1)
    names = "last.pt.7.tmp", "epoch-0002.pt.7.tmp", "metrics.jsonl.7.tmp", "thesis.2026.tmp"
    for name in names:
        (tmp_path / "run" / name).write_text("half")
    run("jcl", tmp_path / "run", "--max-steps", 2)
    assert [(tmp_path / "run" / name).exists() for name in names] == [False, False, False, True]


@pytest.mark.parametrize("method", METHODS)
def test_an_own_datasets_disk_is_asked_again_and_its_steps_are_saved(method, tmp_path, monkeypatch):
    monkeypatch.setattr(common.time, "sleep", lambda _: None)
    data = Own([0] * 68, broken={5: 2})
    run(method, tmp_path / "a", "--epochs", 1, train=data)
    assert load(tmp_path / "a" / "last.pt")["step"] == 4 and data.broken == {5: 0}
    order = iter(common.EpochSampler(68, 16, seed=0))
    third = list(order)[2][0][1]
    with pytest.raises(common.BadImage, match=f"image {third} of your training data set: .*Input/output"):
        run(method, tmp_path / "b", "--epochs", 1, train=Own([0] * 68, broken={third: 99}))
    assert load(tmp_path / "b" / "last.pt")["step"] == 2


def test_steps_are_saved_if_the_loader_fails(tmp_path, monkeypatch):
    """As it does if a worker was killed."""

    def batches(self):
        yield from itertools.islice(original(self), 2)
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.\nmore")

    original = common.DataLoader.__iter__
    monkeypatch.setattr(common.DataLoader, "__iter__", batches)
    with pytest.raises(common.BadImage, match="pid 7.* is killed.*fewer --workers"):
        run("jcl", tmp_path, "--knn-every", 0)
    assert load(tmp_path / "last.pt")["step"] == 2


def test_a_folder_for_sockets_that_is_too_long(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/" + 80 * "x")
    assert "TMPDIR" in refused(capsys, run, "jcl", tmp_path, "--workers", 1)


def test_an_error_of_ones_own_views_is_its_own(tmp_path, monkeypatch):
    def draw(*_):
        raise RuntimeError("mine")

    monkeypatch.setattr(common.ViewDataset, "draw_independently", draw)
    with pytest.raises(RuntimeError, match="^mine$"):
        run("jcl", tmp_path)


def leave(method, out, rank):
    """One of two processes cannot use an image."""
    broken = {i: 99 for i in range(68)} if rank == 1 else {}
    module = importlib.import_module(method)
    args = module.parse_args([*tiny.FLAGS, "--out", out])
    common.start(lambda args: module.main(args, train=Own([0] * 68, broken)), lambda: args)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_leaves_ends_the_others_without_a_traceback(method, tmp_path):
    ends = tiny.processes(tmp_path / "log", leave, [(method, str(tmp_path / "run"), rank) for rank in range(2)])
    assert [status for status, _, _ in ends] == [75, 2]
    assert not any("Traceback" in error for _, _, error in ends) and "Input/output" in ends[1][2]


# ------------------------------------------------------------ what is trained


@pytest.mark.parametrize("method", METHODS)
def test_an_own_encoder_in_evaluation_mode_is_trained_in_training_mode(method, tmp_path):
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    run(method, tmp_path, "--max-steps", 2, train=Own([0] * 68), encoder=encoder.eval())
    trained = load(tmp_path / "backbone.pt")["state_dict"]
    assert not encoder.training and not torch.equal(trained["1.running_mean"], encoder[1].running_mean)


def test_lars_adapts_without_weight_decay_too():
    module = importlib.import_module("moco_jointcrop")
    model = nn.Linear(4, 3)
    rates = []
    for decay in ("0", "1e-30"):
        copied = copy.deepcopy(model)
        args = module.parse_args(["--moco", "v3", "--weight-decay", decay])
        optimizer = module.make_optimizer(args, copied)
        copied(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        rates.append(copied.weight.detach() - model.weight.detach())
    torch.testing.assert_close(*rates)


@pytest.mark.parametrize(
    "command, decay", [("moco_jointcrop --moco v3", 1e-6), ("patchmix --weight-decay 0.3 0.3", 0.3)]
)
def test_biases_and_norms_do_not_decay_in_a_step(command, decay, tmp_path):
    method, *flags = command.split()
    run(method, tmp_path, *flags, "--max-steps", 2)
    groups = load(tmp_path / "last.pt")["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == pytest.approx([0, decay])


def test_a_tag_of_timms_name_changes_nothing():
    with_tag, without = (common.backbone_info(name, 32, 4) for name in ("resnet18.a1_in1k", "resnet18"))
    assert with_tag == without and without["stem"] == "3x3"


@pytest.mark.parametrize("method", METHODS)
def test_own_is_no_encoder_of_the_command_line(method, capsys):
    assert "unknown --arch own" in refused(capsys, importlib.import_module(method).parse_args, ["--arch", "own"])


@pytest.mark.parametrize("method", METHODS)
def test_each_process_has_two_images(method, capsys, monkeypatch):
    for name, value in dict(RANK="0", WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    assert "4 processes" in refused(capsys, importlib.import_module(method).parse_args, ["--batch-size", "4"])


# ------------------------------------------------------------- what is judged


def judged_as(tmp_path, state, arch="vit_micro", prefix=None):
    """Return the encoder that is read from a file of others with this state."""
    torch.save(state, tmp_path / "file.pt")
    encoder, info = common.load_published(tmp_path / "file.pt", arch, 32, 8, prefix=prefix)
    return encoder, info["encoder"]


@pytest.fixture(scope="module")
def weights():
    return common.build_backbone(common.backbone_info("vit_micro", 32, 8)).state_dict()


@pytest.mark.parametrize("names", ["student teacher_ema", "model optimizer", "encoder_k encoder_q", "a.0 b"])
def test_which_of_two_encoders_is_taken(tmp_path, weights, names):
    """The teacher; the one that is trained; else the first."""
    wanted = {"student": "teacher_ema", "model": "model", "encoder_k": "encoder_q", "a.0": "a.0"}[names.split()[0]]
    assert judged_as(tmp_path, dict.fromkeys(names.split(), weights))[1] == wanted


def test_norm_acts_on_an_own_encoder_without_a_run():
    knn = importlib.import_module("eval_knn")
    _, _, info = common.open_encoder(knn.parse_args(["--norm", "cifar10", "--device", "cpu"]), nn.Flatten())
    assert info["mean"] == common.NORMS["cifar10"][0]


@pytest.mark.parametrize("other", ["model_ema", "key_encoder", "optimizer.exp_avg", "grads", "init_state_dict"])
def test_the_encoder_is_taken_before_its_copies(tmp_path, weights, other):
    state = {other: {name: torch.zeros_like(x) for name, x in weights.items()}, "student": weights}
    encoder, name = judged_as(tmp_path, state)
    assert name == "student" and torch.equal(encoder.cls_token, weights["cls_token"])


@pytest.mark.parametrize("extra", ["attn_pool.latent", "rope.freqs", "global_pool.p", "final_conv.conv.weight"])
def test_parts_that_change_the_features_have_to_be_used(tmp_path, weights, extra, capsys):
    line = refused(capsys, judged_as, tmp_path, weights | {extra: torch.ones(3)})
    assert "no place for 1 tensors" in line and extra in line


def test_arrays_are_weights_and_weights_are_finite(tmp_path, weights, capsys):
    encoder, _ = judged_as(tmp_path, {"model": {name: x.numpy() for name, x in weights.items()}})
    assert tiny.unequal(dict(encoder.state_dict()), dict(weights)) == []
    odd = dict(weights, cls_token=weights["cls_token"] * np.nan)
    assert "not finite" in refused(capsys, judged_as, tmp_path, odd)


class Attributes(dict):
    """As in EasyDict, and its like."""


def test_the_line_that_makes_a_plain_file_keeps_what_lies_in_other_containers(tmp_path, weights, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"checkpoint": Attributes(model=weights), "log": collections.defaultdict(list, loss=[1.0])}
    line = refused(capsys, judged_as, tmp_path, state)
    (tmp_path / "line.py").write_text(line.split("imported: ")[1])
    runpy.run_path("line.py")
    encoder, _ = common.load_published("plain.pt", "vit_micro", 32, 8)
    assert tiny.unequal(dict(encoder.state_dict()), dict(weights)) == []


@pytest.mark.parametrize("labels, tested", [([1] * 40, [0, 1] * 10), ([0, 1] * 20, [7, 8] * 10)])
@pytest.mark.parametrize("script", ["eval_knn", "eval_linear"])
def test_labels_are_of_two_classes_and_of_those_that_were_trained(script, labels, tested, capsys):
    module = importlib.import_module(script)
    args = module.parse_args(["--no-floors", "--device", "cpu"])
    own = dict(encoder=nn.Sequential(nn.AvgPool2d(8), nn.Flatten()), train=Own(labels), test=Own(tested))
    assert "labels of two classes" in refused(capsys, module.main, args, **own)


def test_label_files_have_two_classes(tmp_path, capsys):
    images = common.ImageSet("own", [0, 0, 1], ["a", "b"], paths=np.array([b"0.png", b"1.png", b"2.png"]))
    (tmp_path / "list").write_text("0.png\n1.png\n")
    args = eval_linear.parse_args(["RUN", "--label-files", str(tmp_path / "list")])
    assert "fewer than two classes" in refused(capsys, eval_linear.choose_labels, args, images)


def test_all_labels_are_all_also_of_unequal_classes():
    images = common.ImageSet("own", [0] * 90 + [1] * 10, ["a", "b"])
    args = eval_linear.parse_args(["RUN", "--label-fraction", "1"])
    assert eval_linear.choose_labels(args, images) is images


def test_scores_are_plain_numbers():
    logits = torch.eye(10)[[0, 1, 2] + [0] * 7]
    assert eval_linear.scores(logits, torch.arange(10), 10)["linear_top1"] == 30.0


def test_a_run_on_unlabelled_images_is_judged_by_the_command_that_it_prints(tmp_path):
    picture = common.Image.new("RGB", (16, 16))
    for path in ("train/a", "train/b", "test/a", "test/b", "unlabeled"):
        (tmp_path / path).mkdir(parents=True)
        for i in range(8):
            picture.save(tmp_path / path / f"{i}.png")
    flags = "--dataset", "folder", "--data-dir", tmp_path, "--patch-size", 8, "--max-steps", 1
    assert "MiB decoded" in run("jcl", tmp_path / "run", *flags)
    assert "read when needed" in run("jcl", tmp_path / "other", *flags, "--no-cache")
    knn = importlib.import_module("eval_knn")
    assert knn.main(knn.parse_args([str(tmp_path / "run"), "--no-floors", "--device", "cpu"]))


@pytest.mark.parametrize("name", ["vit_small_patch16_rope_224", "vit_pe_core_tiny_patch16_384"])
def test_vits_that_have_no_weight_init_are_built(name):
    if not timm.is_model(name):
        pytest.skip("this timm has none")
    common.build_backbone(common.backbone_info(name, 32, 16))


def test_the_speed_and_the_means_of_an_epoch(monkeypatch):
    """Of 4 steps of 16 images in 8 seconds, of which one was waited."""
    loader = collections.namedtuple("Loader", "began waited")(2.0, 1.0)
    for method in METHODS:
        module = importlib.import_module(method)
        monkeypatch.setattr(module.time, "perf_counter", lambda: 10.0)
        history = [dict(loss=torch.tensor(x)) for x in (1.0, 2.0, 3.0, 6.0)]
        found = module.means(collections.namedtuple("Args", "batch_size")(16), loader, history)
        assert found == dict(loss=3.0, images_per_s=8.0, data_wait=0.125)
