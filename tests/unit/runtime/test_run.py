"""`python -m terapipe_ds.run`: which arguments are the script's, and how the script runs."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import terapipe_ds
from terapipe_ds import run
from terapipe_ds.run import main, split_arguments
from tests.processes import ROOT, run_python

SCRIPT = """
import json, sys
import neighbour
from terapipe_ds.runtime.register import is_registered

with open(sys.argv[-1], "w") as file:
    found = [__name__, sys.argv, sys.path[0], neighbour.NUMBER, is_registered(), __file__]
    json.dump(found, file)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("NUMBER = 7\n")
    yield path
    sys.modules.pop("neighbour", None)
    terapipe_ds.unregister()


@pytest.mark.parametrize(("arguments", "verifies", "script", "rest"), [
    (["train.py", "--steps", "3", "data.txt"], False, "train.py", ["--steps", "3", "data.txt"]),
    (["--local-rank=1", "train.py"], False, "train.py", ["--local-rank=1"]),
    (["--local_rank", "1", "train.py", "-x"], False, "train.py", ["--local_rank", "1", "-x"]),
    (["train.py", "--local_rank=1"], False, "train.py", ["--local_rank=1"]),
    (["--local_rank=1", "x.py", "--", "--local_rank=2"], False, "x.py", ["--local_rank=1", "--", "--local_rank=2"]),
    (["--verify", "train.py", "-x"], True, "train.py", ["-x"]),
    (["--local_rank=1", "--verify", "train.py"], True, "train.py", ["--local_rank=1"]),
    (["--local_rank", "1", "--verify", "train.py"], True, "train.py", ["--local_rank", "1"]),
    (["--local_rank=1", "train.py", "--verify"], False, "train.py", ["--local_rank=1", "--verify"]),
])  # fmt: skip
def test_split_arguments(arguments: list[str], verifies: bool, script: str, rest: list[str]) -> None:
    assert split_arguments(arguments) == (verifies, script, rest)


@pytest.mark.parametrize("arguments", [[], ["--local_rank=0"], ["--local_rank"], ["--steps", "3"]])
def test_no_script(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert "terapipe_ds.run: no script given\nusage: deepspeed" in str(caught.value)


def test_a_script_that_is_not_there_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="script 'nowhere.py' not found; give the path of the training script"):
        main(["--local_rank=0", "nowhere.py"])
    main(["--help"])
    assert "--module terapipe_ds.run [--verify] SCRIPT.py" in capsys.readouterr().out


def test_the_script_runs_as_if_started_itself(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "out.json")
    monkeypatch.setattr(sys, "argv", [run.__file__, "--local_rank=3", str(script), "--steps", "2", out])
    main()
    name, argv, path, number, registered, file = json.loads(Path(out).read_text())
    assert name == "__main__" and file == str(script) and path == str(tmp_path)
    assert argv == [str(script), "--local_rank=3", "--steps", "2", out]
    assert number == 7, "modules beside the script can be imported"
    assert registered is True


def test_a_safe_path_keeps_its_folders(tmp_path: Path) -> None:
    """Python puts no folder of a script in front then: the first one is the user's, and was replaced."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/neighbour.py").write_text("NUMBER = 7\n")
    (tmp_path / "train.py").write_text("import neighbour\nprint(neighbour.NUMBER)\n")
    paths = os.pathsep.join(map(str, [tmp_path / "mine", ROOT]))
    command = "-m", "terapipe_ds.run", tmp_path / "train.py"
    ended = run_python(*command, folder=tmp_path, PYTHONSAFEPATH="1", PYTHONPATH=paths)
    assert ended.returncode == 0 and ended.stdout.endswith("7\n"), ended.stderr


def test_each_stream_gets_a_queue_unless_the_user_says_otherwise(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script.write_text("")
    main([str(script)])
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main([str(script)])
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_an_error_in_the_script_is_the_scripts(script: Path) -> None:
    script.write_text("raise RuntimeError('of the script')")
    with pytest.raises(RuntimeError, match="of the script"):
        main([str(script)])


@pytest.mark.parametrize(("local_rank", "waited"), [("0", []), ("1", [15])])
def test_a_mistake_in_the_config_is_printed_once_without_a_traceback(
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    local_rank: str,
    waited: list[float],
) -> None:
    script.write_text(
        "from terapipe_ds.config import TeraPipeConfig\nTeraPipeConfig.from_deepspeed({'terapipe': {'slicse': 2}})"
    )
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        os.write(2, b"[c10d] sendBytes failed")
        waits.append(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("signal.signal", lambda *words: None)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit, match=r"terapipe_ds.run: terapipe.slicse = 2: unknown key; did you mean") as ended:
        main([str(script)])
    assert isinstance(ended.value.code, str), "Python prints such a text, and the exit code is 1"
    os.write(2, b"afterwards")
    assert waits == waited and capfd.readouterr().err == "afterwards"


VERIFY = "runtime.verify.VerifyError"
KINDS = ["dict_batch.BatchError", "planner.errors.MemoryLimitError", "costs.profile.ProfileError", VERIFY]


@pytest.mark.parametrize(("kind", "local_rank"), [*((kind, "0") for kind in KINDS), (VERIFY, "1")])
def test_what_is_refused_or_differs_is_printed_without_a_traceback(
    script: Path, monkeypatch: pytest.MonkeyPatch, kind: str, local_rank: str
) -> None:
    """No rank waits after a layer that differs: ranks that stay behind would report the end of rank 0."""
    module, name = f"terapipe_ds.{kind}".rsplit(".", 1)
    script.write_text(f"from {module} import {name}\nraise {name}('layer 1 differs')")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit, match="^terapipe_ds.run: layer 1 differs$"):
        main([str(script)])
