"""Mean Gram matrices E[z zᵀ] of the inputs of linear layers, one batch after another."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.files.checkpoints.json_file import shorten
from covmerge.plan.statistics.examples import LABELS, Batch, masks_of, single
from covmerge.plan.statistics.model import ObservedLayer, RunningModel
from covmerge.plan.statistics.write import Statistic

# The diagonal Fisher information of a model with a head, summed over single examples.

Labels = Literal["model", "data"]

_EXACT_LABELS = 20  # each label takes a backward pass; with more labels, one is drawn
_IGNORED = -100  # a position without a label, as in transformers


class FisherCollector:
    """Sums F = Σ_y p(y|x) (∂ log p(y|x) / ∂θ)² over examples, in float64.

    Merging Models with Fisher-Weighted Averaging (Matena & Raffel 2022), §3, for each example:

    - a classifier of at most 20 labels: the sum over all labels, exactly;
    - more labels, or one label per token (language models, taggers): labels drawn from the model's
      own distribution, once per example and position, which is unbiased;
    - a regression: y ~ N(f(x), 1), so (∂f)², exactly;
    - `labels="data"`: the labels of the examples instead of the model's ("empirical Fisher"); for a
      language model without `labels`, the next tokens of the text.

    Padding positions have no label.
    """

    def __init__(self, model: RunningModel, *, labels: Labels, seed: int) -> None:
        self._model = model
        self.labels: Labels = labels
        self._generator = torch.Generator().manual_seed(seed)
        self._parameters = model.parameters()
        self._sums = {
            name: torch.zeros_like(parameter, dtype=torch.float64, requires_grad=False)
            for name, parameter in self._parameters.items()
        }
        self._examples = 0
        model.whole.requires_grad_(False)
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)

    def add(self, batch: Batch) -> None:
        """Add every example of a batch separately."""
        terms_of = self._data if self.labels == "data" else self._from_model
        for example in single(batch):
            with torch.enable_grad():
                terms = terms_of(_logits(self._model, example), example)
            for left, (weight, log_p) in zip(reversed(range(len(terms))), terms, strict=True):
                self._add_square(weight, log_p, keep=left > 0)
            self._examples += 1

    def statistics(self) -> list[Statistic]:
        return [Statistic((name,), total, self._examples) for name, total in self._sums.items()]

    def notes(self) -> list[str]:
        packed = self._model.packed_parameters()
        if not packed:
            return []
        return [
            f"{some(packed, 1, quoted=True)}: stored in other pieces than the model's, so without "
            "Fisher information"
        ]

    def _add_square(self, weight: float, log_p: Tensor, *, keep: bool) -> None:
        gradients: Any = torch.autograd.grad(
            log_p, list(self._parameters.values()), retain_graph=keep, allow_unused=True
        )
        for total, gradient in zip(self._sums.values(), gradients, strict=True):
            if gradient is not None:
                total.add_(gradient.double().square_(), alpha=weight)

    def _from_model(self, logits: Tensor, example: Batch) -> list[tuple[float, Tensor]]:
        """Return pairs of p(y|x) and log p(y|x), for all labels y, or the weight 1 and a drawn label's."""
        if logits.shape[-1] == 1:
            return [(1.0, logits.sum())]
        log_p = logits.flatten(0, -2).log_softmax(-1)
        if logits.ndim == 2 and logits.shape[-1] <= _EXACT_LABELS:
            return [(float(term.detach().exp()), term) for term in log_p[0]]
        positions = _positions(logits, example)
        log_p = log_p if positions is None else log_p[positions]
        drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=self._generator)
        return [(1.0, log_p.gather(1, drawn.to(log_p.device)).sum())]

    def _data(self, logits: Tensor, example: Batch) -> list[tuple[float, Tensor]]:
        """Return the weight 1 and log p(y|x) of the example's own label y."""
        labels = self._labels_of(logits, example).to(logits.device)
        if logits.shape[-1] == 1:
            return [(1.0, -0.5 * (labels - logits[:, 0]).square().sum())]
        if logits.ndim == 3 and _predicts_next(self._model):
            seen = _positions(logits, example)
            if seen is not None:  # what stands behind padding on the left is predicted from nothing
                labels = labels.masked_fill(~seen.roll(1), _IGNORED)
            logits, labels = logits[:, :-1], labels[:, 1:]
        labels = labels.flatten()
        whole = labels.long()
        strange = labels[whole != labels]  # this includes NaN
        if len(strange):
            raise InputError(
                f"an example has the label {shorten(strange[0].item())}, and "
                f"{self._model.checkpoint.source} has {logits.shape[-1]} classes, numbered from 0: correct "
                "the labels"
            )
        labels = whole
        counted = labels != _IGNORED
        if not bool(((labels >= 0) & (labels < logits.shape[-1]) | ~counted).all()):
            raise InputError(
                f"{self._model.checkpoint.source} has {logits.shape[-1]} labels, numbered from 0, and "
                f"an example has the label {int(labels[counted].max())}: correct the labels"
            )
        log_p = logits.flatten(0, -2)[counted].log_softmax(-1)
        return [(1.0, log_p.gather(1, labels[counted, None]).sum())]

    def _labels_of(self, logits: Tensor, example: Batch) -> Tensor:
        labels = example.get(LABELS)
        if labels is None and logits.ndim == 3 and _predicts_next(self._model):
            positions = _positions(logits, example)
            labels = example["input_ids"].flatten().clone()
            if positions is not None:
                labels[~positions.cpu()] = _IGNORED
            labels = labels[None]
        if labels is None or labels.shape != logits.shape[:-1]:
            found = "no labels" if labels is None else f"labels {list(labels.shape)}"
            raise InputError(
                f"an example has {found}, and the model's logits are {list(logits.shape)}: label the "
                f"examples, or take the model's own labels ({Hint('labels', 'model')})"
            )
        return labels


