"""Routers of merged mixtures of experts: as merged, averaged, the base's, and calibrated by HARC.

    python -m benchmarks.routers --cache DIR

Trains two of the bank's sets of a mixture, full fine-tunes by AdamW and by SGD, where they are not in the
cache. Scores are means over the tasks that their experts learnt: accuracy in %, the loss of the answer, and
how many of a token's experts are those that the task's own model chooses, in %. Gains are beside the
routers as merged. Task Arithmetic's scale is chosen by accuracy on training examples. The table is printed,
and put into results/routers.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

import covmerge
from covmerge import Generated
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics.examples import Batch, Reading
from covmerge.plan.statistics.model import load_model
from covmerge_lab.bank import bases, cards, data, experts, pretraining, scoring
from covmerge_lab.bank.architectures import PAD
from covmerge_lab.harc import calibrate

RESULTS = Path(__file__).parent / "results" / "routers.json"
SETS = ("moe-1", "moe-3")
EXAMPLES = 64  # inputs of each expert
SCALES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_LEARNT = 0.05  # above the base: as the bank counts


@dataclass(frozen=True)
class Scores:
    """What a model does on each task.

    Attributes:
        right: 1 for each test example that is answered right, 0 for the others, `(tasks, examples)`.
        loss: of the answer, `(tasks,)`.
        agreement: how many of a token's experts are those of the task's own model, `(tasks,)`.
    """

    right: Tensor
    loss: Tensor
    agreement: Tensor

    @classmethod
    def of(cls, each: Sequence[Scores]) -> Scores:
        return cls(*(torch.stack([getattr(one, f.name) for one in each]) for f in fields(cls)))

    def row(self, before: Scores | None = None) -> dict[str, float | list[float]]:
        """Return means over tasks, and what is gained beside another with an interval of 95 %."""
        found: dict[str, float | list[float]] = {
            "accuracy": round(100 * float(self.right.mean()), 3),
            "loss": round(float(self.loss.mean()), 4),
            "agreement": round(100 * float(self.agreement.mean()), 3),
        }
        if before is not None:
            gained = 100 * (self.right - before.right)
            tasks, examples = gained.shape
            error = float((gained.var(dim=1) / examples).sum().sqrt()) / tasks
            ends = [float(gained.mean()) + times * error for times in (0.0, -1.96, 1.96)]
            found["gained"] = [round(end, 3) for end in ends]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="Folder of the bank")
    parser.add_argument("--set", choices=SETS, help="One set only; the others' figures are kept")
    asked = parser.parse_args()
    new = {name: measured(name, asked.cache) for name in ([asked.set] if asked.set else SETS)}
    for name, scored in new.items():
        print(markdown(name, scored))
    found = (json.loads(RESULTS.read_text())["sets"] if RESULTS.exists() else {}) | new
    result = {
        "command": "python -m benchmarks.routers --cache DIR",
        "transformers": version("transformers"),
        "sets": {name: found[name] for name in SETS if name in found},
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


class Judge:
    """The tests of one set, and where its experts send their tokens."""

    def __init__(self, card: cards.Card, cache: Path) -> None:
        self.judge = scoring.judge(card, cache)
        self.base = pretraining.folder_of(self.judge.base, cache)
        self.models = scoring.models(card, cache)
        bounds = scoring.bounds(self.judge)
        least = {
            n: max(bounds["base"][n] + _LEARNT, always) for n, always in bounds["always"].items()
        }
        self.tasks = [name for name in least if bounds["experts"][name] >= least[name]]
        own = {name: self._run(self.load(self.models[name]), name) for name in self.tasks}
        self.routed = {name: routed for name, (_, routed) in own.items()}
        self.own = Scores.of([self._on(*found, name) for name, found in own.items()])

    def load(self, folder: Path) -> Any:
        return bases.load(self.judge.base, folder).float().eval()

    def scores(self, net: Any) -> Scores:
        return Scores.of([self.on(net, name) for name in self.tasks])

    def on(self, net: Any, name: str) -> Scores:
        return self._on(*self._run(net, name), name)

    def _on(self, logits: Tensor, routed: Tensor, name: str) -> Scores:
        _, wanted, _ = self.judge.tests[name]
        same = (routed[..., None] == self.routed[name][..., None, :]).any(dim=-1)
        right = (logits.argmax(dim=1) == wanted).float()
        return Scores(right, cross_entropy(logits, wanted), same.float().mean())

    def _run(self, net: Any, name: str) -> tuple[Tensor, Tensor]:
        """Return logits, and which experts each token of a task goes to `(layers, tokens, chosen)`."""
        inputs, *_ = self.judge.tests[name]
        found: list[Tensor] = []
        handles = [
            gate.register_forward_hook(lambda module, given, out: found.append(out[2]))
            for gate in gates(net)
        ]
        with torch.inference_mode():
            logits = bases.next_tokens(net, inputs)
        for handle in handles:
            handle.remove()
        return logits, torch.stack(found)[:, (inputs != PAD).flatten()]

    def shown(self, name: str) -> list[dict[str, Tensor]]:
        """Return batches of training inputs of an expert's task."""
        inputs, _ = self.training(name)
        masks = (inputs != PAD).long()
        pairs = zip(inputs.split(64), masks.split(64), strict=True)
        return [{"input_ids": part, "attention_mask": mask} for part, mask in pairs]

    def training(self, name: str) -> tuple[Tensor, Tensor]:
        base, cache = self.judge.base, self.judge.cache
        (expert,) = (e for e in self.judge.card.experts if e.name == name)
        task = data.tasks(base.kind, cache)[expert.task]
        inputs = bases.encode(base, task, task.train, cache)[:EXAMPLES]
        return inputs, bases.answers(base, task.train.labels[:EXAMPLES], cache)

    def training_accuracy(self, net: Any) -> float:
        total = 0.0
        for name in self.tasks:
            inputs, wanted = self.training(name)
            with torch.inference_mode():
                right = bases.next_tokens(net, inputs).argmax(dim=1) == wanted
            total += float(right.float().mean())
        return total / len(self.tasks)


