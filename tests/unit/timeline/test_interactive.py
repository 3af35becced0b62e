"""Timelines in a browser: what waits say, the bars, the page; and traces for Perfetto with several timelines."""

import base64
import builtins
import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds import SlicePlan, cli, simulate
from terapipe_ds.schedule import build
from terapipe_ds.timeline import Timeline, TimelineError
from terapipe_ds.timeline.export import to_chrome_trace
from terapipe_ds.timeline.interactive import build_interactive, timeline_page
from terapipe_ds.timeline.waits import find_waits
from tests.costs import CostsOf
from tests.unit.timeline.test_timeline import event


def two_stages(zero_s: float = 100.0) -> Timeline:
    """One micro-batch of one slice; stage 1 gets its input 0.5 s late, stage 0 its gradient at once."""
    rows = [(0, "F0.0", 0, 2), (1, "F0.0", 2.5, 5), (1, "B0.0", 5.2, 8), (0, "B0.0", 8, 12)]
    return Timeline(2, tuple(event(stage, name, zero_s + a, zero_s + b) for stage, name, a, b in rows), name="by hand")


def costs(factor: float = 1.0) -> CostsOf:
    """Return costs that are shares of the tokens."""
    of_tokens = [lambda tokens, prefix, per=per: factor * tokens / per for per in (100, 50, 120)]
    return CostsOf(*of_tokens[:2], weight_s=of_tokens[2], send_s=lambda tokens: tokens / 1000)


def simulated(schedule: str = "seq1f1b", factor: float = 1.0) -> Timeline:
    return simulate(build(schedule, 3, 2, 2), SlicePlan((60, 40)), [costs(), costs(factor), costs()])


# --- what a stage waits for


def test_waits_by_hand() -> None:
    waits = [(w.stage_id, w.start_s - 100, w.end_s - 100, w.before.action) for w in find_waits(two_stages())]
    assert waits == [(0, 2, 8, "B0.0"), (1, 0, 2.5, "F0.0"), (1, 5, pytest.approx(5.2), "B0.0")]
    reasons = [wait.reason for wait in find_waits(two_stages())]
    assert reasons[0] == "B0.0 of stage 1"
    assert reasons[1] == "F0.0 of stage 0, for 80 % of the time; then the link, or this rank itself"
    assert reasons[2] == "no input: F0.0 of stage 1 was done; this stage itself was slow to go on"


def test_a_stage_that_waits_for_data() -> None:
    late = Timeline(2, (event(1, "F0.0", 0, 1), event(0, "F1.0", 3, 4)))
    (wait,) = find_waits(late)
    assert (wait.stage_id, wait.source) == (0, None)
    assert "the data" in wait.reason
    assert find_waits(Timeline(2, ())) == []


@pytest.mark.parametrize("schedule", ["seq1f1b", "terapipe", "seq1f1b-zb", "gpipe"])
def test_waits_fill_what_no_computation_fills(schedule: str) -> None:
    """The waits and the idle ends of the stages are the bubble; and sources are those of a straight pipeline."""
    timeline = simulated(schedule, factor=1.7)
    waits = find_waits(timeline)
    last_s = max(e.end_s for e in timeline.computations())
    ends_s = sum(last_s - max(e.end_s for e in timeline.computations() if e.stage_id == k) for k in range(3))
    idle_s = 3 * timeline.makespan_s - sum(timeline.busy_s())
    assert sum(wait.duration_s for wait in waits) + ends_s == pytest.approx(idle_s, rel=1e-3)
    for wait in waits:
        kind, stage_id = wait.before.kind, wait.stage_id
        if wait.source is None:
            assert (kind, stage_id) == ("F", 0)
        elif kind == "F":
            assert (wait.source.kind, wait.source.stage_id) == ("F", stage_id - 1)
        elif kind == "B":
            expected = ("F", 2) if stage_id == 2 else ("B", stage_id + 1)
            assert (wait.source.kind, wait.source.stage_id) == expected


# --- the bars


def test_bars_are_the_actions() -> None:
    figure = build_interactive([("", two_stages())])
    bars = {
        (trace["kind"], row): (base, width, unit)
        for trace in figure["traces"]
        for row, base, width, unit in zip(trace["y"], trace["base"], trace["x"], trace["customdata"], strict=True)
    }
    assert bars[("F", "stage 1")] == (2.5, 2.5, [0, 0])
    assert bars[("B", "stage 0")] == (8, 4, [0, 0])
    assert bars[("wait", "stage 0")] == (2, 6, [0, 0])
    assert (figure["rows"], figure["unit"]) == (["stage 0", "stage 1"], "s")


