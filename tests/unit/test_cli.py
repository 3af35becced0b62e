import dataclasses
import fcntl
import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from terapipe_ds import cli
from terapipe_ds.cli import COMMANDS, main
from terapipe_ds.schedule import build, from_csv, render, to_csv
from terapipe_ds.timeline import Timeline, TimelineEvent, timeline_file_name
from terapipe_ds.timeline.export import to_chrome_trace
from terapipe_ds.timeline.export import to_csv as events_as_csv
from tests.processes import ROOT, run_python

SEQ1F1B = ["--schedule", "seq1f1b", "--stages", "4", "--micro-batches", "2", "--slices", "4"]

UNIT = ["--schedule", "seq1f1b", "--stages", "2", "--slices", "5,3", "--unit"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that fails with exit code 2."""
    try:
        code: object = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    error = without_progress(capsys.readouterr().err)
    assert error.count("\n") == 1
    assert error.startswith("terapipe")
    assert "Traceback" not in error
    return error


def without_progress(error: str) -> str:
    """Return stderr without the line per 10 s of a search on a busy machine."""
    return "".join(line for line in error.splitlines(keepends=True) if "% of this phase" not in line)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert without_progress(captured.err) == ""
    return captured.out


def terapipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "terapipe_ds", *arguments)


def test_a_full_stderr_is_an_error_like_others(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "terapipe_ds", "convert", "--out", str(tmp_path / "ds.json")]
    with open("/dev/full", "w") as full:
        arguments = ["--megatron-args", "--micro-batch-size 1 --num-layers 2"]
        assert subprocess.run([*command, *arguments], cwd=ROOT, stderr=full, timeout=120, check=False).returncode == 2


def test_no_word_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys)
    assert all(f"\n    {command}" in out for command in COMMANDS)


def test_odd_terminals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    (tmp_path / "größe.csv").write_text(to_csv(build("seq1f1b", 4, 2, 4)))
    for stdout in (None, io.TextIOWrapper(io.BytesIO(), encoding="ascii")):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["show", str(tmp_path / "größe.csv")]) == 0


@pytest.mark.parametrize("words", ["doctor --config ds.json", "plan --model nano --device h100 --stages 2", "show"])
def test_closed_streams(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A daemon or a shell (`>&- 2>&-`) closes them: a command that asks whether one is a terminal goes on."""
    monkeypatch.setattr("terapipe_ds.doctor.installation.CHECKS", ())
    monkeypatch.setattr("terapipe_ds.doctor.machine.checks", lambda ranks: ())
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(words.split()) == (2 if words == "show" else 0)


def test_json_goes_to_stdout_or_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for words in (["show", *SEQ1F1B], ["simulate", *UNIT]):
        text, on_stdout = shown(capsys, *words), shown(capsys, *words, "--json")
        assert shown(capsys, *words, "--json", str(path)) == text
        assert json.loads(path.read_text()) == json.loads(on_stdout)


@pytest.mark.parametrize(("line", "words"), [
    ("terapipe do", {"doctor"}), ("terapipe doctor --q", {"--quiet"}),
    ("terapipe s", {"strategy", "simulate", "show"}),
])  # fmt: skip
def test_the_shell_completes_words(tmp_path: Path, line: str, words: set[str]) -> None:
    pytest.importorskip("argcomplete", reason="an optional package")
    variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SHELL": "bash"}
    variables |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words"), "_ARGCOMPLETE_IFS": "\n"}
    variables["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", "from terapipe_ds.cli import main; main()"]
    subprocess.run(command, env=os.environ | variables, timeout=60, check=True)
    assert {word.strip() for word in (tmp_path / "words").read_text().split("\n")} == words


def test_show_prints_the_grid(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert shown(capsys, "show", *SEQ1F1B) == render(build("seq1f1b", 4, 2, 4), width=100) + "\n"
    forward_only = render(build("seq1f1b", 4, 2, 4, forward_only=True), width=100)
    assert shown(capsys, "show", *SEQ1F1B, "--forward-only") == forward_only + "\n"


def test_show_takes_one_number_of_slices_per_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--schedule gpipe --stages 2 --micro-batches 2 --slices 3,1 --csv -"
    text = shown(capsys, "show", *words.split())
    assert from_csv(text, name="gpipe") == build("gpipe", 2, 2, [3, 1])


def test_show_writes_and_reads_csv(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.csv"
    assert shown(capsys, "show", *SEQ1F1B, "--csv", str(path)) == ""
    schedule = build("seq1f1b", 4, 2, 4)
    assert path.read_text() == to_csv(schedule)
    assert list(tmp_path.iterdir()) == [path]
    again = shown(capsys, "show", "--from-csv", str(path), "--json")
    assert shown(capsys, "show", str(path), "--json") == again
    assert shown(capsys, "show", str(path), "--csv") == to_csv(schedule)
    assert json.loads(again)["orders"] == [schedule.compute_order(k) for k in range(4)]
    assert json.loads(again)["name"] == "mine"
    assert json.loads(again)["peak_live_slices"] == [7, 6, 5, 4] and json.loads(again)["num_slots"] == 22
    monkeypatch.chdir(tmp_path)
    path.rename("gpipe")  # also the name of a schedule
    assert shown(capsys, "show", "gpipe", "--csv") == to_csv(schedule)


def test_show_prints_what_one_stage_runs(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = build("seq1f1b", 4, 2, 4)
    order = shown(capsys, "show", *SEQ1F1B, "--stage", "2")
    assert order.split() == schedule.compute_order(2)
    lowered = shown(capsys, "show", *SEQ1F1B, "--stage", "2", "--lowered")
    assert lowered.splitlines() == [str(action) for action in schedule.for_stage(2).actions]


SHOW, OF_TWO, SIMULATE = f"show {' '.join(SEQ1F1B)}", "show --schedule gpipe --stages 2", f"simulate {' '.join(UNIT)}"
ERRORS = {
    "shwo": "unknown command 'shwo'; did you mean 'show'?",
    "--shwo": "required: COMMAND",
    "help": "unknown command 'help'; known: profile, plan,",
    "convert --megatron-args --micro-batch-size 1": "1; put all of Megatron's arguments in one pair of quotes",
    "show --schedul gpipe --stage 2 --slice 2 --micro-batch 2 --lovered": "--lovered; did you mean --lowered?",
    f"{SHOW} --json x.csv": "--json x.csv: end the name in .json",
    f"{SHOW} --json no/such/x.json": "there is no such folder",
    "show": "one of the arguments --schedule --from-csv FILE is required",
    "show --schedule gpipe --stages 0 --micro-batches x": "--stages 0: give a number >= 1; --micro-batches x: give an",
    "simulate --micro-batches 0": "once per micro-batch; one of the arguments --profile --model --unit is",
    "simulate": "--slices is missing: give slice lengths in tokens as 512,384,128, or a number of",
    "simulate --scheduel gpipe": "--scheduel gpipe; did you mean --schedule?",
    "plan --model nano-2 --device h1000": "--stages is missing: give the number of pipeline stages; unknown model size",
    f"{SHOW} --from-csv x.csv": "not allowed with argument --schedule",
    "show --schedule gpipe": "--stages is missing",
    "show 1f1b": "1f1b is the name of a schedule, not of a file: give --schedule 1f1b",
    "plan --model hub/name --device h100 --stages 2": "hub/name: No such file or directory; give a decoder's config.js",
    "show --schedule gpipe --stages 99999999": "--stages 99999999: give a number <= 10000",
    f"{OF_TWO} --slices 3,x": "--slices 3,x: give integers >= 1",
    f"{OF_TWO} --slices 3,3": "--slices has 2 entries: give one number of slices for each micro-batch; the step has 1",
    f"{SHOW} --stage 4": "no stage 4",
    f"{SHOW} --lowered": "--lowered goes with --stage only",
    "show no/such.csv": "no/such.csv: No such file",
    f"show x.csv {' '.join(SEQ1F1B)}": "not allowed with argument",
    "show x.csv --chunks-per-stage 2": "--chunks-per-stage does not go with --from-csv",
    f"{SHOW} --chunks-per-stage 2": "--chunks-per-stage is 2: schedule 'seq1f1b' has one part",
    "show --from-csv x.csv --forward-only": "--forward-only does not go with --from-csv",
    "show --stages 2 --schedule dapple --option policy": "give policy=A",
    "show --stages 2 --schedule dapple --option warm_up=1": "give policy=A",
    "show --stages 2 --schedule dapple --option policy=A --option policy=B": "--option policy is given twice",
    "show --stages 2 --schedule zbv --option max_live_slices=1": "give 2 or more",
    "timeline no/such --out x.png": "no/such: No such file or directory; give a path that exists",
    "timeline x": "--out is missing: give --out FILE for a picture, --html FILE for a page,",
    "timeline x --out x.png --json": "--json goes with --against only",
    "timeline no/such.json --against x": "no/such.json: No such file",
    "simulate --schedule gpipe --stages 2 --slices 5,3": "one of the arguments --profile --model --unit is required",
    f"{SIMULATE} --model tiny": "not allowed with argument --unit",
    "simulate --stages 2 --slices 4 --unit": "one of the arguments --schedule --from-csv",
    "simulate --schedule gpipe --stages 2 --unit": "--slices is missing",
    f"{SIMULATE} --slices 8,8": "--slices is given 2 times for 1 micro-batch",
    f"{SIMULATE} --sequence-length 9": "--slices 5,3 has 8 tokens, --sequence-length is 9",
    f"{SIMULATE} --granularity-tokens 2": "--granularity-tokens goes with a number of slices",
    f"{SIMULATE} --tensor-parallel 2": "--tensor-parallel goes with --model only",
    f"{SIMULATE} --links fp8": "--links goes with --model only",
    f"{SIMULATE.replace('--unit', '--model tiny --device v100')} --links f": "give bf16, fp8, int8 for activations",
    f"{SIMULATE} --unit-send -1": "--unit-send -1: give a number >= 0",
    f"{SIMULATE} --picture x.jpg": "end the name in .png",
    f"{SIMULATE} --csv -": "--csv -: this option writes a file; give",
    "profile --config ds.json --model nano": "--out is missing: give it, or print the profile by --json",
    f"{SIMULATE} --trace no/such/dir.json": "there is no such folder",
    f"{SIMULATE} --trace x.json --timeline ./x.json": "--timeline ./x.json: --trace writes this file too; give another",
    "simulate --schedule gpipe --stages 2 --slices x --unit": "--slices 'x': give slice lengths",
    "simulate --schedule gpipe --stages 2 --slices 4 --unit": "is a number of slices: give --sequence-length",
    "simulate --schedule gpipe --stages 2 --slices 5,3 --model tiny": "--model needs --device",
    "simulate --schedule gpipe --stages 2 --slices 5,3 --model tiny --device v100 --unit-send 1": "with --unit only",
}


@pytest.mark.parametrize(("words", "reason"), ERRORS.items())
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], words: str, reason: str) -> None:
    assert reason in refused(capsys, *words.split())


def test_a_csv_that_cannot_run_is_shown_with_the_place(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("F0.0,F0.1,B0.1,B0.0\nF0.0,F0.1,B0.0,B0.1\n")
    assert main(["show", "--from-csv", str(path)]) == 2
    captured = capsys.readouterr()
    assert "<-- ERROR HERE (B0.0)" in captured.out
    assert captured.err.count("\n") == 1
    assert "B0.0 runs before B0.1" in captured.err


def write_traces(directory: Path, step: int, num_stages: int = 2, replicas: int = 1, zero_s: float = 0.0) -> None:
    for rank in range(num_stages * replicas):
        stage_id = rank // replicas
        start_s, stop_s = zero_s + stage_id, zero_s + 6 - stage_id
        times = {"F": (start_s, start_s + 1), "B": (stop_s - 1, stop_s)}
        events = [TimelineEvent(stage_id, f"{kind}0.0", 0, 0, kind, *span) for kind, span in times.items()]
        shift = float(rank % replicas)  # only the first replica of a stage is as written above
        events = [dataclasses.replace(e, end_s=e.end_s + shift) for e in events]
        Timeline(num_stages, tuple(events), name="seq1f1b").save(directory / timeline_file_name(step, rank))


def test_timeline_draws_the_last_step_that_all_ranks_have(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
    trace = tmp_path / "trace.json"
    text = shown(capsys, "timeline", *files, "--out", str(out), "--perfetto", str(trace))
    assert text.startswith(f"{out}, {trace}: step 1,") and trace.exists()


def test_timeline_draws_the_last_run_of_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for step, zero_s in ((200, 0.0), (5, 1000.0), (4, 990.0)):  # of 200 steps, and of 5 later on
        write_traces(tmp_path, step, zero_s=zero_s)
    words = "timeline", str(tmp_path), "--out", str(tmp_path / "step.svg")
    assert "step 5, 2 stages, makespan 6 s" in shown(capsys, *words)
    write_traces(tmp_path, 6, zero_s=0.0)
    (tmp_path / timeline_file_name(5, 0)).rename(tmp_path / timeline_file_name(6, 0))
    assert main([*words, "--step", "6"]) == 0
    assert (
        "ranks 0, 1 are 995 s apart: their clocks differ, or two runs wrote to this folder" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_outputs_without_a_file_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    shape = ["--schedule", "seq1f1b", "--stages", "2", "--slices", "4"]
    plan = ["--model", "tiny", "--device", "h100", "--stages", "2", "--sequence-length", "64"]
    for option, words in {
        "--csv": ["show", *shape],
        "--trace": ["simulate", *shape, "--sequence-length", "64", "--unit"],
        "--out": ["plan", *plan],
    }.items():
        text = refused(capsys, *words, option, name)
        assert f"{option} {name!r} has no file name: give the name of a file" in text
    assert "--out" in refused(capsys, "timeline", "traces", "--out", name)
    assert "--html" in refused(capsys, "bench", "--from", "result.json", "--html", name)


def test_timeline_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traces, other = tmp_path / "traces", tmp_path / "other.json"
    traces.mkdir()

    def said(*words: object) -> str:
        return refused(capsys, "timeline", *map(str, words), "--out", str(tmp_path / "step.png"))

    assert "no timeline-step*-rank*.json in" in said(traces)
    write_traces(traces, 1)
    write_traces(traces, 2)
    first = traces / timeline_file_name(1, 0)
    copy = tmp_path / first.name
    for path in (other, copy):
        path.write_text(first.read_text())
    assert "step 3 is not there: the steps are 1, 2" in said(traces, "--step", 3)
    assert "the name must be timeline-step" in said(other, first)
    assert "--step 1 goes with a trace" in said(other, "--step", 1)
    assert "are the same step and rank" in said(traces, copy)
    first.unlink()
    (traces / timeline_file_name(2, 1)).unlink()
    assert "no step is there for all of the 2 ranks" in said(traces)
    assert "step 1 lacks rank 0" in said(traces, "--step", 1)
    (traces / timeline_file_name(1, 0)).write_text("{}")
    assert f"{first.name}: not a timeline" in said(traces)
    assert "end the name in .png" in refused(capsys, "timeline", str(traces), "--out", "step.jpg")
    assert not (tmp_path / "step.png").exists()


def test_timeline_draws_one_replica_of_a_data_parallel_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_traces(tmp_path, 1, replicas=2)
    assert main(["timeline", str(tmp_path), "--out", str(tmp_path / "step.svg")]) == 0
    said = capsys.readouterr()
    assert "2 stages, makespan 6 s" in said.out
    assert "note: ranks 0, 2; others hold the same stages (replicas, tensor-parallel ranks): 1, 3" in said.err


def test_timeline_says_where_a_stage_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_traces(tmp_path, 1, num_stages=3)
    (tmp_path / timeline_file_name(1, 1)).unlink()
    assert main(["timeline", str(tmp_path), "--out", str(tmp_path / "step.svg")]) == 0
    assert "note: no events of stage 1" in capsys.readouterr().err


def test_simulate_prints_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages, one micro-batch of 5 and 3 of 8 tokens: forwards 5/8 and 3/8 s, backwards twice that."""
    lines = [line.split() for line in shown(capsys, "simulate", *UNIT).splitlines()]
    assert lines[0] == ["seq1f1b:", "2", "stages,", "1", "micro-batch,", "slices", "5,", "3", "tokens"]
    assert lines[1] == ["makespan", "4.875", "s,", "bubble", "38.5", "%"]
    assert lines[4:6] == [["0", "3", "38.5", "2"], ["1", "3", "38.5", "2"]]
    assert lines[-1][:6] == ["critical", "path:", "6", "steps", "on", "2"]
    words = [*UNIT[: UNIT.index("--slices")], "--slices", "8", "--sequence-length", "1024", "--unit"]
    eight = shown(capsys, "simulate", *words)
    assert eight.startswith("seq1f1b: 2 stages, 1 micro-batch, slices 8 x 128 tokens\n")
    data = json.loads(shown(capsys, "simulate", *UNIT, "--json"))
    assert (data["makespan_s"], data["plans"], data["num_stages"]) == (4.875, [[5, 3]], 2)
    times = {"busy_s": 3, "bubble_fraction": pytest.approx(1 - 3 / 4.875)}
    assert data["stages"][1] == {"stage_id": 1, **times, "peak_live_slices": 2, "peak_bytes": None}
    path = [(step["stage_id"], step["action"], step["waited_for"]) for step in data["critical_path"]]
    assert path[:2] == [(0, "F0.0", "start"), (1, "F0.0", "dependency")]


def test_simulate_takes_plans_in_several_forms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def plans(*arguments: str) -> object:
        return json.loads(shown(capsys, "simulate", *arguments, "--unit", "--json"))["plans"]

    two = ["--schedule", "gpipe", "--stages", "2", "--micro-batches", "2"]
    assert plans(*two, "--slices", "3", "--sequence-length", "8") == [[3, 3, 2]] * 2
    grains = ["--sequence-length", "8", "--granularity-tokens", "4"]
    assert plans(*two, "--slices", "2", *grains) == [[4, 4]] * 2
    assert plans(*two, "--slices", "5,3", "--slices", "1", "--sequence-length", "8") == [[5, 3], [8]]
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(build("seq1f1b", 2, 2, [2, 1])))
    assert plans("--from-csv", str(path), "--slices", "5,3", "--slices", "1", "--sequence-length", "8") == [[5, 3], [8]]
    words = ["simulate", "--from-csv", str(path), "--slices", "5,3", "--unit"]
    assert "--stages does not go with --from-csv" in refused(capsys, *words, "--stages", "2")
    assert "micro-batch 1 has 2 slices (5, 3), the schedule 1" in refused(capsys, *words)


def test_simulate_finds_an_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["simulate", "--schedule", "search", "--stages", "3", "--micro-batches", "4", "--unit"]
    words += ["--unit-send", "0.3", "--sequence-length", "8"]
    words += ["--slices", "5,3", "--slices", "1", "--slices", "1", "--slices", "4,4"]
    path = tmp_path / "found.csv"
    data = json.loads(shown(capsys, *words, "--order", str(path), "--json"))
    assert data["schedule"] == "search" and data["plans"] == [[5, 3], [8], [8], [4, 4]]
    assert data["order_bound_s"] <= data["makespan_s"] <= min(data["named_s"].values())
    again = ["simulate", "--from-csv", str(path), "--unit", "--unit-send", "0.3", "--json", *words[10:]]
    assert json.loads(shown(capsys, *again))["makespan_s"] == data["makespan_s"]
    text = shown(capsys, *words)
    below = f"{1 - data['order_bound_s'] / data['makespan_s']:.2%} below this makespan"
    assert f"less than {data['order_bound_s']:.6g} s, {below}" in text
    assert "named schedules within the limit: zb-h1" in text
    few = json.loads(shown(capsys, *words, "--live-slices", "3", "--json"))
    assert max(stage["peak_live_slices"] for stage in few["stages"]) == 3 and few["makespan_s"] >= data["makespan_s"]
    two = json.loads(shown(capsys, *words, "--chunks-per-stage", "2", "--order", str(path), "--json"))
    assert path.read_text().startswith("placement,0/5,1/4,2/3") and two["order_bound_s"] <= two["makespan_s"]


@pytest.mark.parametrize(("words", "reason"), [
    ("simulate --schedule search --stages 2 --slices 4,4 --unit --forward-only", "leave out --forward-only"),
    ("simulate --schedule search --stages 2 --slices 4,4 --unit --no-overlap", "--option and --no-overlap"),
    ("simulate --schedule search --stages 2 --slices 4,4 --unit --live-slices 1", "1 live slices: raise it"),
    ("simulate --schedule search --stages 2 --slices 4,4 --unit --chunks-per-stage 3", "give 1 or 2"),
    ("simulate --schedule search --slices 4,4 --unit", "--stages is missing"),
    ("simulate --schedule 1f1b --stages 2 --slices 4,4 --unit --live-slices 3", "goes with --schedule search only"),
    ("simulate --schedule 1f1b --stages 2 --slices 4,4 --unit --order x.json", "end the name in .csv"),
    ("simulate --schedule zbv --stages 4 --slices 8,8 --model nano --device h100", "2 layers, and this schedule needs"),
    ("simulate --schedule 1f1b --stages 4 --slices 8,8 --model nano --device h100", "--stages 4: nano has 2 layers"),
    ("show --schedule search --stages 2", "has no order without costs: find one with `terapipe simulate"),
])  # fmt: skip
def test_orders_that_cannot_be_found(capsys: pytest.CaptureFixture[str], words: str, reason: str) -> None:
    assert reason in refused(capsys, *words.split())


def test_simulate_writes_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = {"--timeline": "t.json", "--trace": "trace.json", "--csv": "events.csv", "--picture": "p.svg"}
    options = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    shown(capsys, "simulate", *UNIT, "--unit-send", "0.5", *options)
    assert {file.name for file in tmp_path.iterdir()} == set(names.values())
    timeline = Timeline.load(tmp_path / "t.json")
    assert timeline.makespan_s == 5.5, "4.875, and half a message of 5 tokens of 8 either way"
    assert (tmp_path / "trace.json").read_text() == to_chrome_trace(timeline)
    assert (tmp_path / "events.csv").read_text() == events_as_csv(timeline)
    assert "makespan 5.6875 s" in shown(capsys, "simulate", *UNIT, "--unit-send", "0.5", "--no-overlap")


def test_simulate_counts_the_bytes_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt3-1b over two stages in fp32: 24 layers of 12 h^2, at 4 + 4 + 8 bytes per parameter, and activations."""
    options = ["simulate", "--schedule", "seq1f1b", "--stages", "2", "--micro-batches", "4", "--model", "gpt3-1b"]
    options += ["--sequence-length", "2048", "--device", "a100", "--dtype", "fp32", "--slices"]
    one, eight = (json.loads(shown(capsys, *options, n, "--json"))["stages"][0]["peak_bytes"] for n in ("1", "8"))
    # per token and layer 17 h numbers and more (Korthikanti et al. 2022): of 2 sequences, or of 9 of 8 slices each
    layers_bytes, kept = 12 * 12 * 2048**2 * 16, 12 * 2048 * 2048 * 68
    assert 1.6 * kept < one - layers_bytes < 3.5 * kept
    assert layers_bytes < eight < one - 0.5 * kept
    text = shown(capsys, *options, "8")
    assert "peak GiB" in text and f"{eight / 2**30:.3f}" in text
    assert "peak GiB" not in shown(capsys, "simulate", *UNIT)


def test_rates_are_those_of_training_steps_of_one_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "forwards.csv"
    path.write_text("F0.0\nF0.0\n")
    words = ["simulate", "--model", "tiny", "--device", "a100", "--slices", "1", "--sequence-length", "64", "--json"]
    evaluations = (["--from-csv", str(path)], ["--schedule", "1f1b", "--stages", "2", "--forward-only"])
    found = [json.loads(shown(capsys, *words, *more)) for more in (*evaluations, evaluations[1][:-1])]
    assert ["mfu" in one for one in found] == [False, False, True]
    assert found[0]["makespan_s"] == found[1]["makespan_s"]
    lengths = [*words[:5], "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--slices", "32,32"]
    assert "mfu" not in json.loads(shown(capsys, *lengths, "--json", "--slices", "9,8"))


def test_simulate_prices_formats_of_links(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt3-1b has 2048 features: in bf16 4096 bytes a token, in int8 2048 and 16 scales of 4."""
    options = ["simulate", "--schedule", "gpipe", "--stages", "2", "--model", "gpt3-1b", "--device", "a100"]
    options += ["--sequence-length", "2048", "--slices", "1", "--json"]

    def sends(*more: str) -> list[float]:
        events = json.loads(shown(capsys, *options, *more))["critical_path"]
        return [event["end_s"] - event["start_s"] for event in events if event["action"].startswith(("SA", "SG"))]

    (there, back), (packed, gradient) = sends(), sends("--links", "int8,bf16")
    assert there == pytest.approx(back) and gradient == pytest.approx(back)
    from terapipe_ds.costs.devices import device_card

    link = device_card("a100").node_link
    assert there - packed == pytest.approx(2048 * (4096 - 2048 - 64) / link.bandwidth_bytes_per_s, rel=1e-6)


def test_a_timeline_is_compared_with_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    predicted, traces = tmp_path / "predicted.json", tmp_path / "traces"
    traces.mkdir()
    for step in (1, 2):
        write_traces(traces, step)
    one_slice = ["--schedule", "seq1f1b", "--stages", "2", "--slices", "1", "--sequence-length", "8"]
    shown(capsys, "simulate", *one_slice, "--unit", "--timeline", str(predicted))
    picture = tmp_path / "both.png"
    both = ["timeline", str(traces), "--against", str(predicted)]
    text = shown(capsys, *both, "--step", "1", "--out", str(picture))
    assert "makespan s                       6           6   1.000" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    data = json.loads(shown(capsys, *both, "--json"))
    assert data["median_ratio"] == {"all": 0.75, "F": 1.0, "B": 0.5}
    (busy,) = [row for row in data["rows"] if (row["what"], row["stage_id"], row["kind"]) == ("busy_s", 0, "B")]
    assert (busy["predicted"], busy["measured"], busy["ratio"]) == (2.0, 1.0, 0.5)
    assert "step 3 is not there" in refused(capsys, *both, "--step", "3")
    turned = json.loads(shown(capsys, "timeline", str(predicted), "--against", str(traces), "--step", "1", "--json"))
    assert turned["median_ratio"]["B"] == 2.0
    shown(capsys, "simulate", *UNIT, "--timeline", str(predicted))
    assert "not the same schedule" in refused(capsys, *both)
    predicted.write_text("{}")
    assert "predicted.json: not a timeline" in refused(capsys, *both)


def test_examples_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe_ds.commands import show, simulate

    monkeypatch.chdir(tmp_path)
    text = re.sub(r" \\\n +", " ", show.EXAMPLES + simulate.EXAMPLES)
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("  terapipe")]
    lines = [line for line in lines if not {"--profile", "--model"} & set(line)]
    assert len(lines) == 6 + 6
    for line in lines:
        assert main(line[1:]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_have_all_that_their_command_needs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = re.sub(r" \\\n +", " ", importlib.import_module(f"terapipe_ds.commands.{command}").EXAMPLES)
    lines = [shlex.split(line.partition(" > ")[0], comments=True) for line in re.findall("^  terapipe .*", text, re.M)]
    given = [cli._parse(cli._parser([command]), line[1:]) for line in lines]
    assert [arguments.options.read(arguments) for arguments in given]
    if command == "profile":
        assert [arguments.options.read(arguments).out for arguments in given][-1] is None


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
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert isinstance(process.stdout, io.BufferedReader)
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr is not None
        error = process.stderr.read()
    assert (process.returncode, error) == (0, b"")


def test_an_interrupt_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(names: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("terapipe_ds.cli._parser", interrupted)
    assert (main(["show"]), capsys.readouterr().err) == (130, "terapipe show: interrupted\n")


def test_an_interrupt_is_one_line() -> None:
    """Of a command that reads what is still being written: it is at it when it has taken the first byte."""
    command = [sys.executable, "-m", "terapipe_ds", "show", "/dev/stdin"]
    environment, pipe = os.environ | {"PYTHONPATH": str(ROOT)}, subprocess.PIPE
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a child would inherit that it is passed over
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
    signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdin is not None
        process.stdin.write(b"F")
        process.stdin.flush()
        while process.poll() is None and fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)) != bytes(4):
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    assert (process.returncode, error) == (130, b"terapipe show: interrupted\n")


def test_no_help_loads_numpy_and_no_command_here_torch() -> None:
    code = (
        "import contextlib, io, sys, terapipe_ds.cli as cli\n"
        "assert 'terapipe_ds.schedule' not in sys.modules\n"
        "for name in cli.COMMANDS:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):\n"
        "        cli.main([name, '--help'])\n"
        "    assert 'examples:' in text.getvalue()\n"
        "early = {'torch', 'deepspeed', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "cli.main(['show', '--schedule', '1f1b', '--stages', '2'])\n"
        "cli.main(['simulate', '--schedule', '1f1b', '--stages', '2', '--slices', '4,4', '--unit'])\n"
        "sys.exit(str(early) if early else bool({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_of_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    of_four = ["show", "--stages", "2", "--micro-batches", "4", "--csv"]
    one = "F0.0,B0.0,F1.0,B1.0,F2.0,B2.0,F3.0,B3.0"
    assert shown(capsys, *of_four, "--schedule", "dapple", "--option", "policy=A").splitlines()[1] == one
    first, second = shown(capsys, *of_four, "--schedule", "dapple", "--option", "policy=B").splitlines()
    assert first.startswith("F0.0,F1.0,F2.0,B0.0,F3.0") and second == one
    assert "W" in shown(capsys, *of_four, "--schedule", "zbv", "--option", "max_live_slices=none")
