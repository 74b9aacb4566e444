"""The tables of ACE-Merging (arXiv:2603.02945): 1 with 7, 2, 3, and 8."""

from __future__ import annotations

from covmerge_lab.reproduce.published import (
    MEAN,
    Column,
    Row,
    Setting,
    Source,
    Table,
    scores,
)

PAPER = "ACE-Merging (arXiv:2603.02945)"
_TUNED = "the paper's scale was chosen on labelled data and is not given; covmerge's default stands"
_DATA = "statistics of 256 training examples of each task; the paper does not give its own"
_UNSAID = "the paper does not give this row's parameters; covmerge's defaults stand"

# Vision. The order is that of Table 7, the names are those of the suite's folders.
_VISION = (
    *("MNIST", "Cars", "DTD", "EuroSAT", "GTSRB", "RESISC45", "SUN397", "SVHN"),
    *("PCAM", "CIFAR100", "STL10", "OxfordIIITPet", "Flowers102", "FER2013"),
    *("CIFAR10", "Food101", "RenderedSST2", "EMNIST", "FashionMNIST", "KMNIST"),
)
_COUNTS = (8, 14, 20)
_TABLE_1 = {  # the models in the order of `_MODELS`, each with 8, 14 and 20 tasks
    "Zero-shot": "48.3 57.2 56.1 55.3 61.3 59.7 64.7 68.2 65.2",
    "Fine-tuned": "92.8 90.9 91.3 94.6 92.8 93.2 95.8 94.3 94.7",
    "Weight Averaging": "66.3 64.3 61.0 72.2 69.5 65.3 79.6 76.7 71.6",
    "Task Arithmetic": "70.8 65.3 60.5 75.4 70.5 65.8 84.9 79.4 74.0",
    "Consensus TA": "75.0 70.4 65.4 79.4 74.4 69.8 86.3 82.2 79.0",
    "CART": "84.7 79.5 76.3 88.3 84.1 80.5 92.6 88.7 87.9",
    "TSV-M": "85.9 80.1 77.1 89.0 84.6 80.6 93.0 89.2 87.7",
    "Iso-C": "86.3 80.3 75.5 90.6 84.8 79.6 94.2 89.3 87.6",
    "Iso-CTS": "86.2 81.7 78.1 91.1 86.4 82.4 94.7 91.0 90.1",
    "ACE-Merging": "87.9 82.3 78.8 90.6 86.1 82.1 94.6 91.1 89.5",
}
_MODELS = ("ViT-B-32", "ViT-B-16", "ViT-L-14")
_TABLE_7 = {  # per model and number of tasks, in the order of `_VISION`
    ("ViT-B-32", 8): "99.46 71.67 89.63 95.81 92.44 86.79 73.06 94.19",
    ("ViT-B-32", 14): "99.22 68.59 82.45 88.37 85.49 81.51 70.75 90.10 "
    "84.09 72.77 97.50 90.54 73.04 67.62",
    ("ViT-B-32", 20): "92.65 61.90 75.80 83.70 76.43 77.92 68.63 82.89 "
    "83.75 68.79 96.73 88.20 70.19 63.46 93.54 80.71 72.43 98.07 83.50 57.27",
    ("ViT-B-16", 8): "99.44 81.54 90.69 97.78 92.94 90.73 76.57 95.08",
    ("ViT-B-16", 14): "99.32 78.24 83.19 96.96 88.20 88.75 74.04 93.22 "
    "86.14 78.41 98.15 93.98 79.07 68.04",
    ("ViT-B-16", 20): "96.40 72.40 76.33 94.56 80.74 85.97 72.07 88.40 "
    "85.02 75.64 97.58 92.86 76.24 63.81 95.55 88.47 77.10 97.82 88.07 37.23",
    ("ViT-L-14", 8): "99.58 90.34 96.97 99.52 97.34 94.76 81.83 96.20",
    ("ViT-L-14", 14): "99.59 88.46 93.19 99.30 97.42 93.25 78.62 95.61 "
    "85.82 86.64 99.41 96.43 87.32 73.92",
    ("ViT-L-14", 20): "96.65 85.37 88.67 98.22 93.49 92.11 76.72 91.80 "
    "85.77 83.75 99.34 96.18 84.57 69.95 98.05 93.98 85.56 99.52 91.15 78.95",
}
_CART = {
    8: (2.0, 0.12),
    14: (1.5, 0.16),
    20: (1.9, 0.32),
}  # scale, rank; its configs, ViT-B/32 only
_SUITE = (
    "the TSV suite's checkpoints are files of torch.save that its README links: download them and pass "
    "--checkpoints DIR (DIR/MODEL/TASKVal/nonlinear_finetuned.pt), or --expert NAME=FILE for each"
)


