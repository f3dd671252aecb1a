"""Runs that are stopped or killed, and resumed, end like uninterrupted ones: last.pt and records are identical."""

import functools
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import tiny
import torch
from conftest import EACH_MODEL, QUEUES, slow_but
from tiny import FLAGS, STEPS, assert_same_run, contents, epochs_of, life, load, processes, records, refused, run

import common

pytestmark = pytest.mark.usefixtures("_tiny")

NANO = "--arch resnet_nano"
JCL = [*FLAGS, "--epochs", "3"]
MORE = {"jcl": NANO, "moco_jointcrop --moco v3": NANO, "clim": "--clim-start 1 --refresh-every 2"}
CASES = [f"{case} {MORE.get(case, '')}".strip() for case in (" ".join(words).strip() for words in EACH_MODEL)]
# name: (flags of every start, [(the moment at which a start ends, see tiny.strike; epochs in last.pt by then), ...],
# epochs that lost their kNN because the run was stopped between the epoch's first save and its second).
SCENARIOS = {
    "in an epoch": ("", [("step 2", None), ("step 6", 1), ("step 4", 1), ("step 5", 2)], []),
    "in its kNN": ("", [("knn 1", 1), ("knn 2", 3)], [1, 3]),
    "two workers": ("--workers 2", [("step 6", 1)], []),
    "in CLIM's choice": ("--knn-every 0", [("choice 1", 1), ("choice 1", 1)], []),
}
ONLY = {"in CLIM's choice": CASES[2:3], "two workers": CASES[:3]}  # they have all three Dataset classes
DISTURBED = [(case, scenario) for scenario in SCENARIOS for case in ONLY.get(scenario, CASES)]


@pytest.fixture(scope="module")
def straight(_tiny, tmp_path_factory):
    """Return a function that makes the uninterrupted run of three epochs for `words`, once, and returns its folder."""

    @functools.cache
    def folder(words="jcl"):
        (method, *flags), out = words.split(), tmp_path_factory.mktemp("straight") / "run"
        assert life(method, [*FLAGS, "--epochs", 3, *flags, "--out", out])[0] == 0
        return out

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case, scenario", DISTURBED)
def test_a_disturbed_run_ends_as_an_undisturbed_one(straight, tmp_path, case, scenario):
    (flags, ends, without_knn), (method, *more) = SCENARIOS[scenario], case.split()
    words = [*FLAGS, "--epochs", "3", *more, *flags.split(), "--out", tmp_path]
    for moment, epochs in ends:
        status, said = life(method, words, moment)
        assert (status, epochs_of(tmp_path)) == (130, epochs) and "same command" in said.splitlines()[-1], said
    assert life(method, words)[0] == 0
    assert_same_run(straight(f"{case} {flags}".strip()), tmp_path, without_knn)


def test_ended_at_each_moment_in_turn(straight, tmp_path):
    """The n-th start ends at its n-th step, write, flush, rename or kNN, until one finishes. last.pt stays intact."""
    for number in itertools.count(1):
        status, said = life("jcl", [*JCL, "--keep-every", "1", "--out", tmp_path], f"anything {number}")
        if status == 0:
            break
        assert status == 130 and epochs_of(tmp_path) in (None, 1, 2, 3), said
        (tmp_path / ".being-written-elsewhere-1-last.pt").write_bytes(b"half")  # by another host; it is removed, too
    assert number > 10 and not list(tmp_path.glob(".*"))  # at least before and after last.pt exists
    without_knn = [record["epoch"] for record in records(tmp_path) if "knn20_top1" not in record]
    assert_same_run(straight("jcl --keep-every 1"), tmp_path, without_knn)


def test_ended_in_the_first_save_of_a_resumed_run(straight, tmp_path):
    """The same command completes the first save in a new folder, whether last.pt was already there or not."""
    first = straight("jcl --keep-every 1")
    words = [*JCL, "--keep-every", "1", "--resume", first / "epoch-0002.pt", "--out", tmp_path]
    ends = [life("jcl", words, f"save {number}")[0] for number in range(1, 10)]  # of config.json, last.pt, the others
    models = [load(path)["model"] for path in (first / "last.pt", tmp_path / "last.pt", tmp_path / "epoch-0003.pt")]
    assert ends == [130] * 8 + [0] and tiny.unequal(*models[:2]) == tiny.unequal(*models[1:]) == []


