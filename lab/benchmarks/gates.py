"""Gates of a mixture: does a token reach the expert of its domain, and what is the mixture's loss?

    python -m benchmarks.gates

A tiny Llama of bytes is trained on modules of Python's library, and from there one expert on each of four
domains: code and docstrings of other modules, sums, and records. Each way of making routers gives a mixture
of the four, of which every token goes to one expert, or to two. All other tensors are `auto`'s merge, or
the base's. Scored on text that no model has seen: how many tokens have their own domain's expert first, in
% over layers (25 is chance), and the loss in nats a byte. `auto` alone, the base, and the experts on their
own domains stand beside. The table is printed, and put into results/gates.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy

import covmerge
from covmerge.plan.recipe import load_recipe

RESULTS = Path(__file__).parent / "results" / "gates.json"
LENGTH, BATCH, SPECIAL = 64, 32, 3
STEPS = {"base": 500, "expert": 150}
SEEDS = (0, 1, 2)
DRAWS = 3  # of random gates
TESTS = 48  # sequences of each domain
PROMPTS = 5


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    started, found = time.process_time(), dict[str, list[dict[str, float]]]()
    spent = 0.0
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as work:
            begun = time.process_time()
            texts = domains(seed)
            train(Path(work), texts, seed)
            spent += time.process_time() - begun
            for name, row in scored(Path(work), texts):
                found.setdefault(name, []).append(row)
                print(seed, name, row)
    means = {
        name: {key: round(sum(row[key] for row in rows) / len(rows), 3) for key in rows[0]}
        for name, rows in found.items()
    }
    print(json.dumps(means, indent=1))
    result = {
        "command": "python -m benchmarks.gates",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "CPU seconds": {"training": round(spent), "all": round(time.process_time() - started)},
        "means": means,
        "by training": found,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


# What they are trained on.


Pieces = list[list[int]]


def domains(seed: int) -> dict[str, tuple[Pieces, Pieces]]:
    """Return sequences of each domain to train on, and others to test on."""
    draw = Random(seed)
    code, prose = apart("[n-z]*.py")
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(9000)]
    rows = [
        {"id": draw.randrange(1000), "key": draw.choice("abcdefgh") * 3, "on": draw.random() < 0.5}
        for _ in range(3000)
    ]
    texts = {
        "code": code,
        "prose": prose,
        "sums": "".join(f"{a}+{b}={a + b}\n" for a, b in pairs),
        "records": "".join(json.dumps(row) + "\n" for row in rows),
    }
    found: dict[str, tuple[Pieces, Pieces]] = {}
    for name, text in texts.items():
        pieces = pieces_of(text)
        draw.shuffle(pieces)
        found[name] = pieces[TESTS:1600], pieces[:TESTS]
    return found


def pieces_of(text: str) -> Pieces:
    ids = [SPECIAL + byte for byte in text.encode("ascii", "ignore")]
    return [ids[at : at + LENGTH] for at in range(0, len(ids) - LENGTH, LENGTH)]


def modules(pattern: str) -> Iterator[str]:
    """Yield the text of modules of Python's library."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob(pattern)):
        yield file.read_text(encoding="utf-8")


def apart(pattern: str) -> tuple[str, str]:
    """Return code without docstrings and comments, and the docstrings, of modules."""
    code, prose = list[str](), list[str]()
    for text in modules(pattern):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            said = ast.get_docstring(node)
            if said is not None:
                prose.append(said)
                node.body = node.body[1:] or [ast.Pass()]
        code.append(ast.unparse(tree))
    return "\n".join(code), "\n".join(prose)


