from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terapipe_ds.cli import main
from terapipe_ds.schedule import build, from_csv, render, to_csv
from terapipe_ds.timeline import Timeline, TimelineEvent, timeline_file_name

ROOT = Path(__file__).parents[2]
SEQ1F1B = ["--schedule", "seq1f1b", "--stages", "4", "--micro-batches", "2", "--slices", "4"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that fails with exit code 2."""
    try:
        code: object = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("terapipe")
    assert "Traceback" not in error
    return error


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def terapipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "terapipe_ds", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_show_prints_the_grid(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert shown(capsys, "show", *SEQ1F1B) == render(build("seq1f1b", 4, 2, 4), width=100) + "\n"
    forward_only = render(build("seq1f1b", 4, 2, 4, forward_only=True), width=100)
    assert shown(capsys, "show", *SEQ1F1B, "--forward-only") == forward_only + "\n"


def test_show_takes_one_number_of_slices_per_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(
        capsys,
        "show",
        "--schedule",
        "gpipe",
        "--stages",
        "2",
        "--micro-batches",
        "2",
        "--slices",
        "3,1",
        "--csv",
        "-",
    )
    assert from_csv(text, name="gpipe") == build("gpipe", 2, 2, [3, 1])


def test_show_writes_and_reads_csv(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    assert shown(capsys, "show", *SEQ1F1B, "--csv", str(path)) == ""
    schedule = build("seq1f1b", 4, 2, 4)
    assert path.read_text() == to_csv(schedule)
    assert list(tmp_path.iterdir()) == [path]
    again = shown(capsys, "show", "--from-csv", str(path), "--json")
    assert json.loads(again)["orders"] == [schedule.compute_order(k) for k in range(4)]
    assert json.loads(again)["name"] == "mine"


def test_show_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(shown(capsys, "show", *SEQ1F1B, "--json"))
    assert data["peak_live_slices"] == [7, 6, 5, 4]
    assert data["num_slots"] == 22


def test_show_prints_what_one_stage_runs(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = build("seq1f1b", 4, 2, 4)
    order = shown(capsys, "show", *SEQ1F1B, "--stage", "2")
    assert order.split() == schedule.compute_order(2)
    lowered = shown(capsys, "show", *SEQ1F1B, "--stage", "2", "--lowered")
    assert lowered.splitlines() == [str(action) for action in schedule.for_stage(2).actions]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "required: COMMAND"),
        (("shwo",), "invalid choice: 'shwo'"),
        (("show",), "one of the arguments --schedule --from-csv is required"),
        (("show", *SEQ1F1B, "--from-csv", "x.csv"), "not allowed with argument --schedule"),
        (("show", "--schedule", "seq1f1", "--stages", "2"), "did you mean 'seq1f1b'?"),
        (("show", "--schedule", "gpipe"), "--stages is missing"),
        (("show", "--schedule", "gpipe", "--stages", "0"), "num_stages is 0"),
        (("show", "--schedule", "gpipe", "--stages", "two"), "invalid int value: 'two'"),
        (("show", "--schedule", "gpipe", "--stages", "2", "--slices", "3,x"), "--slices is '3,x'"),
        (("show", "--schedule", "gpipe", "--stages", "2", "--slices", "3,3"), "give one to each of 1"),
        (("show", "--schedule", "gpipe", "--stages", "99999999"), "too many to show"),
        (("show", *SEQ1F1B, "--stage", "4"), "no stage 4"),
        (("show", *SEQ1F1B, "--lowered"), "--lowered needs --stage"),
        (("show", "--from-csv", "no/such.csv"), "no/such.csv: No such file"),
        (("show", "--from-csv", "x.csv", "--stages", "2"), "--stages does not go with --from-csv"),
        (("show", "--from-csv", "x.csv", "--forward-only"), "--forward-only does not go with --from-csv"),
        (("timeline", "no/such", "--out", "x.png"), "no/such: no such file or directory"),
        (("timeline", "x"), "required: --out"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in refused(capsys, *arguments)


def test_a_csv_that_cannot_run_is_shown_with_the_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("F0.0,F0.1,B0.1,B0.0\nF0.0,F0.1,B0.0,B0.1\n")
    assert main(["show", "--from-csv", str(path)]) == 2
    captured = capsys.readouterr()
    assert "<-- ERROR HERE (B0.0)" in captured.out
    assert captured.err.count("\n") == 1
    assert "B0.0 runs before B0.1" in captured.err


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"F0.0,oops\n", b""])
def test_a_csv_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    assert "error: " in refused(capsys, "show", "--from-csv", str(path))


def write_traces(directory: Path, step: int, num_stages: int = 2, replicas: int = 1) -> None:
    for rank in range(num_stages * replicas):
        stage_id = rank // replicas
        start_s = float(stage_id)
        times = {"F": (start_s, start_s + 1), "B": (5 - start_s, 6 - start_s)}
        events = [TimelineEvent(stage_id, f"{kind}0.0", 0, 0, kind, *span) for kind, span in times.items()]
        shift = float(rank % replicas)  # only the first replica of a stage is as written above
        events = [dataclasses.replace(e, end_s=e.end_s + shift) for e in events]
        Timeline(num_stages, tuple(events), name="seq1f1b").save(directory / timeline_file_name(step, rank))


def test_timeline_draws_the_last_step_that_all_ranks_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        write_traces(tmp_path, step)
    (tmp_path / timeline_file_name(3, 1)).unlink()
    (tmp_path / "notes.txt").write_text("not a timeline")
    out = tmp_path / "step.png"
    text = shown(capsys, "timeline", str(tmp_path), "--out", str(out))
    assert text == f"{out}: step 2, 2 stages, makespan 6 s, bubble 66.7 %\n"
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "step 1," in shown(capsys, "timeline", str(tmp_path), "--out", str(out), "--step", "1")
    files = [str(tmp_path / timeline_file_name(1, rank)) for rank in (1, 0)]
    assert "step 1," in shown(capsys, "timeline", *files, "--out", str(out))


def test_timeline_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "step.png")
    traces = tmp_path / "traces"
    traces.mkdir()
    assert "no timeline-step*-rank*.json in" in refused(capsys, "timeline", str(traces), "--out", out)
    write_traces(traces, 1)
    write_traces(traces, 2)
    first = traces / timeline_file_name(1, 0)
    assert "step 3 is not there: the steps are 1, 2" in refused(
        capsys, "timeline", str(traces), "--out", out, "--step", "3"
    )
    assert "end the name in .png" in refused(capsys, "timeline", str(traces), "--out", "step.jpg")
    other = tmp_path / "other.json"
    other.write_text(first.read_text())
    assert "the name must be timeline-step" in refused(capsys, "timeline", str(other), "--out", out)
    copy = tmp_path / first.name
    copy.write_text(first.read_text())
    assert "are the same step and rank" in refused(capsys, "timeline", str(traces), str(copy), "--out", out)
    first.unlink()
    (traces / timeline_file_name(2, 1)).unlink()
    assert "no step is there for all of the 2 ranks" in refused(capsys, "timeline", str(traces), "--out", out)
    assert "step 1 lacks rank 0" in refused(capsys, "timeline", str(traces), "--out", out, "--step", "1")
    (traces / timeline_file_name(1, 0)).write_text("{}")
    assert f"{first.name}: not a timeline" in refused(capsys, "timeline", str(traces), "--out", out)
    assert not Path(out).exists()


def test_timeline_draws_one_replica_of_a_data_parallel_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_traces(tmp_path, 1, replicas=2)
    text = shown(capsys, "timeline", str(tmp_path), "--out", str(tmp_path / "step.svg"))
    assert "2 stages, makespan 6 s" in text


def test_timeline_says_where_a_stage_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_traces(tmp_path, 1, num_stages=3)
    (tmp_path / timeline_file_name(1, 1)).unlink()
    assert main(["timeline", str(tmp_path), "--out", str(tmp_path / "step.svg")]) == 0
    assert "note: no events of stage 1" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "timeline"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"examples:\n  terapipe {command} " in capsys.readouterr().out


def test_the_examples_of_the_help_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from terapipe_ds.commands import show

    monkeypatch.chdir(tmp_path)
    lines = [line.split("  (")[0].split() for line in show.EXAMPLES.splitlines() if "terapipe" in line]
    assert len(lines) == 5
    for line in lines:
        assert main(line[1:]) == 0
    capsys.readouterr()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import terapipe_ds

    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"terapipe {terapipe_ds.__version__}\n"


def test_the_module_runs_as_a_program() -> None:
    good = terapipe("show", *SEQ1F1B, "--csv", "-")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout == to_csv(build("seq1f1b", 4, 2, 4))
    bad = terapipe("show", "--schedule", "nope", "--stages", "2")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)


def test_a_reader_that_stops_early_is_no_error() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    big = ["show", "--schedule", "gpipe", "--stages", "64", "--micro-batches", "99", "--csv", "-"]
    command = [sys.executable, "-m", "terapipe_ds", *big]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert isinstance(process.stdout, io.BufferedReader)
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr is not None
        error = process.stderr.read()
    assert (process.returncode, error) == (0, b"")


def test_no_command_here_loads_torch() -> None:
    code = (
        "import sys, terapipe_ds.cli as cli\n"
        "early = {'torch', 'deepspeed', 'numpy', 'matplotlib', 'terapipe_ds.schedule'} & set(sys.modules)\n"
        "cli.main(['show', '--schedule', '1f1b', '--stages', '2'])\n"
        "sys.exit(str(early) if early else bool({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
