"""bench.py: every section makes its table, and its plain forms are the project's functions. No time is judged."""

import bench
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import common

QUICK = ["--rounds", "1", "--batch-size", "16"]
SMALL = {"loader": [], "positives": ["--sizes", "300", "400"], "knn": ["--sizes", "20"]}


def rows_of(section, *flags):
    rows = bench.main([section, *QUICK, *flags])
    assert all(row.keys() == rows[0].keys() for row in rows)
    numbers = [v for row in rows for v in row.values() if isinstance(v, float)]
    assert numbers and torch.tensor(numbers).isfinite().all() and min(numbers) > 0
    return rows


@pytest.mark.parametrize("section", SMALL)
def test_sections(section, capsys):
    rows = rows_of(section, *SMALL[section])
    page = capsys.readouterr().out.splitlines()[-4 - len(rows) :]  # the command, the machine, and a table with its head
    assert page[0].startswith(f"python tests/tools/bench.py {section}") and page[3].count("|") == page[4].count("|")


@pytest.mark.slow
def test_steps():
    """Of two checkouts, here twice the same."""
    rows = rows_of("steps", "--arch", "micro", "--against", str(bench.ROOT))
    assert [row["method"] for row in rows] == [*bench.METHODS]


@pytest.mark.slow
def test_processes(tmp_path):
    bench.make_folder(tmp_path, 64)
    own = f"--dataset folder --data-dir {tmp_path} --arch resnet_micro --image-size 32"
    assert [row["method"] for row in rows_of("processes", "--methods", "jcl", f"--flags={own}")] == ["jcl"]


def test_a_step_is_what_lies_between_two_batches():
    """Also where the loop is left before the loader's end; loaders of evaluations are left alone."""
    data = torch.arange(6)
    training = common.Loader(data, torch.device("cpu"), batch_sampler=common.EpochSampler(6, 2, 0))
    seen = []
    begin = bench.watched(
        lambda loader: iter("abc"), lambda b: seen.append(f"{b} in"), lambda b: seen.append(f"{b} out")
    )
    for batch in begin(training):
        seen.append(batch)
        if batch == "b":
            break
    assert seen == ["a in", "a", "a out", "b in", "b", "b out"]
    assert list(begin(common.Loader(data, torch.device("cpu")))) == ["a", "b", "c"] and len(seen) == 6


def test_bytes_that_live():
    """Views share their tensor's bytes, and what is deleted no longer counts."""
    with bench.LiveTensors() as live:
        x = torch.ones(1000)
        y = x.view(10, 100).t()
        assert live.bytes.now == 4000
        z = x + 1
        del x, y
        assert live.bytes.now == 4000 and live.bytes.peak == 8000
        del z
    assert live.bytes.now == 0


def test_attention_is_counted_on_the_cpu():
    """An attention layer's operations are those of its two products, and twice as many in the backward pass."""
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False, custom_mapping=bench.ATTENTION) as counter:
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        forward = counter.get_total_flops()
        y.sum().backward()
    assert forward == 2 * (2 * 2 * 3 * 5 * 5 * 8)
    assert counter.get_total_flops() - forward >= 2 * forward


@pytest.mark.slow
def test_needs_of_a_small_encoder():
    """Per image: a forward and a backward pass of the query, a forward pass per key, and what they save."""
    found = bench.needs_of("jcl --arch resnet_micro --image-size 32 --num-keys 3 --queue 64")
    info = common.backbone_info("resnet_micro", 32, 16)
    encoder = common.build_backbone(info)
    with FlopCounterMode(display=False) as counter:
        encoder.eval()(torch.zeros(1, 3, 32, 32))
    forward = counter.get_total_flops()
    assert 5.5 * forward < found["operations"] < 6.5 * forward  # 1 + 2 + 3 passes, and heads, loss and blur
    assert 0 < found["saved"] < found["live"]
    trained = found["gradients"]
    assert found["optimizer"] == trained and found["weights"] == pytest.approx(2 * trained, rel=0.05)
    assert found["queue"] == 64 * 128 * 4


def test_plain_knn():
    draws = torch.Generator().manual_seed(0)
    x, y, queries = torch.randn(300, 8, generator=draws), torch.arange(300) % 3, torch.randn(250, 8, generator=draws)
    for k in (1, 20, 300):
        expected = common.knn_predict(x, y, queries, k, 0.07, 3)
        assert torch.equal(bench.plain_knn(x, y, queries, k, 0.07, 3), expected)
