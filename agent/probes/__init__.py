"""The probes: one family of signals a file. The order is that in which they are asked."""

from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.data.batch import Batch
from rankscope.agent.probes.data.rng import RandomState
from rankscope.agent.probes.data.seeding import Seeding
from rankscope.agent.probes.gradients.applied import Gradients
from rankscope.agent.probes.gradients.canary import Canary
from rankscope.agent.probes.gradients.clipping import Clipping
from rankscope.agent.probes.gradients.cosine import GradientCosine
from rankscope.agent.probes.gradients.local import LocalGradients
from rankscope.agent.probes.gradients.stale import StaleGradients
from rankscope.agent.probes.gradients.unreduced import UnreducedGradients
from rankscope.agent.probes.loss.training import Loss
from rankscope.agent.probes.machine.memory import Memory
from rankscope.agent.probes.machine.run_queue_delay import RunQueueDelay
from rankscope.agent.probes.machine.timing import CollectiveWait, Timing
from rankscope.agent.probes.modules.activations import Activations
from rankscope.agent.probes.modules.first_layer import FirstLayer
from rankscope.agent.probes.modules.frozen_layers import FrozenLayers
from rankscope.agent.probes.modules.initial_gain import InitialGain
from rankscope.agent.probes.modules.layers import LayerNorms
from rankscope.agent.probes.modules.mode import Mode
from rankscope.agent.probes.modules.nonfinite import NonFinite
from rankscope.agent.probes.modules.outputs import Outputs
from rankscope.agent.probes.modules.without_gradient import WithoutGradient
from rankscope.agent.probes.optimizer.amp import Amp
from rankscope.agent.probes.optimizer.learning_rate import LearningRate
from rankscope.agent.probes.optimizer.precision import Precision
from rankscope.agent.probes.optimizer.scheduler import Scheduler
from rankscope.agent.probes.optimizer.settings import Settings
from rankscope.agent.probes.optimizer.state import OptimizerState
from rankscope.agent.probes.optimizer.state_changes import StateChanges
from rankscope.agent.probes.parameters.buffers import Buffers
from rankscope.agent.probes.parameters.frozen import FrozenParameters
from rankscope.agent.probes.parameters.moved import MovedWithoutStep
from rankscope.agent.probes.parameters.not_in_optimizer import OutsideOptimizer
from rankscope.agent.probes.parameters.outside_writes import OutsideWrites
from rankscope.agent.probes.parameters.trained import Parameters
from rankscope.agent.probes.parameters.watched import WatchedModules

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
    WithoutGradient,
    FrozenLayers,
    FirstLayer,
    InitialGain,
    OptimizerState,
    Buffers,
    RandomState,
    Seeding,
    WatchedModules,
)

__all__ = ["PROBES", "Context", "Probe", "StepFacts"]
