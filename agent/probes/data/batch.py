"""The batch: what this rank trains on in a step."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from rankscope.agent.model.facts import core, held
from rankscope.agent.probes.base import Context, Probe, StepFacts, processor_time
from rankscope.agent.probes.data.given import is_whole, rows_of, rows_stored, tensors_in, wide
from rankscope.agent.probes.data.moments import InputMoments
from rankscope.agent.probes.data.rows import Hashes, RowHashes, packed
from rankscope.agent.probes.digests import FEW_BYTES, RunningDigest, bytes_of, few_of, is_dense
from rankscope.agent.probes.numbers_in_transit import Arrival, Together
from rankscope.agent.probes.tables import readable
from rankscope.agent.wire import BATCH_PART

_STAGE = "batch"
# Micro-batches of which samples are reported.
_MAX_WAITING = 256
# Elements that say how large the inputs are: where they are independent, their root mean square
# has an error of 1 % (1 over the root of twice their number), far below what is asked of it.
_MEASURED = 4096
# Samples that are held against each other.
_COMPARED = 64


class Batch(Probe):
    """The digests `batch` and `batch/part`, which samples are in it, their number and size.

    The series are `samples`, `tokens`, `input_rms`, `input_spread`, `input_moments/...`,
    `token_moments/...`, `sample_elements`, `samples_stored`, `loader_batches` and `loader_workers`.

    Costs one pass over what the root module is given (tier `word`), at the moment it is given:
    a trainer may use the same memory for the next batch. At the steps in between at which `basic`
    is due (`signals`, where it is on a device), a pass over up to 16 KiB, or over 2 KiB from all
    over it.

    The digest covers all tensors in the arguments of the root module, in order; under accumulation
    those of all micro-batches, in order. Of more than 16 KiB it is taken at the tier `word` alone,
    and `batch/part` covers elements from all over them, the same ones of the same shapes: batches
    are in an order that repeats, or are another rank's, for a few steps only, which are seen where
    each of them is sampled. The digests `rows/0` and on identify a few samples of the step
    (`RowHashes`), so that ranks that read the same ones can be found. Samples are the rows of the
    first tensor, tokens the elements of the first one of whole numbers with two dimensions; those
    of all micro-batches together. `input_rms` is the root mean square of the first tensor of
    floating point numbers, over up to 4,096 elements from all over it, the mean over the
    micro-batches: inputs that one rank scales otherwise show in it where a normalisation layer
    hides them from loss and gradient. `sample_elements` is the number of elements of a sample in
    the first tensor: of sequences their length shows in it. `samples_stored` is how many samples
    the memory holds of which that tensor is a view, posted where it is a part of it, and
    `loader_batches` the number of batches of the DataLoader that training iterates over, where its
    batches are of this size: what there is to be learned from beside this batch; `loader_workers`
    is the number of its processes, where it has some. `input_spread` is
    how far the samples of the batch scatter around their mean, relative to their root mean square,
    of the same tensor as `input_rms` and over up to 64 samples, 64 numbers or more from all over
    each: 0 where all are alike.
    `input_moments/0` to `/11` say how the inputs are distributed, and `token_moments/0` to `/11`
    the same of whole numbers (`InputMoments.of`): ranks that read the same kind of data have the
    same ones, but for chance. Passes
    without gradients do not count, nor do those in evaluation mode as long as that is not the mode
    in which the steps are taken.
    """

    name = "batch"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._core = core(context.model)
        self._digest = RunningDigest(_STAGE)
        self._part = RunningDigest(BATCH_PART)
        self._row_hashes = RowHashes()
        self._rows: list[Hashes | Arrival] = []
        self._seen = 0
        self._whole = 0  # of them, those at which the tier `word` was due
        self._samples = 0
        self._tokens = 0
        # Of the last micro-batch.
        self._elements = self._stored = self._batches = self._workers = 0
        self._sizes: list[torch.Tensor] = []
        self._spreads: list[torch.Tensor] = []
        self._of_inputs = InputMoments()
        self._moments: dict[str, list[torch.Tensor]] = {}
        self._seconds = 0.0

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Digests what the model is given."""
        context = self.context
        if not torch.is_grad_enabled() or not context.trains(self._core):
            return
        clock = processor_time if context.word else time.perf_counter
        began = clock()
        given = [t for t in tensors_in(args, kwargs) if readable(t)]
        if not given:
            return
        tensors = [held(t) for t in given]
        whole = context.word
        if not (whole or context.signals or all(t.is_cpu for t in tensors)):
            return
        self._seen += 1
        few = bytes_of(tensors) <= FEW_BYTES
        if whole or few:
            self._digest.add(tensors)
        if not few:
            part = few_of(tensors)
            if part is not None:
                self._part.add(part)
        if whole:
            self._whole += 1
            self._count(given, tensors[0])
            self._measure(tensors)
            moments = self._of_inputs.of(tensors)
            if moments is not None and self._whole <= _MAX_WAITING:
                self._moments.setdefault(moments[0], []).append(moments[1])
            if len(self._rows) < _MAX_WAITING:
                rows = self._row_hashes.begin(tensors[0])
                if rows is not None:
                    self._rows.append(rows)
            self._seconds += clock() - began
        else:
            context.aside += clock() - began

    def after_step(self, facts: StepFacts) -> None:
        """Reports what the micro-batches of the step were."""
        seen, whole = self._seen, self._whole
        if not seen:
            return
        self._seen = self._whole = 0
        # What only some of the micro-batches are in says nothing of the step.
        for digest in (self._digest, self._part):
            if digest.seen == seen:
                digest.end(facts)
            elif digest.seen:
                digest.end(StepFacts(facts.step))
        sizes, self._sizes = self._sizes, []
        spreads, self._spreads = self._spreads, []
        moments, self._moments = self._moments, {}
        if not whole:
            return
        for series, found in moments.items():
            if len(found) == whole:
                mean = torch.stack(found).mean(0) if whole > 1 else found[0]
                for number, moment in enumerate(mean.tolist() if mean.is_cpu else mean.unbind()):
                    facts.scalars[f"{series}/{number}"] = moment
        if sizes and len(sizes) < _MAX_WAITING:
            facts.scalars["input_rms"] = torch.stack(sizes).mean() if len(sizes) > 1 else sizes[0]
        if spreads and len(spreads) < _MAX_WAITING:
            facts.scalars["input_spread"] = torch.stack(spreads).amax()
        facts.charge("word", self._seconds)
        rows = self._rows
        facts.scalars["samples"] = self._samples
        for series, value in (
            ("tokens", self._tokens),
            ("sample_elements", self._elements),
            ("samples_stored", self._stored),
            ("loader_batches", self._batches),
            ("loader_workers", self._workers),
        ):
            if value:
                facts.scalars[series] = value
        self._samples = self._tokens = self._elements = 0
        self._stored = self._batches = self._workers = 0
        self._rows, self._seconds = [], 0.0
        if rows and len(rows) < _MAX_WAITING:
            arriving = (r for r in rows if isinstance(r, Arrival))
            facts.when_ready(Together(*arriving), lambda: facts.digests.update(packed(rows)))

    def _count(self, given: list[torch.Tensor], held: torch.Tensor) -> None:
        first = given[0]
        rows = rows_of(first)
        self._samples += rows
        if rows:
            self._elements = held.numel() // rows
            stored = rows_stored(held)
            self._stored = stored if stored > rows else 0
            size, batches, self._workers = self.context.loader
            self._batches = batches if size == rows else 0
        for tensor in given:
            if tensor.dim() == 2 and is_whole(tensor):
                self._tokens += tensor.numel()
                break

    def _measure(self, tensors: list[torch.Tensor]) -> None:
        """Takes the root mean square of the first input that is made of real numbers."""
        first = next((t for t in tensors if t.is_floating_point() and t.element_size() > 1), None)
        if first is None or not first.numel() or len(self._sizes) >= _MAX_WAITING:
            return
        with torch.no_grad():
            if rows_of(first) > 1:
                self._spreads.append(_spread(first))
            step = -(-first.numel() // _MEASURED)
            if step > 1:
                if not is_dense(first):
                    return
                # Odd: no column of an image again and again.
                step |= 1
                first = first.detach().as_strided((-(-first.numel() // step),), (step,))
            norm = torch.linalg.vector_norm(first, dtype=wide(first.dtype))
            self._sizes.append(norm / math.sqrt(first.numel()))


def _spread(inputs: torch.Tensor) -> torch.Tensor:
    """How far samples lie from their mean, relative to their root mean square; one element."""
    some = inputs.detach()[:_COMPARED].flatten(1) if inputs.dim() > 1 else inputs[:, None]
    # From all over a sample: the border of an image is the same in all of them.
    most = max(_MEASURED // len(some), 1)
    some = some[:, :: -(-some.shape[1] // most) or 1].to(wide(inputs.dtype))
    size = torch.linalg.vector_norm(some).clamp_min(1e-30)
    spread: torch.Tensor = torch.linalg.vector_norm(some - some.mean(0)) / size
    return spread