def gates(net: Any) -> list[Any]:
    return [layer.mlp.gate for layer in net.model.layers]


def measured(name: str, cache: Path) -> dict[str, Any]:
    (card,) = (card for card in cards.cards() if card.name == name)
    experts.train(card, cache)
    judge = Judge(card, cache)
    with tempfile.TemporaryDirectory() as work:
        merges, scale = merged(judge, Path(work))
        inputs = {
            "HARC, inputs of the tasks": {name: judge.shown(name) for name in judge.models},
            "HARC, written by the experts": made(judge, Generated(tokens=bases.LENGTH), Path(work)),
            "HARC, random tokens": made(judge, Generated("random"), Path(work)),
        }
        rows = [
            {"merge": "none: each task's own model", "routers": "its own", **judge.own.row()},
            {
                "merge": "none: the base",
                "routers": "its own",
                **judge.scores(judge.load(judge.base)).row(),
            },
        ]
        for merge, folder in merges.items():
            before = None
            for routers, scores in variants(judge, merges["average"], folder, inputs):
                rows.append({"merge": merge, "routers": routers, **scores.row(before)})
                before = before or scores
                print(rows[-1], flush=True)
    return {"tasks": judge.tasks, "scale of task_arithmetic": scale, "rows": rows}


def merged(judge: Judge, work: Path) -> tuple[dict[str, Path], float]:
    """Merge by average, Task Arithmetic and `auto`; return folders and the scale that was chosen."""

    def merge(method: str, name: str, **parameters: float) -> Path:
        covmerge.merge(judge.base, judge.models, method, work / name, **parameters)
        return work / name

    tried = {scale: merge("task_arithmetic", f"scale-{scale}", scale=scale) for scale in SCALES}
    right = {scale: judge.training_accuracy(judge.load(path)) for scale, path in tried.items()}
    best = max(right, key=lambda scale: right[scale])
    folders = {"average": merge("average", "average"), "task_arithmetic, tuned": tried[best]}
    return {**folders, "auto": merge("auto", "auto")}, best


def made(judge: Judge, inputs: Generated, work: Path) -> dict[str, list[Batch]]:
    """Return what is made for each expert, once for all merges."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge.base, bos_token="<end>")
    tokenizer.save_pretrained(work / "tokenizer")  # which says what a text begins with
    how, found = Reading(max_examples=EXAMPLES, tokenizer=work / "tokenizer"), dict[str, Any]()
    for name, folder in judge.models.items():
        with closing(open_checkpoint(folder)) as checkpoint, torch.no_grad():
            model = load_model(checkpoint, "cpu", head=True)
            found[name] = list(model.batches(inputs, how)[0])
    return found


def variants(
    judge: Judge, average: Path, folder: Path, inputs: Mapping[str, Mapping[str, list[Batch]]]
) -> Iterator[tuple[str, Scores]]:
    """Yield what a merge scores with each kind of routers."""
    yield "as merged", judge.scores(judge.load(folder))
    if folder != average:
        yield "averaged", judge.scores(with_routers(judge, folder, average))
    yield "the base's", judge.scores(with_routers(judge, folder, judge.base))
    for name, given in inputs.items():
        found = calibrate(folder, judge.models, given)
        for note in found.notes:
            print(f"{folder.name}: {note}")
        yield name, judge.scores(found.model.eval())
    own = {task: with_routers(judge, folder, judge.models[task]) for task in judge.tasks}
    yield "each task's own, which no merge has", Scores.of([judge.on(own[n], n) for n in own])


def with_routers(judge: Judge, folder: Path, source: Path) -> Any:
    """Return a model with the routers of another."""
    net = judge.load(folder)
    for gate, other in zip(gates(net), gates(judge.load(source)), strict=True):
        gate.weight.data.copy_(other.weight.data)
    return net


def markdown(name: str, result: Mapping[str, Any]) -> str:
    lines = [
        f"{name}: {len(result['tasks'])} tasks, Task Arithmetic at {result['scale of task_arithmetic']}",
        "| merge | routers | accuracy | gained (95 %) | loss | agreement |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        gained = "{:.1f} ({:.1f} to {:.1f})".format(*row["gained"]) if "gained" in row else ""
        figures = f"{row['accuracy']:.1f} | {gained} | {row['loss']:.3f} | {row['agreement']:.1f}"
        lines.append(f"| {row['merge']} | {row['routers']} | {figures} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
