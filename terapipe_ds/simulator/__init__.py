"""Time a schedule: replay the schedule that the engine runs, with costs instead of work."""

from __future__ import annotations

from terapipe_ds.simulator.costs import SimulationError as SimulationError
from terapipe_ds.simulator.costs import UnitCosts as UnitCosts
from terapipe_ds.simulator.few import Outcome as Outcome
from terapipe_ds.simulator.few import ScheduleShape as ScheduleShape
from terapipe_ds.simulator.few import replay_few as replay_few
from terapipe_ds.simulator.replay import Replay as Replay
from terapipe_ds.simulator.replay import simulate as simulate
