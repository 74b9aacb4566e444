"""All checks of a method or a step in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

from covmerge.base.errors import CovmergeError
from covmerge.maths.methods import registry
from covmerge.maths.steps import registry as steps
from covmerge.maths.testing.laws import FORMS, LAWS, SHAPES, Law
from covmerge.maths.testing.strange import (
    EXPONENTS,
    drawn,
    merge_strange,
    of_any_size,
    strange_updates,
)
from covmerge.maths.testing.subject import Broken, Case, Subject

_STRANGE = 20  # number of seeds


def check_method(name: str) -> None:
    """Run every check that covmerge's own methods pass on a registered method.

    The method's declarations must hold: laws, unit, factors. It must also keep the rules for all methods:
    updates of zero give the base; results have the same bytes every time, with any strides and dtypes;
    nothing is modified; and any finite updates give a finite result, or an error that names the method. The
    checks take seconds.

    Args:
        name: the name in `covmerge.register`, or the name announced by an installed package.

    Raises:
        Broken: a law does not hold; an AssertionError with the law, the input and the result.
        RecipeError: there is no such method, or its package cannot be imported.

    Example:
        >>> check_method("average")
    """
    _run(_checks(Subject(name), f"method '{name}'"))


def check_step(name: str) -> None:
    """Run every check on a registered step, around the method `average`.

    Args:
        name: the name in `covmerge.register_step`, or the name announced by an installed package.

    Raises:
        Broken: a law does not hold; an AssertionError with the law, the input and the result.
        RecipeError: there is no such step, or its package cannot be imported.

    Example:
        >>> check_step("rescale")
    """
    _run(_checks(_around_average(name), f"step '{name}'"))


def checks(name: str) -> dict[str, Callable[[], None]]:
    """Return the checks of a method or a step, one by one.

    Example:
        >>> named = checks("average")
        >>> len(named) > 50, next(iter(named))
        (True, 'inputs_are_not_modified-16x12')
        >>> # @pytest.mark.parametrize("check", named.values(), ids=named)
    """
    if name in steps and name not in registry:
        return dict(_checks(_around_average(name), f"step '{name}'"))
    return dict(_checks(Subject(name), f"method '{name}'"))


def _around_average(name: str) -> Subject:
    step = steps.get(name)
    return Subject("average", **{step.when: [name]})


def _run(found: Iterator[tuple[str, Callable[[], None]]]) -> None:
    for _, check in found:
        check()


def _checks(subject: Subject, what: str) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, law in {**LAWS, **FORMS}.items():
        for shape in SHAPES:
            yield (
                f"{name}-{shape[0]}x{shape[1]}",
                partial(_law, what, subject, law, subject.case(shape)),
            )
    for seed in range(_STRANGE):
        yield f"strange_updates-{seed}", partial(_strange, what, subject, seed)


def _law(what: str, subject: Subject, law: Law, case: Case) -> None:
    title = (law.__doc__ or law.__name__).splitlines()[0]
    _named(f"{what} breaks {law.__name__} ({title})", str(case), lambda: law(subject, case))


def _strange(what: str, subject: Subject, seed: int) -> None:
    shape, experts = drawn(seed)
    updates = strange_updates(shape, experts, seed)

    def check() -> None:
        merge_strange(subject, updates)
        merge_strange(subject, [update.float() for update in updates])
        of_any_size(subject, updates, EXPONENTS[seed % len(EXPONENTS)])

    _named(
        f"{what} breaks on strange updates",
        f"strange.strange_updates({shape}, {experts}, {seed})",
        check,
    )


def _named(law: str, given: str, check: Callable[[], None]) -> None:
    """Run a check, and raise an error that names law and input if the check raises anything."""
    try:
        with warnings.catch_warnings():
            # A merged update may be long; that is the method's decision.
            warnings.filterwarnings("ignore", message=".*times as long as the experts'")
            check()
    except Broken as error:
        raise Broken(f"{law}: {error}. Input: covmerge.testing.{given}") from None
    except Exception as error:
        if isinstance(error, CovmergeError):
            raise Broken(f"{law}: {error}. Input: covmerge.testing.{given}") from error
        raise Broken(
            f"{law}: it raises {type(error).__name__}: {error}. Input: covmerge.testing.{given}"
        ) from error
