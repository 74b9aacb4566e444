"""The same merges by two trees of covmerge, one after the other, case by case: bytes and seconds.

    python -m benchmarks.same_bytes BEFORE/src NOW/src [--rounds 3] [--large] [--only WORD]

Both read the same sources. Every file of an output is hashed but README.md's and covmerge.json's, whose
words may change; these are compared too and told apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEED = 0
METHODS = (
    "ace", "actmat", "average", "cart", "consensus", "core_space", "dare_task_arithmetic", "dare_ties",
    "della", "emr", "free", "iso_c", "iso_cts", "knots", "task_arithmetic", "ties", "tsv_m", "wudi",
)  # fmt: skip
TOLD = ("README.md", "covmerge.json")


def cases(large: bool) -> dict[str, dict]:
    """By name: sources, method and options of one merge."""
    found: dict[str, dict] = {}
    if large:
        for method in ("average", "ties", "task_arithmetic", "tsv_m", "ace"):
            found[f"large {method}"] = {"family": "large", "method": method}
        return found
    for method in METHODS:
        for family in ("llama", "gpt2"):
            found[f"{family} {method}"] = {"family": family, "method": method}
        found[f"lora {method}"] = {"family": "lora", "method": method}
    for family in ("gpt_oss", "t5", "bert_heads", "sharded"):
        for method in ("average", "ace", "ties", "emr", "tsv_m"):
            found[f"{family} {method}"] = {"family": family, "method": method}
    for method in ("average", "ace", "core_space", "knots", "tsv_m"):
        found[f"lora adapter {method}"] = {
            "family": "lora", "method": method, "options": {"form": "adapter"}
        }  # fmt: skip
    for method in ("ties", "dare_ties", "ace"):
        found[f"llama adapter {method}"] = {
            "family": "llama", "method": method,
            "options": {"form": "adapter", "rank": 4, "whole": True},
        }  # fmt: skip
    found["llama bfloat16"] = {
        "family": "llama", "method": "ace", "options": {"out_dtype": "bfloat16", "shard_size": "4KB"}
    }  # fmt: skip
    found["compare"] = {
        "family": "llama",
        "compare": ["average", "ties", "ace", "tsv_m", "dare_ties"],
    }
    found["compare lora"] = {"family": "lora", "compare": ["average", "ace", "core_space", "ties"]}
    return found


def make_sources(folder: Path, large: bool) -> None:
    """Save every family: a base and three experts."""
    import copy

    import torch
    import transformers

    text = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}
    rope = {"num_key_value_heads": 1, "max_position_embeddings": 32}
    llama = {**text, **rope, "num_hidden_layers": 2, "intermediate_size": 24}
    wide = {
        "vocab_size": 4096, "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 6,
        "intermediate_size": 2048, "num_key_value_heads": 12,
    }  # fmt: skip
    heads = {**text, "num_hidden_layers": 2, "intermediate_size": 24, "max_position_embeddings": 32}

    def built(name: str, labels: int = 3):
        torch.manual_seed(SEED)
        if name == "llama" or name == "sharded" or name == "lora":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama))
        if name == "large":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**wide))
        if name == "gpt2":
            return transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2
                )
            )
        if name == "gpt_oss":
            return transformers.GptOssForCausalLM(
                transformers.GptOssConfig(
                    **llama | {"num_hidden_layers": 1},
                    num_local_experts=3,
                    num_experts_per_tok=2,
                    head_dim=8,
                )
            )
        if name == "t5":
            return transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
                )
            )
        if name == "bert_heads":
            return transformers.BertForSequenceClassification(
                transformers.BertConfig(**heads, num_labels=labels)
            )
        raise ValueError(name)

    for name in (
        ["large"] if large else ["llama", "gpt2", "gpt_oss", "t5", "bert_heads", "sharded", "lora"]
    ):
        base = built(name)
        with torch.no_grad():
            for parameter in base.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(10.0)
        options = {"max_shard_size": "4KB"} if name == "sharded" else {}
        base.save_pretrained(folder / name / "base", **options)
        for number in (1, 2, 3):
            out = folder / name / f"e{number}"
            torch.manual_seed(number)
            if name == "lora":
                import peft

                config = peft.LoraConfig(
                    r=2 + number, lora_alpha=4,
                    target_modules=["q_proj", "v_proj", "down_proj"],
                )  # fmt: skip
                adapted = peft.get_peft_model(copy.deepcopy(base), config)
                with torch.no_grad():
                    for key, parameter in adapted.named_parameters():
                        if "lora_" in key:
                            parameter.copy_(0.1 * number * torch.randn_like(parameter))
                adapted.save_pretrained(out)
                continue
            expert = built(name, labels=2 + number) if name == "bert_heads" else copy.deepcopy(base)
            if name == "bert_heads":
                expert.load_state_dict(base.bert.state_dict(), strict=False)
                expert.bert.load_state_dict(base.bert.state_dict())
            with torch.no_grad():
                for parameter in expert.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.005 * 3**number)
            expert.save_pretrained(out, **options)


def serve(sources: Path, large: bool) -> None:
    """Merge the cases that are named on standard input."""
    import torch

    torch.set_num_threads(2)
    import covmerge
    from covmerge.errors import CovmergeError

    known = cases(large)
    for line in sys.stdin:
        case = known[line.strip()]
        family = sources / case["family"]
        out = sources.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        experts = {f"e{n}": str(family / f"e{n}") for n in (1, 2, 3)}
        os.sync()
        begun = time.perf_counter()
        try:
            if "compare" in case:
                covmerge.compare(str(family / "base"), experts, case["compare"], out)
            else:
                covmerge.merge(
                    str(family / "base"), experts, case["method"], out, **case.get("options", {})
                )
            error = None
        except CovmergeError as failed:
            error = f"{type(failed).__name__}: {failed}"
        seconds = time.perf_counter() - begun
        files = {
            path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(out.rglob("*")) if path.is_file()
        }  # fmt: skip
        print("@" + json.dumps({"seconds": seconds, "files": files, "error": error}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs=2, metavar="TREE/src")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "sources"
        make_sources(sources, given.large)
        servers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.same_bytes",
                    "--serve",
                    str(sources),
                    *(["--large"] if given.large else []),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([tree, str(Path(__file__).parents[1])]),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for tree in given.trees
        ]
        rows = {}
        for name in (n for n in cases(given.large) if given.only in n):
            answers = [[], []]
            for _ in range(given.rounds):
                for server, own in zip(servers, answers, strict=False):
                    server.stdin.write(name + "\n")
                    server.stdin.flush()
                    while not (line := server.stdout.readline()).startswith("@"):
                        if not line:
                            raise SystemExit(f"{name}: the server ended")
                    own.append(json.loads(line[1:]))
            before, now = (own[-1] for own in answers)
            differ = [
                file for file in {**before["files"], **now["files"]}
                if before["files"].get(file) != now["files"].get(file)
            ]  # fmt: skip
            weights = [file for file in differ if not file.endswith(TOLD)]
            seconds = [min(a["seconds"] for a in own) for own in answers]
            rows[name] = {
                "same": not weights and before["error"] == now["error"],
                "differ": differ, "errors": [before["error"], now["error"]], "seconds": seconds,
            }  # fmt: skip
            word = "same" if rows[name]["same"] else "DIFFERS"
            print(
                f"{name:32} {word:8} {seconds[1] / seconds[0]:5.2f}  {', '.join(differ)} "
                f"{'' if before['error'] == now['error'] is None else rows[name]['errors']}", flush=True,
            )  # fmt: skip
        same = sum(row["same"] for row in rows.values())
        print(f"{same} of {len(rows)} merges have the same bytes")
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1))
        for server in servers:
            server.stdin.close()
            server.wait()
        if same < len(rows):
            raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), "--large" in sys.argv)
    else:
        main()