def train(root: Path, texts: Mapping[str, tuple[Pieces, Any]], seed: int) -> None:
    """Write base and experts, with a tokenizer of bytes."""
    config = transformers.LlamaConfig(
        vocab_size=SPECIAL + 256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2 * LENGTH,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    tokenizer = tokenizer_of_bytes()
    base = transformers.LlamaForCausalLM(config)
    learn(base, pieces_of("\n".join(modules("[a-m]*.py"))), STEPS["base"], 3e-3, Random(seed))
    for name, pieces in (("base", None), *((name, own) for name, (own, _) in texts.items())):
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(base.state_dict())
        if pieces is not None:
            learn(model, pieces, STEPS["expert"], 1e-3, Random(seed))
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def learn(model: Any, pieces: Pieces, steps: int, rate: float, draw: Random) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
    for _ in range(steps):
        ids = torch.tensor(draw.sample(pieces, BATCH))
        optimiser.zero_grad()
        loss_of(model, ids).backward()
        optimiser.step()
        schedule.step()
    model.eval()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def tokenizer_of_bytes() -> Any:
    """Each byte is the token of its number, behind the special ones."""
    letters = bytes_to_letters()
    vocabulary = {name: number for number, name in enumerate(("<s>", "</s>", "<unk>"))}
    vocabulary |= {letter: SPECIAL + byte for byte, letter in letters.items()}
    plain = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def bytes_to_letters() -> dict[int, str]:
    """The letters that ByteLevel writes for bytes: those that can be seen, and others from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


# What is made of them.


def scored(root: Path, texts: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the scores of each model."""
    tests = {name: torch.tensor(own) for name, (_, own) in texts.items()}
    loader = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        own = [float(loss_of(loader(root / name), ids)) for name, ids in tests.items()]
    yield "the experts, each on its own domain", {"loss": mean(own)}
    single: dict[str, Any] = {
        "base": str(root / "base"), "experts": {name: str(root / name) for name in texts},
        "method": "auto",
    }  # fmt: skip
    one = made(root, single, "auto")
    for name, folder in (("the base", root / "base"), ("auto, one model", one)):
        with torch.no_grad():
            losses = [float(loss_of(loader(folder), ids)) for ids in tests.values()]
        yield name, {"loss": mean(losses)}
    prompts = {name: {"positive": prompts_of(pieces)} for name, (pieces, _) in texts.items()}
    gates: dict[str, list[list[Tensor]]] = {}
    for mode in ("random", "cheap_embed", "hidden", "hidden_avg", "update"):
        for seed in range(DRAWS if mode == "random" else 1):
            moe = {"gates": mode, "seed": seed, "prompts": prompts, "experts_per_token": 1}
            out = made(root, single | {"moe": moe}, f"{mode}{seed}")
            gates.setdefault(mode, []).append(gates_in(out))
    merged = root / "out-random0"
    kept = made(
        root,
        single | {"moe": {"gates": "random"}, "rules": [{"match": "*", "use": "base"}]},
        "kept",
    )
    base = loader(root / "base")
    gates["energy on random inputs"] = [energies(root, base, tests)]
    gates["fitted to the domains"] = [measured(base, texts)]
    for name, drawn in gates.items():
        each = [of_mixture(merged, rows, tests) for rows in drawn]
        found = {key: mean(row[key] for row in each) for key in each[0]}
        others = [of_mixture(kept, rows, tests) for rows in drawn]
        yield name, found | {f"{key}, base": mean(row[key] for row in others) for key in others[0]}


def prompts_of(pieces: Pieces) -> list[str]:
    return [bytes(number - SPECIAL for number in piece).decode() for piece in pieces[:PROMPTS]]


def mean(numbers: Any) -> float:
    found = list(numbers)
    return sum(found) / len(found)


def made(root: Path, recipe: dict[str, Any], name: str) -> Path:
    file = root / f"{name}.yml"
    file.write_text(json.dumps(recipe))
    covmerge.run_recipe(load_recipe(file), root / f"out-{name}")
    return root / f"out-{name}"


def gates_in(folder: Path) -> list[Tensor]:
    tensors = load_file(folder / "model.safetensors")
    names = (name for name in tensors if name.endswith(".gate.weight"))
    return [tensors[name] for name in sorted(names)]


def of_mixture(folder: Path, gates: list[Tensor], tests: Mapping[str, Tensor]) -> dict[str, float]:
    """Tokens whose own expert comes first, in %, and the loss with one and with two experts a token."""
    found: dict[str, float] = {}
    for count in (1, 2):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, num_experts_per_tok=count)
        for layer, gate in zip(model.model.layers, gates, strict=True):
            layer.mlp.gate.weight.data = gate.float()
        losses, right = list[float](), list[float]()
        for number, ids in enumerate(tests.values()):
            with torch.no_grad():
                out = model(ids, output_router_logits=True)
            logits = out.logits[:, :-1].flatten(0, 1)
            losses.append(float(cross_entropy(logits, ids[:, 1:].flatten())))
            right += [float((o.argmax(-1) == number).float().mean()) for o in out.router_logits]
        if count == 1:
            found["routed"] = 100 * mean(right)
        found[f"loss by {count}"] = mean(losses)
    return found


# Routers that covmerge does not make.


def inputs_of(model: Any, ids: Tensor) -> list[Tensor]:
    """What each layer's MLP is given, `(tokens, hidden)`, float64."""
    found: list[Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(
            lambda _, given: found.append(given[0].flatten(0, 1).double())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


def energies(root: Path, base: Any, tests: Mapping[str, Tensor]) -> list[Tensor]:
    """The linear router nearest to each expert's share of ‖Δ_t x‖² on the base's inputs of random bytes.

    Each Δ_t is taken with the norm 1, so that longer training earns no tokens.
    """
    torch.manual_seed(0)
    ids = torch.randint(SPECIAL, SPECIAL + 128, (64, LENGTH))
    weights = {name: load_file(root / name / "model.safetensors") for name in ("base", *tests)}
    gates: list[Tensor] = []
    for number, given in enumerate(inputs_of(base, ids)):
        energy: list[Tensor] = []
        for name in tests:
            parts = [
                f"model.layers.{number}.mlp.{part}.weight" for part in ("gate_proj", "up_proj")
            ]
            update = torch.cat(
                [weights[name][own].double() - weights["base"][own] for own in parts]
            )
            energy.append((given @ (update / update.norm()).mT).square().sum(1))
        shares = torch.stack(energy, 1)
        gates.append(nearest(given, shares / shares.sum(1, keepdim=True)))
    return gates


def measured(base: Any, texts: Mapping[str, Any]) -> list[Tensor]:
    """The linear router nearest to the true domain on training data: what a linear router can do at all."""
    ids = [torch.tensor(pieces[:64]) for pieces, _ in texts.values()]
    given = [inputs_of(base, own) for own in ids]
    truth = torch.eye(len(ids), dtype=torch.float64).repeat_interleave(64 * LENGTH, 0)
    return [nearest(torch.cat(layer), truth) for layer in zip(*given, strict=True)]


def nearest(given: Tensor, wanted: Tensor) -> Tensor:
    """Return the router of least squares, with a small ridge; all rows by one factor of length about 1."""
    gram = given.mT @ given
    ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    found = torch.linalg.solve(gram + ridge, given.mT @ (wanted - wanted.mean(1, keepdim=True))).mT
    return found / found.norm(dim=1).mean()


if __name__ == "__main__":
    main()
