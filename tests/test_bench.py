"""tests/bench.py: every section makes its table, and its plain forms are the project's functions; no time is looked at."""

import bench
import pytest
import torch

import clim
import common

QUICK = ["--arch", "micro", "--batch-size", "16", "--repeats", "1"]
SMALL = {  # {section: (flags, the rows' first values)}
    "steps": ([*QUICK, "--methods", *bench.METHODS], [*bench.METHODS]),
    "input": (["--batch-size", "8", "--repeats", "1"], [32, 224]),
    "losses": (["--scale", "64", "--repeats", "1"], [*bench.LOSSES]),
    "ema": ([*QUICK, "--methods", "jcl", "logo simsiam"], ["jcl"]),
    "positives": (["--sizes", "300", "400", "--repeats", "1"], [300, 400]),
    "knn": (["--scale", "100", "--encoders", "--repeats", "1"], None),
    "modes": ([*QUICK, "--methods", "patchmix"], ["patchmix"]),
    "pace": ([*QUICK, "--methods", "moco_jointcrop", "clim"], ["moco_jointcrop", "clim"]),
    "memory": ([*QUICK, "--methods", "jcl"], ["jcl"]),
}


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Without fresh processes, and without a compiler."""
    monkeypatch.setattr(bench, "alone", lambda prepare, *arguments, small=None: bench._measured(prepare, arguments, small))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)


@pytest.mark.parametrize("section", SMALL)
def test_sections(section, tmp_path, capsys):
    flags, first = SMALL[section]
    rows = bench.main([section, *flags, "--json", str(tmp_path / "rows.json")])
    assert (tmp_path / "rows.json").exists() and capsys.readouterr().out.count("\n") == 3 + len(rows)
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert first in (None, [next(iter(row.values())) for row in rows])
    numbers = [v for row in rows for v in row.values() if isinstance(v, float)]
    assert numbers and torch.tensor(numbers).isfinite().all()


def test_processes(monkeypatch):
    """What two launches print becomes a row a method."""
    rows = iter([100.0, 90.0])
    monkeypatch.setattr(
        bench.subprocess,
        "run",
        lambda command, **_: command[-1].write_text(bench.json.dumps([dict(method="jcl", images_per_s=next(rows))])),
    )
    expected = dict(method="jcl", one_process=100.0, two_processes=90.0, ratio=0.9)
    assert bench.main(["processes", "--methods", "jcl", "--rounds", "1"]) == [expected]


@pytest.mark.parametrize("name", bench.LOSSES)
def test_plain_losses(name):
    (ours, gradient), (plain, expected) = (bench.loss_run(name, plain, 64)() for plain in (False, True))
    assert ours == pytest.approx(plain, rel=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_plain_knn():
    draws = torch.Generator().manual_seed(0)
    x, y, queries = torch.randn(300, 8, generator=draws), torch.arange(300) % 3, torch.randn(250, 8, generator=draws)
    for k in (1, 20, 300):
        assert torch.equal(bench.plain_knn(x, y, queries, k, 0.07, 3), common.knn_predict(x, y, queries, k, 0.07, 3))


def test_plain_ema():
    training = bench.Training("jcl", "micro", 16)
    fast = [torch.randn_like(p) for p in (*training.model.backbone.parameters(), *training.model.projector.parameters())]
    slow = [*training.model.momentum_backbone.parameters(), *training.model.momentum_projector.parameters()]
    expected = [p.clone() for p in slow]
    bench.plain_ema(expected, fast, 0.9)
    with torch.no_grad():
        for p, value in zip((*training.model.backbone.parameters(), *training.model.projector.parameters()), fast, strict=True):
            p.copy_(value)
    training.model.update_momentum_encoder(0.9)
    torch.testing.assert_close(slow, expected)


def test_bare_makes_all_forward_passes():
    """The keys in one pass; LoGo on MoCo: four queries, and the locals once more; CLIM, small: one size."""
    expected = {"logo moco": ["key"] + ["query"] * 6, "logo simsiam": ["project"] * 4, "clim": ["key", "query"]}
    for method, names in expected.items():
        training = bench.Training(method, "micro", 16)
        training.record()
        assert sorted(function.__name__ for function, _ in training.calls) == names
        training.bare()


def test_neighbors_and_clusters_are_clims():
    x = bench.embeddings(300)
    assert torch.equal(bench.neighbors(300)(), clim.nearest_neighbors(x, 40)) and len(bench.clusters(300)()[0]) == 2