def _logits(model: RunningModel, example: Batch) -> Tensor:
    source, architecture = model.checkpoint.source, model.skeleton.architecture
    logits: Any = getattr(model.run(example, head=True), "logits", None)
    shape = None if not isinstance(logits, Tensor) else list(logits.shape)
    if shape is None or len(shape) not in (2, 3) or (len(shape) == 3 and shape[-1] == 1):
        raise InputError(
            f"{source} is a {architecture}, which gives "
            f"{'no logits' if shape is None else f'logits {shape}'}: Fisher information needs a "
            "classifier, a tagger or a language model"
        )
    if getattr(model.whole.config, "problem_type", None) == "multi_label_classification":
        raise InputError(
            f"{source} gives several labels at once (multi_label_classification), for which covmerge "
            "has no Fisher information"
        )
    return cast("Tensor", logits).float()


def _positions(logits: Tensor, example: Batch) -> Tensor | None:
    """Return a mask `(sequence,)` of positions that are not padding; None: there is no such mask."""
    mask = example.get(
        "decoder_attention_mask" if "decoder_input_ids" in example else "attention_mask"
    )
    if logits.ndim != 3 or mask is None or mask.shape != logits.shape[:2]:
        return None
    return mask[0].bool().to(logits.device)


def _predicts_next(model: RunningModel) -> bool:
    return model.skeleton.architecture.endswith(("ForCausalLM", "LMHeadModel"))


_ROUNDING = 1e-12  # a smaller weight counts as 0 with rounding errors


class Weights(Protocol):
    """The weights of a layer's inputs."""

    @property
    def relative(self) -> bool:
        """Whether the weights are used unchanged; otherwise they are scaled to mean 1."""
        ...

    def of(self, layer: ObservedLayer, inputs: Tensor) -> Tensor:
        """Return the weights `(rows,)` of inputs `(rows, d_in)`."""
        ...