def suite_expert(model: str, task: str) -> Source:
    """Return where the TSV suite has an expert."""
    return Source(file=f"{model}/{task}Val/nonlinear_finetuned.pt", where=_SUITE)


def suite_base(model: str, task: str) -> Source:
    """Return where the TSV suite has the base, which lies beside every expert."""
    return Source(file=f"{model}/{task}Val/nonlinear_zeroshot.pt", where=_SUITE)


def _vision(model: str, tasks: int) -> Setting:
    names = _VISION[:tasks]
    place = _MODELS.index(model) * len(_COUNTS) + _COUNTS.index(tasks)
    mean = {title: {MEAN: float(line.split()[place])} for title, line in _TABLE_1.items()}
    ace = {**scores(names, _TABLE_7[model, tasks]), **mean["ACE-Merging"]}
    scale, rank = _CART[tasks]
    cart = {"scale": scale, "rank_ratio": rank} if model == "ViT-B-32" else {}
    return Setting(
        name=f"{model}-{tasks}",
        family="clip",
        model=model,
        base=suite_base(model, names[0]),
        experts={name: suite_expert(model, name) for name in names},
        columns=[Column(name, name, name) for name in names],
        rows=[
            Row("Zero-shot", mean["Zero-shot"], "base"),
            Row("Fine-tuned", mean["Fine-tuned"], "experts"),
            Row("Weight Averaging", mean["Weight Averaging"], method="average"),
            Row("Task Arithmetic", mean["Task Arithmetic"], method="task_arithmetic", note=_TUNED),
            Row("Consensus TA", mean["Consensus TA"], method="consensus", note=_TUNED),
            Row("CART", mean["CART"], method="cart", parameters=cart, note="" if cart else _TUNED),
            Row("TSV-M", mean["TSV-M"], method="tsv_m", note=_TUNED),
            Row("Iso-C", mean["Iso-C"], method="iso_c", note=_TUNED),
            Row("Iso-CTS", mean["Iso-CTS"], method="iso_cts", note=_TUNED),
            Row("ACE-Merging", ace, method="ace", parameters={"eps": 1e-5}),
        ],
        # The released code merges every matrix but the text projection, and averages the rest.
        tensors={"embeddings": "method"},
        rules=[{"match": "*visual.proj", "use": "method"}],
    )


TABLE_1 = Table(
    name="ace/table1",
    paper=PAPER,
    label="Table 1, with ACE's tasks from Table 7",
    what="CLIP ViT-B/32, B/16, L/14 on 8, 14 and 20 image tasks",
    settings=[_vision(model, tasks) for model in _MODELS for tasks in _COUNTS],
    notes=["accuracy; zero-shot heads from the suite's files, or built from the class names"],
)

_GPT2_TASKS = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2")
_GPT2_TITLES = ("CoLA", "MNLI", "MRPC", "QNLI", "QQP", "RTE", "SST-2")


def _gpt2(line: str) -> dict[str, float]:
    return scores(_GPT2_TITLES, line)


