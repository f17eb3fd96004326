"""The probes: one family of signals a file. The order is that in which they are asked."""

from rankscope.agent.probes.activations import Activations
from rankscope.agent.probes.amp import Amp
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.batch import Batch
from rankscope.agent.probes.buffers import Buffers
from rankscope.agent.probes.canary import Canary
from rankscope.agent.probes.clipping import Clipping
from rankscope.agent.probes.cosine import GradientCosine
from rankscope.agent.probes.frozen import FrozenParameters
from rankscope.agent.probes.gradients import Gradients
from rankscope.agent.probes.layers import LayerNorms
from rankscope.agent.probes.local_gradients import LocalGradients
from rankscope.agent.probes.loss import Loss
from rankscope.agent.probes.memory import Memory
from rankscope.agent.probes.mode import Mode
from rankscope.agent.probes.moved import MovedWithoutStep
from rankscope.agent.probes.nonfinite import NonFinite
from rankscope.agent.probes.optimizer import LearningRate
from rankscope.agent.probes.optimizer_state import OptimizerState
from rankscope.agent.probes.outputs import Outputs
from rankscope.agent.probes.outside import OutsideOptimizer
from rankscope.agent.probes.outside_writes import OutsideWrites
from rankscope.agent.probes.parameters import Parameters
from rankscope.agent.probes.precision import Precision
from rankscope.agent.probes.rng import RandomState
from rankscope.agent.probes.run_queue_delay import RunQueueDelay
from rankscope.agent.probes.scheduler import Scheduler
from rankscope.agent.probes.settings import Settings
from rankscope.agent.probes.stale_gradients import StaleGradients
from rankscope.agent.probes.state_changes import StateChanges
from rankscope.agent.probes.timing import CollectiveWait, Timing
from rankscope.agent.probes.unreduced import UnreducedGradients
from rankscope.agent.probes.watched import WatchedModules

# Timing first: what the others take must not count as the trainer's step.
PROBES: tuple[type[Probe], ...] = (
    Timing,
    RunQueueDelay,
    Memory,
    OutsideWrites,
    StateChanges,
    Batch,
    Loss,
    Mode,
    Precision,
    LearningRate,
    Scheduler,
    Settings,
    Amp,
    Clipping,
    StaleGradients,
    UnreducedGradients,
    Canary,
    LocalGradients,
    CollectiveWait,
    Gradients,
    GradientCosine,
    Parameters,
    MovedWithoutStep,
    FrozenParameters,
    LayerNorms,
    OutsideOptimizer,
    NonFinite,
    Activations,
    Outputs,
    OptimizerState,
    Buffers,
    RandomState,
    WatchedModules,
)

__all__ = ["PROBES", "Context", "Probe", "StepFacts"]
