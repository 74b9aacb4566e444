"""Run mergekit 0.1.5 over `mergekit_cases.py`, in an environment of its own, and keep what it gives.

    VENV_WITH_MERGEKIT/bin/python -m tests.methods.make_mergekit

mergekit is asked tensor by tensor in the lexicographic order of the names, after one `manual_seed`, which
is what its command line does. Methods that keep the largest entries are run once more with a stable sort.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.mergekit.stable import sort_stably
from tests.methods.mergekit_cases import CASES, DTYPES, ORDERED, SEED, key, models, stable_key

FILE = Path(__file__).parent.parent / "golden" / "mergekit.safetensors"


def run(case, given, dtype):
    """The merged tensors of a case, flat and side by side."""
    from mergekit.merge_methods.api import merge_tensors

    base, *experts = ({n: w.to(dtype) for n, w in model.items()} for model in given)
    torch.manual_seed(SEED)
    found = []
    for name in case.names:
        tensors = [expert[name] for expert in experts[: case.experts]]
        parameters = dict(case.parameters)
        if case.base:
            tensors = [base[name], *tensors]
        ids = [*(["base"] if case.base else []), *"abc"][: len(tensors)]
        for parameter, value in parameters.items():
            if isinstance(value, list):
                parameters[parameter] = dict(zip("abc", value, strict=False))
        merged = merge_tensors(
            tensors,
            case.theirs,
            parameters=parameters,
            ids=ids,
            base_index=0 if case.base else None,
            name=name,
        )
        found.append(merged.flatten())
    return torch.cat(found)


def main():
    torch.set_num_threads(1)
    given = models()
    kept = {f"model {n} {name}": w for n, model in enumerate(given) for name, w in model.items()}
    with torch.no_grad():
        for case in CASES:
            for dtype in DTYPES:
                kept[key(case, dtype)] = run(case, given, dtype)
                if case.theirs in ORDERED:
                    sort_stably()
                    kept[stable_key(case, dtype)] = run(case, given, dtype)
                    sort_stably(stably=False)
    made = {"mergekit": "0.1.5", "torch": torch.__version__.split("+")[0]}
    save_file(kept, FILE, metadata=made)
    print(FILE.stat().st_size)


if __name__ == "__main__":
    main()