TABLE_2 = Table(
    name="ace/table2",
    paper=PAPER,
    label="Table 2",
    what="GPT-2 on seven tasks of GLUE",
    settings=[
        Setting(
            name="gpt2",
            family="glue",
            model="gpt2",
            base=Source("openai-community/gpt2"),
            experts={task: Source(f"tanganke/gpt2_{task}") for task in _GPT2_TASKS},
            columns=[
                Column(title, task, task)
                for title, task in zip(_GPT2_TITLES, _GPT2_TASKS, strict=True)
            ],
            rows=[
                Row("Individual", _gpt2("76.8 82.1 80.4 88.3 89.6 65.3 91.2 82.0"), "experts"),
                Row(
                    "Weight Averaging",
                    _gpt2("55.0 55.1 51.0 57.6 76.7 44.8 52.5 56.1"),
                    method="average",
                ),
                Row(
                    "Fisher Merging",
                    _gpt2("54.8 58.0 39.5 63.3 81.5 49.1 64.7 58.7"),
                    method="fisher",
                    note=_DATA,
                ),
                Row(
                    "Iso-CTS",
                    _gpt2("58.4 56.1 43.4 56.0 79.7 51.3 67.0 58.82"),
                    method="iso_cts",
                    note=_UNSAID,
                ),
                Row(
                    "Iso-C",
                    _gpt2("65.7 59.0 48.8 57.8 83.6 52.4 66.4 61.95"),
                    method="iso_c",
                    note=_UNSAID,
                ),
                Row(
                    "RegMean",
                    _gpt2("61.7 70.4 65.4 69.7 78.8 56.0 79.7 68.8"),
                    method="regmean",
                    note=_DATA,
                    # Inputs are measured: its published code turns GPT-2's weights, and averages what
                    # has no Gram matrix.
                    tensors={"conv1d": "oriented", "embeddings": "auto"},
                ),
                # FusionBench's documentation has these two rows, with their scales.
                Row(
                    "Task Arithmetic",
                    _gpt2("68.7 68.6 69.6 70.5 81.8 47.3 83.6 70.0"),
                    method="task_arithmetic",
                    parameters={"scale": 0.5},
                ),
                Row(
                    "Ties-Merging",
                    _gpt2("68.4 71.4 68.4 69.6 82.4 47.7 81.8 70.0"),
                    method="ties",
                    parameters={"scale": 0.6, "merge": "sum"},
                ),
                Row(
                    "TSV-M",
                    _gpt2("65.6 75.4 58.6 64.4 86.2 55.6 85.7 70.2"),
                    method="tsv_m",
                    note=_UNSAID,
                ),
                Row(
                    "ACE-Merging",
                    _gpt2("70.3 69.9 71.8 76.7 79.0 62.5 88.5 74.1"),
                    method="ace",
                    parameters={"eps": 4e-2},
                ),
            ],
            # The released code merges embeddings too, and GPT-2's weights as they are stored; the
            # base alone has the masks of its attention.
            tensors={"embeddings": "method", "conv1d": "stored", "missing": "base"},
            gigabytes=4.0,
            max_length=512,
        )
    ],
    notes=[
        "accuracy in every column, CoLA too; FusionBench scores MNLI on the matched validation set, "
        "as here, the released code on the mismatched one"
    ],
)

_ROBERTA = (
    ("CoLA", "cola", "matthews"),
    ("SST-2", "sst2", "accuracy"),
    ("MRPC", "mrpc", "accuracy_f1"),
    ("STS-B", "stsb", "pearson_spearman"),
    ("QQP", "qqp", "accuracy_f1"),
    ("QNLI", "qnli", "accuracy"),
    ("MNLI", "mnli", "accuracy"),
    ("RTE", "rte", "accuracy"),
)
_ROBERTA_ROWS = (
    ("Weight Averaging", "average"),
    ("Task Arithmetic", "task_arithmetic"),
    ("Ties-Merging", "ties"),
    ("Task Arithmetic (w/ DARE)", "dare_task_arithmetic"),
    ("Ties-Merging (w/ DARE)", "dare_ties"),
    ("WUDI-Merging", "wudi"),
)
_TABLE_3 = {
    "roberta-base": {
        "Pre-trained": "0.0 53.8 85.0 4.0 37.5 53.1 37.1 71.2 41.7",
        "Weight Averaging": "0.0 59.2 85.8 47.0 45.4 63.9 48.0 71.2 52.6",
        "Task Arithmetic": "8.4 88.3 89.6 32.8 82.0 85.4 75.5 80.4 67.8",
        "Ties-Merging": "31.8 88.9 86.2 10.9 61.1 85.9 83.0 69.6 64.7",
        "Task Arithmetic (w/ DARE)": "0.0 88.1 86.6 30.2 84.3 79.1 64.0 77.2 63.7",
        "Ties-Merging (w/ DARE)": "11.8 95.5 85.8 9.4 86.8 88.7 83.1 65.6 65.6",
        "WUDI-Merging": "81.8 98.3 78.7 60.5 92.7 90.5 93.3 86.4 85.3",
        "ACE-Merging": "97.3 97.6 93.9 71.1 88.3 88.2 91.5 95.1 90.4",
    },
    "roberta-large": {
        "Pre-trained": "0.0 51.5 40.9 20.9 36.4 56.0 37.6 62.4 38.2",
        "Weight Averaging": "7.4 55.1 84.2 46.3 56.7 73.8 35.8 66.7 53.3",
        "Task Arithmetic": "7.4 86.1 86.8 78.0 90.7 77.0 73.3 67.6 70.9",
        "Ties-Merging": "42.7 78.1 85.2 51.7 89.9 81.9 79.7 70.0 72.4",
        "Task Arithmetic (w/ DARE)": "4.1 85.2 85.8 71.6 91.3 85.6 75.2 68.1 70.9",
        "Ties-Merging (w/ DARE)": "2.9 90.4 86.8 75.4 92.4 86.4 79.0 69.1 72.8",
        "WUDI-Merging": "82.2 98.7 87.3 81.4 94.6 96.6 93.4 77.1 88.8",
        "ACE-Merging": "87.1 99.2 92.3 82.1 95.6 97.9 92.6 86.7 91.7",
    },
}


