import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.schedule import Action, Kind, ScheduleError, build

ids = st.integers(0, 10**6)
kinds = st.sampled_from([Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT])
computations = st.builds(lambda kind, m, s, chunk: Action(kind, m, s, chunk_id=chunk), kinds, ids, ids, ids)


@given(computations)
def test_a_computation_prints_and_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert Action.parse(action.text(with_chunk=True)) == action


@pytest.mark.parametrize(("action", "text"), [
    (Action(Kind.FORWARD, 0, 3), "F0.3"),
    (Action(Kind.BACKWARD, 1, 0, 5, 1), "B1.0c1"),
    (Action(Kind.LOAD, 4), "L4"),
    (Action(Kind.SEND_ACTIVATION, 0, 3, peer_stage_id=1, peer_part_id=1), "SA0.3>1"),
    (Action(Kind.RECV_GRAD, 2, 1, chunk_id=1, peer_stage_id=3, peer_part_id=7), "RG2.1c1<3"),
    (Action(Kind.OPTIMIZER_STEP), "ST"),
])  # fmt: skip
def test_actions_print_short(action: Action, text: str) -> None:
    assert str(action) == text


OTHER_TEXT = ["F" + "9" * 5000 + ".0", "", "F0.0 ", "F0.0\n"]
OTHER_TEXT += ["F", "F0", "F0.", "f0.0", "F0.0c", "F-1.0", "F01.0", "X0.0", "SA0.3>1", "F٣.0", "F1e3.0"]


@pytest.mark.parametrize("text", OTHER_TEXT)
def test_other_text_does_not_parse(text: str) -> None:
    with pytest.raises(ScheduleError, match="cannot read"):
        Action.parse(text)


def test_schedules_are_values() -> None:
    first, second = build("gpipe", 3, 2, 2), build("gpipe", 3, 2, [2, 2])
    assert first == second
    assert hash(first) == hash(second)
    assert first != build("terapipe", 3, 2, 2)
    first.for_stage(0)  # what is cached is no part of the value
    assert first == second == pickle.loads(pickle.dumps(first))
    assert first.for_stage(0) is first.for_stage(0)
    with pytest.raises(AttributeError):
        first.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("stage_id", [-1, 2])
def test_a_stage_that_is_not_there(stage_id: int) -> None:
    schedule = build("gpipe", 2, 1, 1)
    for ask in (schedule.compute_order, schedule.for_stage):
        with pytest.raises(ScheduleError, match=f"no stage {stage_id}: .* 0 to 1"):
            ask(stage_id)


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ScheduleError("why", "grid")))
    assert (error.reason, error.picture, str(error)) == ("why", "grid", "why\ngrid")
