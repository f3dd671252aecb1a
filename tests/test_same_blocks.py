"""Tests shared blocks, models on their own, that common.py trains nothing, and that optimizers have each parameter."""

import functools
import re
from collections import defaultdict

import pytest
import torch
from conftest import ROOT, VARIANTS, state_of
from methods import RECORDS
from torch import nn

SOURCES = {path.name: path.read_text() for path in sorted(ROOT.glob("*.py"))}
BLOCK = re.compile(r"^# --+ ([^\n]+) \(shared block\)\n(.*?)(?=^# (?:--+|==+) |^if __name__|\Z)", re.M | re.S)
BLOCKS = defaultdict(list)  # {text of a banner: what follows it, up to the next banner, in each file that has it}
for text in SOURCES.values():
    for name, block in BLOCK.findall(text):
        BLOCKS[name].append(block.rstrip())


@pytest.mark.parametrize("name", BLOCKS)
def test_shared_blocks_are_the_same(name):
    assert len(BLOCKS) > 3 and len(BLOCKS[name]) > 1 and len(set(BLOCKS[name])) == 1


@pytest.mark.parametrize("name", ["query", "key", "update"])
def test_models_with_a_queue_encode_alike(name):
    """No banner marks these methods. LoGo's MoCo has no `query`."""
    texts = [SOURCES[f"{method}.py"] for method in ("jcl", "clim", "logo", "moco_jointcrop")]
    found = [re.search(rf"^    def {name}\(.*?\n\n", text, re.M | re.S) for text in texts]
    assert len({match[0] for match in found if match}) == 1 and sum(map(bool, found)) >= 3


def sections(method):
    """Return what a reader copies: the imports of packages, and the sections on the paper, the model and ShuffleBN."""
    head, *parts = re.split(r"^# ==+ (?=\d\. )", SOURCES[f"{method}.py"].partition("\nif __name__")[0], flags=re.M)
    lines = re.findall(r"^(?:import (?!common).*|from [\w.]+ import .*|TERMS = .*)$", "".join([head, *parts]), re.M)
    return "\n".join([*lines, *(f"# {part}" for part in parts if part[0] in "246")])


@functools.cache
def copied(method):
    """Return what these sections define without the rest of the file and common.py, {name: value}."""
    names = {}
    exec(compile(sections(method), f"{method}.py", "exec"), names)
    return names


MODELS = [(method, *model) for method, record in RECORDS.items() for model in record.models.values()]


@pytest.mark.parametrize("method, kind, arguments, given", MODELS)
def test_a_model_works_alone(method, kind, arguments, given):
    """It trains in a user's own loop, on plain tensors."""
    assert not re.search(r"\b(common|args)\.", sections(method))
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8))
    model = copied(method)[kind](encoder, width=8, dim=8, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss, *keys, q, metrics = model(*given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if hasattr(model, "update"):
            model.update(0.9)
        if hasattr(model, "queue"):
            model.queue.enqueue(*keys)
    assert metrics["loss"] == loss and not any(x.requires_grad for x in (*keys, q) if x is not None)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("method, kind, arguments, given", MODELS)
def test_a_model_works_within_autocast(method, kind, arguments, given, monkeypatch):
    """The loss is computed in float32. Autocast changes it little, and not at all if the layers are in float32."""
    losses, in_float32 = [], torch.autocast("cpu", enabled=False)(nn.Linear.forward)
    for enabled in (False, True, True):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8))
        model = copied(method)[kind](encoder, width=8, dim=8, **arguments)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made = model(*given)
        made[0].backward()
        tensors = {x.dtype for x in [*made[:-1], *made[-1].values(), *model.state_dict().values()] if x is not None}
        assert tensors <= {torch.float32, torch.int64}
        losses.append(made[0].item())
        if enabled:
            monkeypatch.setattr(nn.Linear, "forward", in_float32)
    assert losses[2] == losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.01)


def test_a_method_has_a_record():
    """Without one, these tests would silently skip it."""
    files = {name.removesuffix(".py") for name, text in SOURCES.items() if "\ndef augment(" in text}
    assert files == RECORDS.keys(), f"tests/methods.py lacks the record of {files - RECORDS.keys()}"


def test_common_trains_nothing():
    assert not re.search(r"\b(backward|zero_grad|cross_entropy|log_softmax|SGD|AdamW)\b", SOURCES["common.py"])


@pytest.mark.parametrize("method, variant", VARIANTS)
def test_every_trained_parameter_is_in_one_group_of_its_optimizer(method, module, variant):
    """This includes LoGo's affinity. If there are two groups, the first (no decay) has those of one dimension."""
    state = state_of(module, f"{variant} --batch-size 16")
    optimizers = dict(model="optimizer", affinity="affinity_optimizer")
    for part in state.keys() & optimizers.keys():
        groups = [group["params"] for group in state[optimizers[part]].param_groups]
        trained, grouped = {p for p in state[part].parameters() if p.requires_grad}, sum(groups, [])
        assert len(set(grouped)) == len(grouped) and trained and trained <= {*grouped}
        assert len(groups) == 1 or [{p.dim() > 1 for p in group} for group in groups] == [{False}, {True}]
