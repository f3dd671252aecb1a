"""The runs behind the tables: what `results.py train` does when a run fails or is asked to stop."""

import pytest
import results

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
