"""What a wheel of the package holds, what its metadata says, and that the version is written in one place."""

import email
import re
import subprocess
import sys
from pathlib import Path

import pytest

import terapipe_ds

pytest.importorskip("setuptools", reason="builds the package: pip install 'setuptools>=69'")

ROOT = Path(__file__).parents[2]
EXTRAS = {"completion", "hf", "trl", "qlora", "megatron", "plot", "bench", "docs", "test"}
NEEDED_BY_OTHERS = ("py.typed", "data/devices.json", "bench/report/page.html", "commands/plan.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what goes into the wheel, `lib`, and its metadata, `info`."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "info").mkdir()
    steps = ["-q", "build", "-b", str(folder), "--build-lib", str(folder / "lib")]
    steps += ["egg_info", "--egg-base", str(folder / "info")]
    subprocess.run([sys.executable, "setup.py", *steps], cwd=ROOT, check=True, timeout=120, capture_output=True)
    return folder


def metadata(built: Path) -> email.message.Message:
    (info,) = (built / "info").glob("*.egg-info")
    return email.message_from_string((info / "PKG-INFO").read_text(encoding="utf-8"))


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    assert [path.name for path in (built / "lib").iterdir()] == ["terapipe_ds"]
    source = {path.relative_to(ROOT / "terapipe_ds") for path in (ROOT / "terapipe_ds").rglob("*.py")}
    wheel = {path.relative_to(built / "lib/terapipe_ds") for path in (built / "lib").rglob("*.*")}
    assert {path for path in wheel if path.suffix == ".py"} == source
    assert {Path(name) for name in NEEDED_BY_OTHERS} <= wheel


def test_every_file_that_is_not_python_is_in_the_wheel(built: Path) -> None:
    """A new data file needs a line in setup.py."""
    for path in (ROOT / "terapipe_ds").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert (built / "lib" / path.relative_to(ROOT)).exists(), path


def test_the_metadata(built: Path) -> None:
    said = metadata(built)
    assert said["Version"] == terapipe_ds.__version__
    assert set(said.get_all("Provides-Extra", ())) == EXTRAS
    required = said.get_all("Requires-Dist", ())
    hf = {re.split(r"\W", line)[0] for line in required if line.endswith('extra == "hf"')}
    assert hf == {"transformers", "safetensors", "peft"}
    of_qlora = [line for line in required if line.startswith("transformers") and line.endswith('extra == "qlora"')]
    assert any(">=5" in line for line in of_qlora)  # an older one does not quantize layer by layer
    plain = {re.split(r"[^\w-]", line)[0] for line in required if "extra ==" not in line}
    assert plain == {"torch", "deepspeed", "numpy", "pydantic", "packaging", "xxhash"}
    assert said["License"] == "Apache-2.0"


def test_the_version_is_written_once() -> None:
    version = f'"{terapipe_ds.__version__}"'
    files = [*ROOT.glob("*.py"), *ROOT.glob("*.toml"), ROOT / "CITATION.cff", *(ROOT / "terapipe_ds").rglob("*.py")]
    assert [path for path in files if version in path.read_text()] == [ROOT / "terapipe_ds" / "version.py"]
    assert not re.search(r"^version:", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)


def test_every_dependency_has_a_reason(built: Path) -> None:
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([\w-]+)`", page, re.MULTILINE))
    required = metadata(built).get_all("Requires-Dist", ())
    assert {re.split(r"[^\w-]", line)[0].lower() for line in required} == rows


def test_citation_and_templates_of_issues_are_yaml() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers: pip install terapipe_ds[hf]")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    templates = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    forms = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in templates if path.name != "config.yml"]
    assert len(forms) >= 4
    for form in forms:
        assert form["name"] and form["description"] and all(part["type"] for part in form["body"])
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert ids and len(ids) == len(set(ids))