def lives(out, method, world, moment=""):
    """Run a method in `world` processes, the first of which is killed at a moment. Return their exit statuses."""
    each = [(method, [*FLAGS, "--out", out], moment if rank == 0 else "") for rank in range(world)]
    return [status for status, *_ in processes(f"{out}-log", tiny.play, each)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jcl", "clim", "patchmix"])
@pytest.mark.parametrize("world", [1, 2])
def test_killed(tmp_path, method, world):
    assert lives(tmp_path / "straight", method, world) == [0] * world
    for moment, epochs in (("step 6", 1), ("save 5", 1), ("save 8", 2)):  # the renames of last.pt and backbone.pt
        assert lives(tmp_path / "run", method, world, moment)[0] == -9 and epochs_of(tmp_path / "run") == epochs
    assert lives(tmp_path / "run", method, world) == [0] * world
    assert_same_run(tmp_path / "straight", tmp_path / "run", [2])


@pytest.mark.slow
@pytest.mark.parametrize("nodes, moment", [(1, "step 6"), (2, "")])
def test_torchrun(tmp_path, nodes, moment):
    """torchrun restarts a run whose second process is killed. Two nodes are two torchrun agents on this machine."""
    lives(tmp_path / "straight", "jcl", 2)
    words = f"--nnodes={nodes} --nproc_per_node={2 // nodes} --max-restarts={2 - nodes} --rdzv-id=one"
    words += f" --rdzv-backend=c10d --rdzv-endpoint=localhost:{tiny.get_free_port()} {tiny.__file__} jcl"
    line = ["timeout", "300", sys.executable, "-m", "torch.distributed.run", *words.split(), moment, *FLAGS]
    agents = [subprocess.Popen([*line, "--out", tmp_path / "run"], stdout=subprocess.PIPE) for _ in range(nodes)]
    said = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * nodes and (b"after epoch 1" in said[0]) == bool(moment)
    assert_same_run(tmp_path / "straight", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jcl", "patchmix"])
def test_resumed_by_another_number_of_processes(tmp_path, method):
    """One, two and one processes train the three epochs in turn. config.json always has the current number."""
    for epoch, world in enumerate((1, 2, 1), 1):
        words = [*FLAGS, "--knn-every", "0", "--epochs", 3, "--out", tmp_path / "run"]
        moment = f"step {STEPS + 1}" if epoch < 3 else ""
        said = processes(tmp_path / "log", tiny.play, [(method, words, moment)] * world)[0][1]
        assert epochs_of(tmp_path / "run") == epoch, said
        assert json.loads((tmp_path / "run/config.json").read_text())["processes"] == world


def test_a_damaged_checkpoint_is_left_alone(straight, tmp_path, monkeypatch, capsys):
    """A damaged last.pt is rejected. A kept checkpoint can replace it. Other lost or damaged files are rewritten."""
    life("jcl", [*JCL, "--keep-every", 1, "--out", tmp_path], "step 6")
    last, whole = tmp_path / "last.pt", (tmp_path / "last.pt").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00\n[1]\nnull\n")
    (tmp_path / "backbone.pt").unlink()
    for data in (whole[:-100], whole[:1000], b""):  # for single bits see the next test
        last.write_bytes(data)
        before = contents(tmp_path)
        assert str(last) in refused(capsys, run, "jcl", tmp_path, *JCL) and contents(tmp_path) == before
    (tmp_path / "epoch-0001.pt").rename(last)
    assert "after epoch 1" in run("jcl", tmp_path, *JCL)
    assert_same_run(straight(), tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("{}\n")  # a user's own line
    monkeypatch.setattr(common, "write_file", None)  # a finished run may be in a read-only folder
    assert "finished" in run("jcl", tmp_path, *JCL)


def test_each_bit_of_a_checkpoint_matters_or_is_found(tmp_path):
    """A flipped bit, even in the archive's directory, is either detected or changes nothing that is loaded."""
    state, path = dict(model=torch.nn.Linear(2, 3)), tmp_path / "last.pt"
    common.save_run(tmp_path, {}, None, state, [dict(epoch=1)])
    whole, wanted = path.read_bytes(), load(path)
    found = 0
    for i in range(0, len(whole), 2):
        data = bytearray(whole)
        data[i] ^= 1 << i // 2 % 8
        path.write_bytes(data)
        try:
            assert tiny.unequal(common.load_checkpoint(path), wanted) == [], i
        except common.UsageError:
            found += 1
    assert found > 300  # the others are in padding and dates of files


def test_resume_begins_another_folder(straight, tmp_path, capsys):
    """A run by --resume FILE ends like an uninterrupted one. Repeated, it resumes in --out and keeps FILE's run."""
    source, new = tmp_path / "source", tmp_path / "new"
    words = [*JCL, "--resume", source / "epoch-0001.pt", "--out", new]
    life("jcl", [*JCL, "--keep-every", 1, "--out", source], "step 5")
    before = contents(source)
    for moment, begins, epochs in (("step 2", source, None), ("step 6", source, 2), ("", new, 3)):
        assert f"resumed from {begins}/" in life("jcl", words, moment)[1]
        assert epochs_of(new) == epochs
    assert "epoch-0001.pt" in refused(capsys, tiny.play, "jcl", [*words[:-1], source])
    assert contents(source) == before
    assert_same_run(straight(), new)


@pytest.mark.parametrize("method", slow_but(["clim"], QUEUES))
def test_resume_with_other_images(method, begun, tmp_path, capsys):
    """Changed images and flags are printed, the optimizer uses the new flags, and CLIM's positives are chosen again."""
    words = ["--weight-decay", 0.5, "--resume", begun(method) / "last.pt", *["--refresh-every", 1] * (method == "clim")]
    assert "--epochs" in refused(capsys, run, method, tmp_path / "run", *words, "--epochs", 1)
    said = run(method, tmp_path / "run", *words, train=common.Patterns(0, 16, seed=7))  # 32 images
    assert "weight_decay was 0.0001, is 0.5" in said and "images was" in said and "epochs was" not in said
    (first, second), state = records(tmp_path / "run"), load(tmp_path / "run" / "last.pt")
    assert [first] == records(begun(method)) and second["epoch"] == 2
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    if method == "clim":
        assert state["positives"].shape[0] == 32 > state["positives"].max() and state["positives"].min() >= 0
        run(method, tmp_path / "none", *words[2:4], "--selection", "none")  # with the original images
        assert load(tmp_path / "none" / "last.pt")["positives"].max() < 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jcl", "clim", "logo", "patchmix"])
def test_resume_from_a_checkpoint_that_does_not_fit(method, begun, tmp_path, capsys):
    """A checkpoint of another method, without a part or with other shapes is rejected. --out can still be used."""
    state, more = load(begun(method) / "last.pt"), ["--epochs", 3, "--resume", tmp_path / "last.pt"]
    other, parts = "jcl" if method == "patchmix" else "patchmix", state.keys() - {"backbone", "processes", "positives"}
    wrong = [load(begun(other) / "last.pt"), state, state | {"model": {"other": torch.ones(1)}}]
    wrong += [{k: v for k, v in state.items() if k != part} for part in parts - {"records"}]
    wrong += [state | {part: {}} for part in parts if "optim" in part] + [load(begun(method) / "backbone.pt")]
    for saved in wrong:
        torch.save(saved, tmp_path / "last.pt")
        line = refused(capsys, run, method, tmp_path / "new", *more, *["--dim", 8] * (saved is state))
        assert str(tmp_path / "last.pt") in line and len(line) < 600
    assert "is not the last.pt of a run of" in line
    torch.save(state, tmp_path / "last.pt")
    run(method, tmp_path / "new", *more)
    assert epochs_of(tmp_path / "new") == 3


def test_images_may_move_but_not_change(here, capsys):
    """A folder of images may move. Other images in a folder of the same name are rejected, as are changed flags."""
    for root in ("one", "two"):
        tiny.write_tree(here / root / "data", ["train/a", "train/b"], 12, (16, 16))
    os.rename("two/data/train/b/0.png", "two/data/train/b/12.png")
    words = [*FLAGS, "--patch-size", 8, "--dataset", "folder", "--data-dir"]
    assert life("jcl", [*words, "one/data"], "step 2")[0] == 130
    os.rename("one/data", "moved")
    (out,) = (here / "runs").iterdir()
    status, said = life("jcl", [*words, "moved", "--out", out])
    assert status == 0 and epochs_of(out) == 2
    assert re.search(r"images: from .*/one/data before, from .*/moved now", said)
    before, resume, epochs = contents(out), ["--resume", out / "last.pt"], ["--out", out, "--epochs", 24]
    for more, changed in ([], "images was"), (resume, "images was"), (epochs, "epochs was 2, is 24"):
        line = refused(capsys, tiny.play, "jcl", [*words, "two/data", *more])
        assert changed in line and "--resume" in line and contents(out) == before