def _roberta(model: str, eps: float, gigabytes: float) -> Setting:
    titles = [title for title, _, _ in _ROBERTA]
    published = {row: scores(titles, line) for row, line in _TABLE_3[model].items()}
    notes = {"wudi": "the authors' 300 Adam steps are `solver: adam`"}
    return Setting(
        name=model,
        family="glue",
        model=model,
        base=Source(f"FacebookAI/{model}"),
        experts={task: _roberta_expert(model, task) for _, task, _ in _ROBERTA},
        columns=[Column(title, task, task, metric) for title, task, metric in _ROBERTA],
        rows=[
            Row("Pre-trained", published["Pre-trained"], "base"),
            Row("Individual", dict.fromkeys([*titles, MEAN], 100.0), "experts"),
            *(
                Row(
                    title,
                    published[title],
                    method=method,
                    note="" if method == "average" else notes.get(method, _UNSAID),
                )
                for title, method in _ROBERTA_ROWS
            ),
            Row("ACE-Merging", published["ACE-Merging"], method="ace", parameters={"eps": eps}),
        ],
        share=True,
        # The released code leaves all but the encoder's matrices at the base. The base alone has the
        # head of its language model, and old files hold position ids.
        tensors={"missing": "base", "extra": "ignore"},
        rules=[
            {"match": f"*{part}*", "use": "base"} for part in ("bias", "LayerNorm", "embeddings")
        ],
        gigabytes=gigabytes,
        max_length=128,
    )


def _roberta_expert(model: str, task: str) -> Source:
    if model == "roberta-base":
        return Source("lu-vae/roberta-glue", folder=f"{task}/roberta-base_lr1e-05")
    return Source(
        file=f"{model}/{task}/{model}_lr1e-05",
        where="the authors' code fetches it from a folder of Google Drive, and no hub id is known: pass "
        f"--checkpoints DIR (DIR/{model}/TASK/{model}_lr1e-05), or --expert NAME=FOLDER for each",
    )


TABLE_3 = Table(
    name="ace/table3",
    paper=PAPER,
    label="Table 3",
    what="RoBERTa-base and RoBERTa-large on eight tasks of GLUE, percent of each expert",
    settings=[_roberta("roberta-base", 2e-4, 4.5), _roberta("roberta-large", 1e-5, 1.4)],
    notes=[
        "CoLA: Matthews correlation; MRPC, QQP: mean of accuracy and F1; STS-B: mean of Pearson and "
        "Spearman; else accuracy. The published runs score a fixed subset of the validation sets, "
        "covmerge all of them"
    ],
)

_LLAMA = (
    ("xquad_zh", "multilingual", "exact_match"),
    ("xquad_vi", "multilingual", "exact_match"),
    ("gsm8k_cot", "math", "exact_match"),
    ("mathqa", "coding", "acc"),
    ("humaneval", "coding", "pass@1"),
)


def _llama(line: str) -> dict[str, float]:
    return scores([task for task, _, _ in _LLAMA], line)


TABLE_8 = Table(
    name="ace/table8",
    paper=PAPER,
    label="Table 8",
    what="Llama-3.2-3B-Instruct experts for languages, mathematics and code, by lm-eval",
    settings=[
        Setting(
            name="llama-3.2-3b-instruct",
            family="lm",
            model="llama",
            base=Source("meta-llama/Llama-3.2-3B-Instruct"),
            experts={
                name: Source(f"MergeBench/Llama-3.2-3B-Instruct_{name}")
                for name in ("multilingual", "math", "coding")
            },
            columns=[
                Column(task, task, expert, metric, runs_code=task == "humaneval")
                for task, expert, metric in _LLAMA
            ],
            rows=[
                Row("Experts", _llama("27.24 42.20 74.00 34.30 49.39"), "experts"),
                Row("Average", _llama("8.40 32.72 73.62 34.24 46.34"), method="average"),
                Row(
                    "Task Arithmetic",
                    _llama("8.06 32.88 73.09 34.14 46.34"),
                    method="task_arithmetic",
                    note=_UNSAID,
                ),
                Row(
                    "ACE",
                    _llama("16.42 37.68 69.75 34.57 50.61"),
                    method="ace",
                    parameters={"eps": 1e-5},
                ),
            ],
            # The released code leaves both embeddings at the base; some experts have padded ones.
            tensors={"embeddings": "base", "output_head": "base", "vocabulary": "base"},
            gigabytes=26.0,
        )
    ],
    notes=[
        "the paper names the tasks and not which of lm-eval's metrics it reports: exact_match, acc and "
        "pass@1 are taken here, the first of their filters"
    ],
)

TABLES = (TABLE_1, TABLE_2, TABLE_3, TABLE_8)
