"""The runs behind the tables, and the tables."""

import importlib

import numpy as np
import pytest
import results
from PIL import Image

SCRIPT = """
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir()
sys.exit({"fails": 1, "stops": 75}.get(sys.argv[1], 0))
"""


def test_a_failing_run_does_not_hide_the_others_and_a_stopped_one_ends_the_queue(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text(SCRIPT)
    arms = {name: results.Arm(name, f"script.py {name}", None, 1) for name in ("fails", "learns", "stops", "waits")}
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(results, "ARMS", arms)
    end = dict(knn20_top1=50.0, knn200_top1=40.0)
    monkeypatch.setattr(results, "judge", lambda line, out, where: dict(command=line, epochs=[end], linear_top1=45.0))
    with pytest.raises(SystemExit) as stop:
        results.main(["train", "--runs", str(tmp_path / "runs"), "--seeds", "0", "--jobs", "1", "--arms", *arms])
    assert stop.value.code == 1
    assert {p.name for p in (tmp_path / "runs").iterdir() if p.is_dir()} == {f"cpu-{n}-s0" for n in list(arms)[:3]}
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["cpu-learns.json"]
    said = capsys.readouterr()
    assert "learns, seed 0: kNN, k = 20 50.0, kNN, k = 200 40.0, linear 45.0" in said.out
    assert "fails, seed 0: exit status 1" in said.err and "stops, seed 0: exit status 75" in said.err


@pytest.mark.parametrize("arm", results.ARMS)
def test_every_arm_is_a_command_that_its_script_takes(arm):
    script, *words = results.command("cpu", arm, seed=0).split()
    args = importlib.import_module(script.removesuffix(".py")).parse_args(words)
    assert (args.dataset, args.seed, args.batch_size) == ("cifar10", 0, 128)


def test_pages_have_what_the_files_say():
    """The tables of README and of the results' page are those that `results.py readme` would write."""
    for page in results.PAGES:
        text = page.read_text()
        assert "<!-- tests/tools/results.py: " in text and results.with_tables(text) == text


@pytest.mark.parametrize(
    ("gains", "said"),
    [([0.6, 2.0], "shown"), ([0.6, 0.4], "not shown"), ([-0.6, -3.0], "the opposite"), ([-3.0, 0.6], "not shown")],
)
def test_a_verdict_follows_from_all_gains(gains, said):
    assert results.verdict(gains) == said


@pytest.mark.slow
def test_a_run_of_few_images_is_kept_and_shown(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(results, "KEPT", tmp_path / "kept")
    monkeypatch.setitem(results.FEW, "per_class", 13)  # of 15
    generator = np.random.default_rng(0)
    for part, count in (("train", 15), ("test", 2)):
        for c in range(10):
            (tmp_path / part / f"class{c}").mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / f"class{c}" / f"{i:02d}.png")
    results.main(
        f"few --data-dir {tmp_path} --arm patchmix-released --seed 3 --epochs 1 --runs {tmp_path / 'runs'}".split()
    )
    assert "data own: 130 training images" in capfd.readouterr().out
    record = results.kept_runs("cpu", "few-patchmix-released")[3]
    assert record["trained"] == 1 and "--variant released" in record["flags"]
    knn = record["epochs"][0]["knn20_top1"]
    assert 0 <= knn <= 100
    assert results.few_table("cpu").splitlines()[2].endswith(f"| 3 | {knn:.1f} |")