def test_measured_rows_are_beside_predicted_ones_and_tell_the_ratio() -> None:
    slower = two_stages(zero_s=0)
    slower = Timeline(2, tuple(event(e.stage_id, e.action, 2 * e.start_s, 2 * e.end_s) for e in slower.events))
    figure = build_interactive([("predicted", two_stages()), ("<measured>", slower)])
    assert figure["rows"] == [f"stage {k} {name}" for k in (0, 1) for name in ("predicted", "&lt;measured&gt;")]
    texts = [text for trace in figure["traces"] for text in trace["hovertext"]]
    (told,) = [text for text in texts if text.startswith("<b>B0.0</b>, stage 0, &lt;measured&gt;")]
    assert "micro-batch 0, slice 0" in told
    assert "8 s, from 16 s to 24 s" in told
    assert "predicted: 4 s, 2.00 times as long" in told
    assert "after a wait of 12 s for B0.0 of stage 1" in told
    assert not any("times as long" in text for text in texts if ", predicted" in text)


def test_too_many_bars_and_none() -> None:
    with pytest.raises(TimelineError, match="hold no F, B or W"):
        build_interactive([("", Timeline(2, ()))])
    many = Timeline(1, tuple(event(0, f"F{i}.0", i, i + 1) for i in range(30_001)))
    with pytest.raises(TimelineError, match="30001 actions are more than a browser draws well .*--perfetto"):
        build_interactive([("", many)])


# --- the page


def test_the_page_needs_nothing_else() -> None:
    plotly = pytest.importorskip("plotly.offline", reason="needs the extra plot")
    titled = [("</script><b>", simulated()), ("measured", simulated(factor=1.3))]
    page = timeline_page(titled, "A <step>")
    packed = re.search(r'<script type="text/plain" id="plotly-packed">([^<]*)</script>', page)
    assert packed is not None
    assert gzip.decompress(base64.b64decode(packed[1])).decode() == plotly.get_plotlyjs()
    own = page.replace(packed[1], "")
    assert "http:" not in own and "https:" not in own and " src=" not in own and "<link" not in own
    assert "default-src 'none'" in own
    assert own.count("<script") == own.count("</script>") == 3, "a title cannot end a script"
    figure = re.search(r'<script type="application/json" id="timeline-figure">([^<]*)</script>', own)
    assert figure is not None
    assert json.loads(figure[1]) == build_interactive(titled)
    assert len(page) < 2_500_000


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TimelineError, match="needs plotly: pip install matplotlib jinja2 plotly"):
        timeline_page([("", simulated())], "a step")


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="looks at the page in a headless Chromium")
def test_a_browser_draws_and_filters(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="needs the extra plot")
    timeline = simulated()
    page = timeline_page([("", timeline)], "a step")
    look = """<script>
      window.addEventListener("error", (error) => document.body.append("failed: " + error.message));
      const timer = setInterval(() => {
        const plot = document.querySelector(".plot.js-plotly-plot");
        if (!plot || !plot.querySelector(".point path")) return;
        clearInterval(timer);
        const select = document.querySelector("select[name=micro_batch]");
        select.value = "1"; select.dispatchEvent(new Event("change"));
        const faded = plot.data.flatMap((trace) => trace.marker.opacity).filter((opacity) => opacity < 1).length;
        document.body.append(`drawn ${plot.querySelectorAll(".point").length}, faded ${faded}.`);
      }, 50);
    </script></body>"""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", look))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    waits = find_waits(timeline)
    drawn = [*timeline.computations(), *(wait.before for wait in waits)]
    faded = [each for each in drawn if each.micro_batch_id != 1]
    assert f"drawn {len(drawn)}, faded {len(faded)}." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


# --- Perfetto


def test_two_timelines_in_a_trace_have_processes_of_their_own() -> None:
    predicted, measured = simulated(), two_stages()
    rows = json.loads(to_chrome_trace(predicted, "predicted", ("measured", measured)))["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {0: "predicted stages", 1: "predicted links", 2: "measured stages"}
    boxes = [row for row in rows if row["ph"] == "X" and row["pid"] == 2]
    assert [(row["name"], row["tid"], row["ts"], row["dur"]) for row in boxes] == [
        (e.action, e.stage_id, pytest.approx(1e6 * (e.start_s - 100)), pytest.approx(1e6 * (e.end_s - e.start_s)))
        for e in measured.events
    ]
    alone = json.loads(to_chrome_trace(predicted))["traceEvents"]
    ours = [row for row in rows if row["pid"] < 2 and row["name"] != "process_name"]
    assert ours == [row for row in alone if row["name"] != "process_name"]


def test_the_command_writes_page_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly", reason="needs the extra plot")
    simulated().save(tmp_path / "predicted.json")
    simulated(factor=1.3).save(tmp_path / "measured.json")
    html, trace = tmp_path / "step.html", tmp_path / "trace.json"
    paths = [str(tmp_path / "measured.json"), "--html", str(html), "--perfetto", str(trace)]
    assert cli.main(["timeline", *paths]) in (None, 0)
    assert "makespan" in capsys.readouterr().out
    assert "stage 2 measured" not in html.read_text()
    cli.main(["timeline", *paths, "--against", str(tmp_path / "predicted.json")])
    assert "median ratio" in capsys.readouterr().out
    assert "stage 2 measured" in html.read_text()
    pids = {row["pid"] for row in json.loads(trace.read_text())["traceEvents"]}
    assert pids == {0, 1, 2, 3}
