"""The diagonal Fisher information of a model with a head, one example after another."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.files.checkpoints.json_file import shorten
from covmerge.plan.statistics.examples import LABELS, Batch, single
from covmerge.plan.statistics.model import RunningModel
from covmerge.plan.statistics.write import Statistic

Labels = Literal["model", "data"]

_EXACT_LABELS = 20  # a backward pass each; with more, one is drawn
_IGNORED = -100  # as in transformers: a position without a label


class FisherCollector:
    """Sums F = Σ_y p(y|x) (∂ log p(y|x) / ∂θ)² over examples, in float64.

    Merging Models with Fisher-Weighted Averaging (Matena & Raffel 2022), §3, per example:

    - a classifier of at most 20 labels: the sum over all labels, exactly;
    - more labels, or one label per token (language models, taggers): labels drawn from the model's
      own distribution, once an example and position, which is right in expectation;
    - a regression: y ~ N(f(x), 1), so (∂f)², exactly;
    - `labels="data"`: the labels of the examples instead of the model's ("empirical Fisher"); for a
      language model without `labels`, the next tokens of the text.

    Padding positions carry no label.

    Args:
        model: the model with its head.
        labels: `model` or `data`.
        seed: of the drawn labels.
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
        """Add every example of a batch by itself.

        Raises:
            InputError: the model gives no logits, or an example lacks a label that is needed.
        """
        terms_of = self._data if self.labels == "data" else self._from_model
        for example in single(batch):
            with torch.enable_grad():
                terms = terms_of(_logits(self._model, example), example)
            for left, (weight, log_p) in zip(reversed(range(len(terms))), terms, strict=True):
                self._add_square(weight, log_p, keep=left > 0)
            self._examples += 1

    def statistics(self) -> list[Statistic]:
        """Return the statistics of every parameter of the backbone."""
        return [Statistic((name,), total, self._examples) for name, total in self._sums.items()]

    def notes(self) -> list[str]:
        """Say which parameters have no information here."""
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
        """Weights p(y|x) and log p(y|x), for all labels y or for one that is drawn."""
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
        """Weight 1 and log p(y|x) of the example's own label y."""
        labels = self._labels_of(logits, example).to(logits.device)
        if logits.shape[-1] == 1:
            return [(1.0, -0.5 * (labels - logits[:, 0]).square().sum())]
        if logits.ndim == 3 and _predicts_next(self._model):
            logits, labels = logits[:, :-1], labels[:, 1:]
        labels = labels.flatten()
        whole = labels.long()
        strange = labels[whole != labels]  # NaN among them
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
    """Which positions `(sequence,)` are no padding; None where no mask says it."""
    mask = example.get(
        "decoder_attention_mask" if "decoder_input_ids" in example else "attention_mask"
    )
    if logits.ndim != 3 or mask is None or mask.shape != logits.shape[:2]:
        return None
    return mask[0].bool().to(logits.device)


def _predicts_next(model: RunningModel) -> bool:
    return model.skeleton.architecture.endswith(("ForCausalLM", "LMHeadModel"))