class GramCollector:
    """Watches layers and keeps one float64 sum for each distinct input.

    Layers whose first input is the same tensor (q, k and v; gate and up) share a sum, and must
    share their inputs from then on. Inputs at padding positions are not counted if a mask marks
    them: for inputs `(batch, sequence, d_in)` and `(batch · sequence, d_in)`. If inputs have
    weights, which differ between layers, every layer has a separate sum.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> grams = GramCollector([ObservedLayer("fc.weight", layer, 2)])
        >>> with grams.watching({}):
        ...     _ = layer(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        >>> grams.statistics()[0].mean.tolist()
        [[1.0, 1.0], [1.0, 2.0]]
    """

    def __init__(self, layers: Sequence[ObservedLayer], weights: Weights | None = None) -> None:
        self._layers = layers
        self._weights = weights
        self._sums: dict[str, _Sum] = {}
        self._calls: dict[str, int] = {}
        self._taken: set[str] = set()
        self._of_input: dict[int, _Sum] = {}
        self._masks: list[Tensor] = []

    @contextmanager
    def watching(
        self, batch: Batch, layers: Sequence[ObservedLayer] | None = None
    ) -> Generator[None]:
        """Count the inputs of all layers, or of the given ones, while this batch runs."""
        self._masks = masks_of(batch)
        handles = [
            layer.module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer in (self._layers if layers is None else layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._of_input.clear()

    def of(self, name: str) -> Statistic | None:
        """Return the statistic of one layer, or None if it had no inputs."""
        total = self._sums.get(name)
        if total is None or not total.rows:
            return None
        return self._statistic((name,), total)

    def statistics(self, layers: Sequence[ObservedLayer] | None = None) -> list[Statistic]:
        """Return the statistics of some or all layers; layers with the same input have one together."""
        groups: dict[str, list[str]] = {}
        for layer in self._layers if layers is None else layers:
            if self._rows(layer):
                leader = self._sums[layer.name].leader
                groups.setdefault(leader, []).append(layer.name)
                if self._calls[layer.name] != self._calls[leader]:
                    raise _diverged(layer.name, leader)
        return [self._statistic(tuple(n), self._sums[leader]) for leader, n in groups.items()]

    def take(self, layers: Sequence[ObservedLayer]) -> Iterator[Statistic]:
        """Yield the statistics of layers that will not be called again, and release each sum's memory."""
        self._taken.update(layer.name for layer in layers)
        for statistic in self.statistics(layers):
            yield statistic
            total = self._sums[statistic.names[0]]
            # A layer outside of all blocks may share its input with a layer in a block.
            if all(name in self._taken for name, value in self._sums.items() if value is total):
                total.let_go()

    def notes(self) -> list[str]:
        unseen = [layer.name for layer in self._layers if not self._rows(layer)]
        few = [layer for layer in self._layers if 0 < self._rows(layer) < layer.d_in]
        notes: list[str] = []
        if unseen:
            notes.append(
                f"{some(unseen, 1, quoted=True)}: never called on these examples, so without a Gram matrix"
            )
        if few:
            notes.append(
                f"{some((layer.name for layer in few), 1, quoted=True)}: {self._rows(few[0])} inputs for "
                f"{few[0].d_in} dimensions, so the Gram matrix is singular; collect more examples"
            )
        return notes

    def _statistic(self, names: tuple[str, ...], total: _Sum) -> Statistic:
        to_mean_one = self._weights is not None and not self._weights.relative
        if to_mean_one and total.weight <= _ROUNDING * total.rows:
            raise InputError(f"all inputs of '{names[0]}' are of weight 0")
        return Statistic(names, total.value, total.rows, total.weight if to_mean_one else None)

    def _rows(self, layer: ObservedLayer) -> int:
        return self._sums[layer.name].rows if layer.name in self._sums else 0

    def _hook(self, layer: ObservedLayer) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (*args, *kwargs.values())
            inputs = next((value for value in given if isinstance(value, Tensor)), None)
            if inputs is None or inputs.shape[-1] != layer.d_in:
                shape = None if inputs is None else list(inputs.shape)
                raise InputError(
                    f"'{layer.name}' takes inputs of {layer.d_in} dimensions, and its "
                    f"{type(module).__name__} was called with {shape}: covmerge does not know it"
                )
            self._add(layer, inputs)

        return see

    def _add(self, layer: ObservedLayer, inputs: Tensor) -> None:
        name = layer.name
        if name in self._taken:
            raise InputError(
                f"'{name}' is called again behind other blocks: the model runs a block several times"
            )
        if name not in self._sums:
            first = self._of_input.get(id(inputs))
            alike = self._weights is None
            shared = alike and first is not None and first.calls == 1 and first.saw(inputs)
            self._sums[name] = first if first is not None and shared else _Sum(name, inputs)
        current = self._sums[name]
        self._calls[name] = self._calls.get(name, 0) + 1
        if current.leader == name:
            rows = self._rows_that_count(name, inputs)
            weights = None if self._weights is None else self._weights.of(layer, rows)
            current.add(inputs, rows, weights)
            self._of_input[id(inputs)] = current
        elif not current.saw(inputs):
            raise _diverged(name, current.leader)

    def _rows_that_count(self, name: str, inputs: Tensor) -> Tensor:
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        fitting = [mask for mask in self._masks if _fits(mask, inputs)]
        if any(not torch.equal(mask, fitting[0]) for mask in fitting[1:]):
            raise InputError(
                f"'{name}' has inputs {list(inputs.shape)}, and the padding masks of encoder and "
                "decoder both have that shape: pad the two to different lengths, or pass batches of "
                "one example"
            )
        return rows[fitting[0].reshape(-1).to(rows.device)] if fitting else rows


class _Sum:
    """Σ w z zᵀ of one input, with the name of the layer that was first called with it."""

    def __init__(self, leader: str, inputs: Tensor) -> None:
        d_in = inputs.shape[-1]
        self.leader = leader
        self.value = torch.zeros(d_in, d_in, dtype=torch.float64, device=inputs.device)
        self.rows = 0
        self.weight = 0.0
        self.calls = 0
        self._latest = weakref.ref(inputs)
        self._version = inputs._version

    def add(self, inputs: Tensor, rows: Tensor, weights: Tensor | None) -> None:
        if weights is None:
            self.value += rows.mT @ rows
        else:
            self.value += (rows.mT * weights) @ rows
            self.weight += float(weights.double().sum())
        self.rows += len(rows)
        self.calls += 1
        self._latest, self._version = weakref.ref(inputs), inputs._version

    def let_go(self) -> None:
        self.value = self.value.new_empty(0)

    def saw(self, inputs: Tensor) -> bool:
        """Return whether a tensor is the one that was added last, unchanged."""
        return self._latest() is inputs and self._version == inputs._version


def _fits(mask: Tensor, inputs: Tensor) -> bool:
    if inputs.ndim == 3:
        return inputs.shape[:2] == mask.shape
    return inputs.ndim == 2 and inputs.shape[0] == mask.numel()


def _diverged(name: str, leader: str) -> InputError:
    return InputError(
        f"'{name}' and '{leader}' have the same input in some calls and different ones in others: "
        "covmerge cannot collect such a model"
    )
