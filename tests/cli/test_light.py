"""Help and version come without torch, all else without what is heavier; there is one program."""

import subprocess
import sys

import covmerge
from tests.cli.runs import save_plain, write_recipe

_WITHOUT_TORCH = """
import sys
from covmerge.front.cli import main
names = ("torch", "transformers", "numpy", "huggingface_hub", "matplotlib", "jinja2")
for arguments in {commands!r}:
    sys.argv = ["covmerge", *arguments]
    try:
        main()
    except SystemExit as end:
        heavy = [name for name in names if name in sys.modules]
        print("\\f", arguments, end.code, heavy, file=sys.stderr)
    print("\\f")
"""


def printed_without_torch(commands):
    """What each command prints, all in one process; none fails, and none imports what is heavy."""
    code = _WITHOUT_TORCH.format(commands=commands)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "".join(f"\f {arguments} 0 []\n" for arguments in commands)
    return done.stdout.split("\f\n")


def test_help_does_not_wait_for_torch():
    expected = {
        "--help": "Merge fine-tuned models",
        "--version": f"covmerge {covmerge.__version__}\n",
        "merge --help": "--max-memory",
        "methods --help": "--json",
        "verify --help": "OUT",
        "push --help": "ORG/NAME",
        "report --help": "--html",
        "view --help": "--no-browser",
        "schema --help": "JSON Schema",
    }
    texts = printed_without_torch([line.split() for line in expected])
    for text, words in zip(texts, expected.values(), strict=False):
        assert words in text


WITH_TORCH_ALONE = """
import sys
from covmerge.front.cli import app, machine
machine._PRODUCT_SIDE, machine._EIGEN_SIDE, machine._SECONDS = 64, 32, 0.0  # a second of a dry run
for arguments in {commands!r}:
    app(arguments, standalone_mode=False)
optional = ("transformers", "huggingface_hub", "optuna", "matplotlib", "jinja2", "ray", "fsspec", "gguf")
print([name for name in optional if name in sys.modules], file=sys.stderr)
"""


def test_commands_import_nothing_that_is_heavy_but_torch(tmp_path):
    recipe, out = str(write_recipe(save_plain(tmp_path))), str(tmp_path / "out")
    commands = [
        ["plan", recipe],
        ["merge", recipe, "--dry-run"],
        ["merge", recipe, out],
        ["verify", out],
        ["inspect", recipe, "--json"],
    ]
    code = WITH_TORCH_ALONE.format(commands=commands)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_help_fits_80_columns():
    done = subprocess.run(
        [sys.executable, "-m", "covmerge", "merge", "--help"], capture_output=True, text=True
    )
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    for flag in (
        "base", "expert", "weight", "method", "set", "tensors", "dtype", "out-dtype", "shard-size",
        "device", "threads", "max-memory", "resume", "overwrite", "dry-run", "json",
    ):  # fmt: skip
        assert f"--{flag} " in done.stdout


def test_an_ascii_terminal_is_no_reason_to_fail():
    done = subprocess.run(
        [sys.executable, "-m", "covmerge", "methods", "ace"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
