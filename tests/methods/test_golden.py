"""Agreement with the outputs of the authors' own code, at the tolerances shipped with them."""

from functools import cache

import pytest
from safetensors import safe_open

from tests.methods.golden_cases import CASES
from tests.methods.golden_cases.common import FOLDER, TOLERANCE, inputs
from tests.methods.golden_cases.relatives import NOT_HERE, nearest
from tests.tolerance import of_factorised, relative_error


def keys_of(file):
    """Tensors that the published code computed; random masks are stored beside them."""
    left_out = CASES[file].leaves_out if file in CASES else ()
    with safe_open(FOLDER / f"{file}.safetensors", "pt") as opened:
        return [
            key
            for key in opened.keys()  # noqa: SIM118 - no dict
            if f"{file}:{key}" in TOLERANCE and not key.endswith(left_out)
        ]


@cache
def computed(file, variant):
    case = CASES[file] if file in CASES else nearest(file)
    return case.run(variant)


def test_every_golden_file_is_accounted_for():
    # mergekit's go by models and not by updates: test_mergekit.py, tests/mergekit
    files = {path.stem for path in FOLDER.glob("*.safetensors")} - {"inputs"}
    files -= {name for name in files if name.startswith("mergekit")}
    assert files == CASES.keys() | NOT_HERE.keys()


def published(file, key):
    with safe_open(FOLDER / f"{file}.safetensors", "pt") as opened:
        return opened.get_tensor(key).double(), opened.metadata()["space"]


def result(file, key, how=computed):
    """What covmerge makes of one golden tensor, a weight where the published one is."""
    variant, name = key.split("/", 1)
    merged = how(file, variant)[name].double()
    is_weight = published(file, key)[1].startswith("weight")
    return merged + inputs()[f"{variant}/base/{name}"].double() if is_weight else merged


def agreement(file, key):
    """Relative Frobenius error of covmerge against one golden tensor."""
    return relative_error(result(file, key), published(file, key)[0])


def agrees(file, key, tolerance):
    """Whether it is the published one, but for what rounding makes of either.

    The tolerances are ten times what float32 rounding made on the machine of the goldens. Kernels of
    another processor may round otherwise: then the method in float64 is held against the golden, and
    what rounding makes here against that, by what factorisations in float32 may be off.
    """
    if agreement(file, key) <= tolerance:
        return True
    case = CASES[file]
    if case.exact is None:
        return False
    exact = result(file, key, lambda _, variant: case.exact(variant))
    golden = published(file, key)[0]
    allowed = max(2 * tolerance, of_factorised(exact.shape))
    return (
        relative_error(exact, golden) <= tolerance
        and relative_error(result(file, key), exact) <= allowed
    )


@pytest.mark.parametrize("file", CASES)
def test_golden(file):
    for key in keys_of(file):
        tolerance = TOLERANCE[f"{file}:{key}"]
        if tolerance is None:
            variant, name = key.split("/", 1)
            CASES[file].ill_posed(variant, name, published(file, key)[0])
        else:
            told = f"{key}: {agreement(file, key):.1e} beyond {tolerance}"
            assert agrees(file, key, tolerance), told


def table():
    """Print the agreement per file: `python -m tests.methods.test_golden`."""
    print(f"{'file':32} {'tensors':>7} {'worst error':>11} {'tolerance':>9}  worst tensor; by")
    for file, case in CASES.items():
        rows = [(agreement(file, key), TOLERANCE[f"{file}:{key}"], key) for key in keys_of(file)]
        posed = [row for row in rows if row[1] is not None]
        error, tolerance, key = max(posed, key=lambda row: row[0] / row[1])
        print(f"{file:32} {len(posed):>7} {error:11.1e} {tolerance:9.1e}  {key}; {case.says}")
        for error, _, key in (row for row in rows if row[1] is None):
            print(f"{'':32} {'':7} {error:11.1e} ill-posed  {key}")
    print("\nNot a method of covmerge; the distance to one at its defaults, for the record:")
    for file, (what, method) in NOT_HERE.items():
        keys = [key for key in keys_of(file) if key.split("/", 1)[1] in computed(file, "homog")]
        distance = max(agreement(file, key) for key in keys)
        print(f"{file:32} {len(keys):>7} {distance:11.1e}  {method}: {what}")


if __name__ == "__main__":
    table()
