"""Every command of ``terapipe`` with arguments that nobody meant: exit code 0, or 2 and one line of our own."""

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds import cli
from terapipe_ds.bench import run
from terapipe_ds.bench.report.data import read_result
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build, to_csv
from terapipe_ds.timeline import Timeline, timeline_file_name
from tests.fuzz.outcome import cases, check_message, counts
from tests.fuzz.test_fuzz_configs import DEEPSPEED, MODEL, RESULT
from tests.fuzz.test_fuzz_planning_files import PROFILE, SIMULATED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One valid file of each kind, and some that are none."""
    path = tmp_path_factory.mktemp("fuzzed")
    SIMULATED.save(path / "timeline.json")
    PROFILE.save(path / "profile.json")
    texts = {
        "ds.json": json.dumps(DEEPSPEED), "model.json": json.dumps(MODEL), "bench.json": json.dumps(RESULT),
        "plan.json": SlicePlan((3, 1)).to_json(), "schedule.csv": to_csv(build("seq1f1b", 2, 2, 2)), "empty": "",
        "text.txt": "some text", "lines.jsonl": '{"text": "one"}\n{"text": "two"}\n', "list.json": "[1, 2]",
    }  # fmt: skip
    for name, text in texts.items():
        (path / name).write_text(text)
    (path / "binary").write_bytes(b"\xff\xfe\0\x80" * 9)
    traces = path / "traces"
    traces.mkdir()
    for rank in range(2):
        events = [event for event in SIMULATED.events if event.stage_id == rank]
        Timeline(2, tuple(events), "seq1f1b").save(traces / timeline_file_name(20, rank))
    return path


FILES = [
    "timeline.json", "profile.json", "ds.json", "model.json", "bench.json", "plan.json", "schedule.csv", "empty",
    "text.txt", "lines.jsonl", "list.json", "binary", "traces", "missing", "missing/missing", ".", "", "bench.json/x",
    "traces/timeline-step000020-rank0001.json", "x" * 300,
]  # fmt: skip
OUTPUTS = ["out.json", "out.csv", "out.svg", "out.txt", "missing/out.json", "traces", "", ".", "/", "bench.json", "-"]
NUMBERS = ["1", "2", "3", "4", "8", "64", "0", "-1", "1000000", str(2**63), "1.5", "nan", "inf", "1e400", "x", "", "²"]
COUNTS = [*NUMBERS, "2,1", "512,384,128", "4,4", ",", "1,,2", "plan", "auto", "0,0", "-3,4", "1," * 50 + "1"]
NAMES = [
    "seq1f1b", "gpipe", "1f1b", "terapipe", "auto", "SEQ1F1B", "x", "", "tiny", "nano", "gpt3-1b", "h100", "v100",
    "cpu", "fp16", "bf16", "fp32", "cpu-2stage", "gpu-layer", "bytes", "null:8", "null:x", "sentencepiece:missing",
    "text", "deepspeed", "torch", "\udcff", "x" * 300,
]  # fmt: skip
VALUES = {  # by the metavar of the help
    **dict.fromkeys(("FILE", "FILE.html", "FILE.json", "DS.json", "PREDICTED", "RESULT", "TRACE_DIR_OR_FILE"), FILES),
    **dict.fromkeys(("NAME", "NAME[,...]", "{cpu,cuda}", "PRESET", "DTYPE"), NAMES),
    **dict.fromkeys((*"KMVNLBTDSGP", "GB", "GB/S", "{0,1}"), NUMBERS),
    **dict.fromkeys(("N[,...]", "M[,...]"), COUNTS),
    "NAME_OR_JSON": [*FILES, *NAMES],
    "yes|no": ["yes", "no", "maybe", ""],
    '"ARGUMENTS"': [
        "--lr 1e-3 --train-iters 9", "--lr x", "--lr", "--x y", "word", "", "--bf16=", "'", "$A --lr 1", "--",
    ],
    "F[,B]": ["bf16", "int8,bf16", "fp8", "fp8,int8", ",bf16", "bf16,", ",", "fp64", "off"],
    "NAME=VALUE": [
        "policy=B", "policy=C", "max_live_slices=9", "max_live_slices=0", "max_live_slices=none", "policy", "=B", "x=1",
    ],
}  # fmt: skip
WRITTEN = {"out", "csv", "trace", "timeline", "as_json", "html", "perfetto"}
FAST = dict.fromkeys(("stages", "sequence_length", "micro_batches"), NUMBERS[:8]) | {"granularity": NUMBERS[5:]}


def options_of(command: str) -> dict[str, list[str] | None]:
    """Return what may follow each option, by what a user writes: None for a switch, "" for a positional argument."""
    (commands,) = [action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction)]
    found: dict[str, list[str] | None] = {}
    for action in commands.choices[command]._actions:
        name = next((text for text in action.option_strings if text.startswith("--")), "")
        values = None
        if action.nargs != 0:
            values = COUNTS if action.dest == "slices" else VALUES[str(action.metavar or action.dest.upper())]
            values = OUTPUTS if action.dest in WRITTEN else values
        found[name] = FAST.get(action.dest, values) if command in ("plan", "strategy") else values
    found[" "] = NUMBERS  # a word too many
    return {name: values for name, values in found.items() if name not in ("--help", "--picture")}


USUAL = {
    "show": "--schedule seq1f1b --stages 2 --slices 4",
    "simulate": "--schedule seq1f1b --stages 2 --micro-batches 2 --slices 2,1 --unit",
    "plan": "--model tiny --device h100 --stages 2 --sequence-length 64 --granularity 16", "bench": "cpu-2stage",
    "profile": "--config ds.json --model nano --out out.json", "timeline": "traces --against timeline.json",
    "verify": "--config ds.json --model nano", "doctor": "--config ds.json", "convert": "--megatron-args=--bf16",
    "strategy": "--model tiny --device v100 --devices 2 --global-batch 2 --sequence-length 64",
}  # fmt: skip

OPTIONS = {name: options_of(name) for name in cli.COMMANDS}


@st.composite
def command_lines(draw: st.DrawFn, name: str, usual: str) -> list[str]:
    """The usual arguments of a command, some taken away and some added."""
    words = usual.split() if draw(st.integers(0, 4)) else []
    for _ in range(draw(st.integers(0, 3))):
        if words and draw(st.integers(0, 3)) == 0:
            del words[draw(st.integers(0, len(words) - 1))]
        option = draw(st.sampled_from(sorted(OPTIONS[name])))
        wanted = OPTIONS[name][option]
        words += ([option] if option.strip() else []) + ([draw(st.sampled_from(wanted))] if wanted else [])
    if draw(st.integers(0, 9)) == 0:
        words.append(draw(st.sampled_from(["--unknown", "--", "-h2", "--stages", "@file"])))
    return [name, *words]


def run_command(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks what the command prints and gives back, and of what class an error was."""
    raised: list[Exception] = []
    one_line = cli._one_line

    def record(error: Exception, *rest: Any) -> str:
        raised.append(error)
        return one_line(error, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(cli, "_one_line", record)
        patch.chdir(folder)
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                code: Any = cli.main(words)
            except SystemExit as ended:  # argparse
                code = ended.code
    said = [line for line in errors.getvalue().splitlines() if "warning" not in line.lower() and "note" not in line]
    assert code in ((0, 1, 2) if words[0] == "doctor" else (0, 2)), (code, words)
    counts[f"terapipe {words[0]}: {'accepted' if code == 0 else 'refused'}"] += 1
    if code == 2:
        assert said and "error: " in said[-1], said
        assert len(said) == 1, said
        if raised:
            ours = type(raised[0]).__module__.startswith("terapipe_ds")
            named = isinstance(raised[0], OSError) and raised[0].filename is not None
            assert ours or named, repr(raised[0])
            check_message(said[-1].encode("utf-8", "backslashreplace").decode())


def nothing_is_measured(*_: Any, **__: Any) -> Any:
    raise CommandError("here it would measure: give nothing, this is a test")


@pytest.mark.parametrize(("name", "usual"), sorted(USUAL.items()))
def test_every_command(name: str, usual: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from terapipe_ds.commands import verify
    from terapipe_ds.runtime.profiling import one_device

    monkeypatch.setattr(verify, "verify_model", nothing_is_measured)
    monkeypatch.setattr(one_device, "profile_model", nothing_is_measured)
    monkeypatch.setattr(run, "run_benchmark", nothing_is_measured)
    monkeypatch.setattr("terapipe_ds.doctor.installation.CHECKS", ())
    monkeypatch.setattr("terapipe_ds.doctor.machine.checks", lambda ranks: ())
    monkeypatch.setattr("terapipe_ds.bench.report.page.render_page", lambda data: f"{read_result(data)}")

    @cases(25, 1500)
    @given(command_lines(name, usual))
    def each(words: list[str]) -> None:
        run_command(words, folder, monkeypatch)

    each()


def test_every_command_is_tried() -> None:
    assert set(USUAL) == set(OPTIONS)


def test_help_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPTIONS:
        run_command([name, "--help"], folder, monkeypatch)
