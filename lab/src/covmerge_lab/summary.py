"""From the outcomes of several seeds to the rows of a table, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from covmerge.run.scoring.values import Interval, Resamples
from covmerge_lab.bench import EXPERTS, Outcome, Scored
from covmerge_lab.merging import TUNED
from covmerge_lab.models import Section
from covmerge_lab.suite import Kind

# covmerge's own methods, which are compared with every other.
OWN = ("auto", "auto_measured")


@dataclass(frozen=True)
class Row:
    """A model of every seed, accuracies in [0, 1].

    Attributes:
        parameters: of the merge of each seed, where they are not at their defaults.
        accuracy: by task, mean over the seeds.
        seeds: mean over the tasks, of each seed.
        mean: over tasks and seeds, with its interval.
        of_experts: mean over the tasks of the accuracy over the expert's, of each seed; tasks of which the
            expert itself gets nothing right are left out, and it is 0 where nothing is left.
        beyond_tuned: the mean less that of tuned Task Arithmetic, on the same examples.
        below: what the rows of covmerge's own methods, by title, are above this one, likewise.
        seconds: of the method's mathematics, mean.
        measures: what else was measured, mean.
    """

    section: Section
    title: str
    method: str | None
    parameters: Sequence[Mapping[str, Any]]
    accuracy: Mapping[str, float]
    seeds: Sequence[float]
    mean: Interval
    of_experts: Sequence[float]
    beyond_tuned: Interval | None
    below: Mapping[str, Interval]
    seconds: float | None
    measures: Mapping[str, float]

    @property
    def share(self) -> float:
        """Mean over seeds and tasks of the accuracy over the expert's."""
        return fmean(self.of_experts)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the mean over the seeds; None of a single one."""
        return stdev(self.seeds) if len(self.seeds) > 1 else None

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON."""
        return {**asdict(self), "section": self.section.value, "spread": self.spread}


@dataclass(frozen=True)
class Group:
    """The table of one kind of experts and one choice of tasks.

    Attributes:
        variants: the seeds, as `full-0`.
        examples: test examples by task.
        rows: section by section, the best first in each.
        remark: what else is to be said of the experts.
    """

    kind: Kind
    variants: tuple[str, ...]
    tasks: tuple[str, ...]
    examples: Mapping[str, int]
    rows: tuple[Row, ...]
    remark: str = ""

    @property
    def title(self) -> str:
        """What stands over the table."""
        experts = {"full": "full fine-tunes", "lora": "LoRA adapters"}[self.kind]
        seeds = "one seed" if len(self.variants) == 1 else f"{len(self.variants)} seeds"
        return f"{len(self.tasks)} experts, {experts}{self.remark}, {seeds}"

    def row(self, title: str) -> Row:
        """Return the row of a title."""
        return next(row for row in self.rows if row.title == title)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON."""
        return {
            "kind": self.kind,
            "remark": self.remark,
            "variants": list(self.variants),
            "tasks": list(self.tasks),
            "test_examples": dict(self.examples),
            "rows": [row.as_json() for row in self.rows],
        }


def summarise(outcomes: Sequence[Outcome]) -> Group:
    """Put the seeds of one kind of experts together.

    Args:
        outcomes: of the same tasks, one of each seed.
    """
    first = outcomes[0]
    sizes = {task: len(scores) for task, scores in first.models[0].scores.items()}
    resamples = Resamples(sizes)
    by_title = [{scored.model.title: scored for scored in outcome.models} for outcome in outcomes]
    titles = [t for t in by_title[0] if all(t in models for models in by_title)]

    def scores(title: str) -> dict[str, list[list[float]]]:
        return {t: [models[title].scores[t] for models in by_title] for t in first.tasks}

    own = [t for t in titles if (merge := by_title[0][t].model.merge) and merge.method in OWN]
    rows: list[Row] = []
    for title in titles:
        of_seeds = [models[title] for models in by_title]
        accuracies = [_accuracies(scored) for scored in of_seeds]
        experts = [_accuracies(models[EXPERTS]) for models in by_title]
        model = of_seeds[0].model
        seconds = [s.model.seconds for s in of_seeds if s.model.seconds is not None]
        rows.append(
            Row(
                section=model.section,
                title=title,
                method=model.merge and model.merge.method,
                parameters=[s.model.merge.parameters if s.model.merge else {} for s in of_seeds],
                accuracy={t: fmean(each[t] for each in accuracies) for t in first.tasks},
                seeds=[fmean(each.values()) for each in accuracies],
                mean=resamples.mean(scores(title)),
                of_experts=[
                    _share(each, best) for each, best in zip(accuracies, experts, strict=True)
                ],
                beyond_tuned=(
                    resamples.difference(scores(title), scores(TUNED))
                    if TUNED in titles and title != TUNED
                    else None
                ),
                below={
                    t: resamples.difference(scores(t), scores(title)) for t in own if t != title
                },
                seconds=fmean(seconds) if seconds else None,
                measures={
                    name: fmean(s.measures[name] for s in of_seeds) for name in of_seeds[0].measures
                },
            )
        )
    order = list(Section)
    rows.sort(key=lambda row: (order.index(row.section), -row.mean.mean))
    variants = tuple(str(outcome.variant) for outcome in outcomes)
    return Group(first.variant.kind, variants, first.tasks, sizes, tuple(rows))


def difference(outcomes: Sequence[Outcome], title: str, other: str) -> Interval:
    """Return a model's mean accuracy less another's, on the same examples of every seed."""
    by_title = [{scored.model.title: scored for scored in outcome.models} for outcome in outcomes]
    sizes = {task: len(scores) for task, scores in by_title[0][title].scores.items()}
    of, less = (
        {task: [models[name].scores[task] for models in by_title] for task in sizes}
        for name in (title, other)
    )
    return Resamples(sizes).difference(of, less)


def _accuracies(scored: Scored) -> dict[str, float]:
    return {task: fmean(scores) for task, scores in scored.scores.items()}


def _share(accuracies: Mapping[str, float], experts: Mapping[str, float]) -> float:
    of_known = [accuracies[task] / own for task, own in experts.items() if own]
    return fmean(of_known) if of_known else 0.0
