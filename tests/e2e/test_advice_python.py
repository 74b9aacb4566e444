"""Calls from Python that are refused or warned of with an advice, and the same as it says."""

import os
import warnings
from datetime import date

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge import LowRank, merge_layer
from covmerge.errors import CovmergeError
from tests.advised import advice

pytestmark = pytest.mark.usefixtures("forget")  # functions that are passed stay registered
W = torch.diag(torch.arange(1.0, 9))
BASE = {"layers.0.fc.weight": W, "norm.weight": torch.ones(8)}
A = {name: tensor + 0.01 for name, tensor in BASE.items()}
B = {name: tensor - 0.02 for name, tensor in BASE.items()}
U, V = (0.1 * torch.randn(8, 8, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
LOW = LowRank(left=U[:, :2], right=V[:2])
NAN = torch.full((8, 8), float("nan"))
GRAM = torch.eye(8)
HALVES = [1.0, 1.0, 2.0]
EACH = {"generalized_task_arithmetic": {"density": [0.2, 0.3]}}


def merge(experts, method="average", **more):
    return covmerge.merge(BASE, experts, method, **more)


def mean(factor):
    """A function that is not registered."""

    def scaled(group):
        return factor * torch.stack(group.updates).mean(0)

    return scaled


class Scaled:
    """A class that is not registered."""

    def __call__(self, group, *, scale: float):
        return scale * torch.stack(group.updates).mean(0)


class Needy(Scaled):
    """One that wants arguments."""

    def __init__(self, scale):
        self.scale = scale


def written(folder):
    """A merge of files."""
    base, experts = saved(folder)
    return covmerge.merge(base, experts, "average", folder / "merged").path


def as_recipe(folder):
    """The same by files, with what only recipes have."""
    base, experts = saved(folder)
    return covmerge.parse_recipe(
        {"base": str(base), "experts": {"a": str(experts[0])}, "method": "average"}
    )


def saved(folder):
    """Base and expert as files."""
    folder.mkdir()
    for name, tensors in (("base", BASE), ("a", A)):
        save_file(tensors, folder / f"{name}.safetensors")
    return folder / "base.safetensors", [folder / "a.safetensors"]


def layer(updates, method="average", **more):
    return merge_layer(updates, method=method, **more)


# What is called, what is said of it, and what is called then.
CALLS = {
    "nothing": (
        lambda out: merge({"a": None}),
        advice("{} is None: pass a folder, a file, org/name, a state dict or a module"),
        lambda out: merge({"a": A}),
    ),
    "more than a source": (
        lambda out: merge({"a": ("a.safetensors", 0.5)}),
        advice("pass the source alone, and weights=, statistics= beside it"),
        lambda out: merge({"a": A}, weights={"a": 0.5}),
    ),
    "no source at all": (
        lambda out: merge({"a": 3}),
        advice(
            "{} is a {}: pass a folder, a file, org/name, a state dict, a module or the pair of an"
        ),
        lambda out: merge({"a": A}),
    ),
    "a step by itself": (
        lambda out: merge([A, B], after="rescale"),
        advice("{}: {} is no list: pass [{}]"),
        lambda out: merge([A, B], after=["rescale"]),
    ),
    "an expert by itself": (
        lambda out: merge("a.safetensors"),
        advice("experts: one alone is given: pass a list, [expert], or {name: expert}"),
        lambda out: merge([A]),
    ),
    "a state dict by itself": (
        lambda out: merge(A),
        advice("experts: a state dict is given: pass a list of them, or {name: state dict}"),
        lambda out: merge({"a": A}),
    ),
    "weights": (
        lambda out: merge([A, B], weights=[1.0]),
        advice("{} weights for {} experts: pass one for each"),
        lambda out: merge([A, B], weights=[1.0, 2.0]),
    ),
    "an argument": (
        lambda out: merge([A, B], worker=2),
        advice("merge takes no '{}'. Did you mean '{}'?"),
        lambda out: merge([A, B], max_memory="4GB"),
    ),
    "an adapter in memory": (
        lambda out: merge([A, B], form="adapter", rank=2),
        advice("an adapter is written to a folder: give an output folder"),
        lambda out: merge([A, B], out=out, form="adapter", rank=2),
    ),
    "an output to replace in memory": (
        lambda out: merge([A, B], overwrite=True),
        advice("{} is about an output folder, and none is given: give one, or leave out {}"),
        lambda out: (merge([A, B]), merge([A, B], out=out, overwrite=True)),
    ),
    "a comparison to go on with in memory": (
        lambda out: covmerge.compare(BASE, [A, B], ["ties"], resume=True),
        advice("{} is about an output folder, and none is given: give one, or leave out {}"),
        lambda out: covmerge.compare(BASE, [A, B], ["ties"], out / "models", resume=True),
    ),
    "nowhere to save": (
        lambda out: merge([A, B]).save(None),
        advice("the output is {}: give the name of a folder"),
        lambda out: merge([A, B]).save(out / "saved"),
    ),
    "an output that is there, to resume": (
        lambda out: [merge([A, B], out=out / "m", resume=more) for more in (False, True)],
        advice(
            "and a merge that ended is not resumed: take it as it is, or pass --overwrite to merge anew"
        ),
        lambda out: merge([A, B], out=out / "m", overwrite=True),
    ),
    "parameters after the method": (
        lambda out: covmerge.merge(BASE, [A, B], "ties", {"density": 0.5}),
        "pass density=0.5 in place of the mapping after the method",
        lambda out: merge([A, B], "ties", density=0.5),
    ),
    "the flag's name of an argument": (
        lambda out: covmerge.merge(BASE, [A, B], weight=[1, 2]),
        "merge takes no 'weight'. Did you mean 'weights'",
        lambda out: covmerge.merge(BASE, [A, B], weights=[1, 2]),
    ),
    "the flag's name with a line below": (
        lambda out: merge([A, B], out=out, as_="model"),
        "merge takes no 'as_'. Did you mean 'form'",
        lambda out: merge([A, B], out=out, form="model"),
    ),
    "an output without a name": (
        lambda out: merge([A, B], out=""),
        advice("the output is {}: give the name of a folder"),
        lambda out: merge([A, B], out=out / "merged"),
    ),
    "processes in memory": (
        lambda out: covmerge.merge(*saved(out), "average", workers=2),
        advice("a merge in memory cannot be shared by processes: leave out --workers"),
        lambda out: covmerge.merge(*saved(out), "average"),
    ),
    "state dicts in processes": (
        lambda out: merge([A, B], out=out, workers=2),
        advice("which other processes do not have: save it to a file, or leave out --workers"),
        lambda out: merge([A, B], out=out),
    ),
    "progress": (
        lambda out: merge([A, B], progress=3),
        advice("progress: {}: pass a function (done, total, what), an object with start"),
        lambda out: merge([A, B], progress=lambda done, total, what: None),
    ),
    "a shard size": (
        lambda out: merge([A, B], out=out, shard_size="much"),
        advice("{} is not a size; write bytes, '5GB' or '512MiB'"),
        lambda out: merge([A, B], out=out, shard_size="5GB"),
    ),
    "parameters in a dict": (
        lambda out: merge([A, B], "ties", parameters={"density": 0.5}),
        advice("merge takes parameters as keywords: pass {} in place of {}"),
        lambda out: merge([A, B], "ties", density=0.5),
    ),
    "one number as weights": (
        lambda out: merge([A, B], weights=0.5),
        advice("weights: {} is no list: pass one number for each expert"),
        lambda out: merge([A, B], weights=torch.tensor([0.5, 0.5])),
    ),
    "statistics in a list": (
        lambda out: merge([A, B], statistics=["a.covstats.safetensors"]),
        advice("statistics is a {}, no mapping: pass {expert: FILE}"),
        lambda out: merge([A, B], statistics={}),
    ),
    "statistics that are no file": (
        lambda out: merge({"a": A}, statistics={"a": {"fc": GRAM}}),
        advice("is a {}: pass the file that covmerge.collect wrote"),
        lambda out: merge({"a": A}),
    ),
    "no threads": (
        lambda out: merge([A, B], threads=0),
        advice("--threads: {} is no whole number above 0: give one"),
        lambda out: merge([A, B], threads=1),
    ),
    "a key of recipes": (
        lambda out: merge([A, B], chat_template="base"),
        advice(
            "merge takes no '{}', which recipes have: pass the same as a mapping to "
            "covmerge.parse_recipe, and what that returns to covmerge.run_recipe"
        ),
        lambda out: covmerge.run_recipe(as_recipe(out), None),
    ),
    "a parameter of all that are compared": (
        lambda out: covmerge.compare(BASE, [A, B], ["ties"], density=0.3),
        advice("compare takes no '{}': write it with its method, as in 'NAME({}=VALUE)'"),
        lambda out: covmerge.compare(BASE, [A, B], ["ties(density=0.3)"]),
    ),
    "what compare does not take": (
        lambda out: covmerge.compare(BASE, [A, B], ["ties"], max_memoy="4GB"),
        "compare takes no 'max_memoy'. Did you mean 'max_memory'",
        lambda out: covmerge.compare(BASE, [A, B], ["ties"], max_memory="4GB"),
    ),
    "what inspect does not take": (
        lambda out: covmerge.inspect(BASE, [A, B], weights=[1, 2]),
        "inspect takes no 'weights'",
        lambda out: covmerge.inspect(BASE, [A, B]),
    ),
    "what report does not take": (
        lambda out: covmerge.report(out, rank=2),
        "report takes no 'rank'",
        lambda out: covmerge.report(written(out)),
    ),
    "what extract does not take": (
        lambda out: covmerge.extract(BASE, A, out, 2, out_dtyp="float16"),
        "extract takes no 'out_dtyp'. Did you mean 'out_dtype'",
        lambda out: covmerge.extract(BASE, A, out, 2, out_dtype="float16"),
    ),
    "a function that is compared alone": (
        lambda out: covmerge.compare(BASE, [A, B], mean(1.0)),
        advice("methods: {} is no list: pass [METHOD, ...]"),
        lambda out: covmerge.compare(BASE, [A, B], [mean(1.0)]),
    ),
    "a class that is made with arguments": (
        lambda out: merge([A, B], Needy),
        advice("a class, which is made without arguments ({}): take parameters in __call__("),
        lambda out: merge([A, B], Scaled, scale=0.5),
    ),
    "a parameter without a default": (
        lambda out: merge([A, B], Scaled),
        advice("it has no default: give its value"),
        lambda out: merge([A, B], Scaled, scale=0.5),
    ),
    "a parameter twice": (
        lambda out: merge([A, B], "ties(density=0.5)", density=0.5),
        advice("{}: '{}' is given twice: give it once"),
        lambda out: merge([A, B], "ties(density=0.5)"),
    ),
    "a method in a dict": (
        lambda out: covmerge.compare(BASE, [A, B], {"task_arithmetic": {"scale": 0.3}}),
        advice("is no method: write its name, 'task_arithmetic(scale=0.3)' or ('task_arithmetic',"),
        lambda out: covmerge.compare(BASE, [A, B], [("task_arithmetic", {"scale": 0.3})]),
    ),
    "a method in another notation": (
        lambda out: covmerge.compare(BASE, [A, B], ["task_arithmetic:scale=0.3"]),
        r"Write task_arithmetic\(KEY=VALUE\)\.",
        lambda out: covmerge.compare(BASE, [A, B], ["task_arithmetic(scale=0.3)"]),
    ),
    "a method's parameters for one layer": (
        lambda out: layer([U, V], "ties(density=0.5)"),
        "Pass 'ties' and keywords",
        lambda out: layer([U, V], "ties", density=0.5),
    ),
    "an object as a method": (
        lambda out: merge([A, B], object()),
        advice("pass its name, a function or a class, and its parameters as keywords"),
        lambda out: merge([A, B], "ties", density=0.5),
    ),
    "an expert to subtract": (
        lambda out: merge([A, B], weights=[1.0, -1.0]),
        advice(
            "to subtract an expert pass --method {} and --set {}, a number for each expert in their order"
        ),
        lambda out: merge([A, B], "generalized_task_arithmetic", weight=[1.0, -1.0]),
    ),
    "a stored dtype": (
        lambda out: merge([A, B], out_dtype="int8"),
        "arguments: out_dtype is 'int8'; it must be 'base', 'float32'",
        lambda out: merge([A, B], out_dtype=torch.bfloat16),
    ),
    "a rank of a model": (
        lambda out: merge([A, B], rank=2),
        advice("{} belongs to --as adapter, and the output is a model"),
        lambda out: merge([A, B], out=out, form="adapter", rank=2),
    ),
    "an adapter in quantised form": (
        lambda out: merge([A, B], out=out, form="adapter", rank=2, quantise="fp8-tensor"),
        advice("--quantise {} belongs to --as model: adapters are stored plain"),
        lambda out: merge([A, B], out=out, form="adapter", rank=2),
    ),
    "a quantised model in float64": (
        lambda out: merge([A, B], out=out, quantise="fp8-tensor", out_dtype="float64"),
        advice(
            "--quantise {} needs a dtype that clients compute in, and float64 is none: pass "
            "--out-dtype float32"
        ),
        lambda out: merge([A, B], out=out, out_dtype="float32"),  # a state dict has no config
    ),
    "what stays plain": (
        lambda out: merge([A, B], out=out, keep=["*fc*"]),
        advice("--keep belongs to --quantise, and the output is plain"),
        lambda out: merge([A, B], out=out),
    ),
    "shards of an adapter": (
        lambda out: merge([A, B], out=out, form="adapter", rank=2, shard_size="1GB"),
        advice("--shard-size belongs to --as model: an adapter is one file"),
        lambda out: merge([A, B], out=out, form="model", shard_size="1GB"),
    ),
    "two functions of one name": (
        lambda out: covmerge.compare(BASE, [A, B], [mean(1.0), (mean(2.0), {})]),
        advice("two functions are called '{}': give each a name of its own"),
        lambda out: covmerge.compare(BASE, [A, B], [mean(1.0), "average"]),
    ),
    "no methods": (
        lambda out: covmerge.compare(BASE, [A, B], []),
        advice("no methods to compare: name some, or `all`"),
        lambda out: covmerge.compare(BASE, [A, B], ["average", "ties"]),
    ),
    "steps": (
        lambda out: merge([A, B], after=["norm_balance"]),
        advice("step '{}' is one {} a method: name it under `{}`"),
        lambda out: merge([A, B], before=["norm_balance"]),
    ),
    "a step in braces": (
        lambda out: layer([U, V], after=[{"rescale": 2}]),
        advice("{}: {} is not one step: write {name: {parameters}}"),
        lambda out: layer([U, V], after=[{"rescale": {}}]),
    ),
    "values by expert": (
        lambda out: merge([A, B], "linear", weight=[1.0]),
        advice("give one value for all, or one for each in this order"),
        lambda out: merge([A, B], "linear", weight=[1.0, 2.0]),
    ),
    "no updates": (
        lambda out: layer([]),
        advice("merge_layer: the list of updates is empty; pass at least one"),
        lambda out: layer([U]),
    ),
    "shares": (
        lambda out: layer([U, V], weights=[1.0]),
        advice("weights {} for {} updates: pass one positive, finite number each"),
        lambda out: layer([U, V], weights=[1.0, 2.0]),
    ),
    "two dtypes": (
        lambda out: layer([U, V.double()]),
        advice("update 0 is {} {} on {}: bring them to one shape, dtype and device"),
        lambda out: layer([U.double(), V.double()]),
    ),
    "integers": (
        lambda out: layer([U.int()]),
        advice("update {} is {}: pass floating-point differences"),
        lambda out: layer([U.int().float() + U]),
    ),
    "not finite": (
        lambda out: layer([U, NAN]),
        advice("update {} holds NaN or Inf: pass the difference of finite weights"),
        lambda out: layer([U, V]),
    ),
    "data that are not finite": (
        lambda out: layer([U, V], "regmean", data=[GRAM, NAN]),
        advice("data {} holds NaN or Inf: collect it again"),
        lambda out: layer([U, V], "regmean", data=[GRAM, 2 * GRAM]),
    ),
    "data that are not given": (
        lambda out: layer([U, V], "regmean"),
        advice("of every expert, and has {} for {}: pass one for each update (data=)"),
        lambda out: layer([U, V], "regmean", data=[GRAM, 2 * GRAM]),
    ),
    "data of another size": (
        lambda out: layer([U, V], "regmean", data=[torch.eye(7)] * 2),
        advice("its update {} needs {}: collect it on this model"),
        lambda out: layer([U, V], "regmean", data=[GRAM, 2 * GRAM]),
    ),
    "no base": (
        lambda out: layer([U], "nearswap"),
        advice("needs the base's weights: pass them as `base=`"),
        lambda out: layer([U], "nearswap", base=W),
    ),
    "a base that is not looked at": (
        lambda out: layer([U, V], base=W),
        advice("method '{}' does not look at the base: leave out `base=`"),
        lambda out: layer([U, V]),
    ),
    "another base": (
        lambda out: layer([U], "nearswap", base=W[:4]),
        advice("the base is {}, the updates are {}: pass finite weights of their shape"),
        lambda out: layer([U], "nearswap", base=W),
    ),
    "a dtype": (
        lambda out: layer([U, V], stored=torch.int32),
        advice("stored={}: pass a floating-point dtype, as torch.float32"),
        lambda out: layer([U, V], stored=torch.float32),
    ),
    "a dtype of factors": (
        lambda out: layer([LOW, LOW], stored=torch.float32),
        advice("leave out `stored=`, or pass the updates multiplied out, as update.dense()"),
        lambda out: layer([LOW.dense(), LOW.dense()], stored=torch.float32),
    ),
    "a vector": (
        lambda out: layer([U[0], V[0]], "actmat"),
        advice(
            "merges matrices (d_out, d_in), the updates are {}; merge other tensors by `average`"
        ),
        lambda out: layer([U[0], V[0]], "average"),
    ),
    "a result that its dtype cannot hold": (
        lambda out: layer([1e3 * U.half(), 1e3 * V.half()], "task_arithmetic", scale=1e3),
        advice("pass them in a wider one, as update.float() or update.double()"),
        lambda out: layer([1e3 * U, 1e3 * V], "task_arithmetic", scale=1e3),
    ),
    "a product that is too large": (
        lambda out: layer([LowRank(left=1e30 * U[:, :2], right=1e30 * V[:2])] * 2, "ties"),
        advice("pass the factors in float64, or divided by what the result is multiplied by"),
        lambda out: layer(
            [LowRank(left=1e30 * U[:, :2].double(), right=1e30 * V[:2].double())] * 2, "ties"
        ),
    ),
    "too many updates": (
        lambda out: layer([U, V], "nearswap", base=W),
        advice("method '{}' merges {}, and there are {}: choose another method"),
        lambda out: layer([U, V], "average"),
    ),
    "directions that cancel": (
        lambda out: layer([U, U, -U], "multislerp", base=0 * W, weights=HALVES),
        advice("give other weights, or merge this tensor by `linear`"),
        lambda out: layer([U, U, -U], "multislerp", base=0 * W),
    ),
    "a dtype of a tensor": (
        lambda out: merge({"a": A | {"own": torch.empty(0).to_sparse()}}),
        advice("is no plain dense tensor with values ({}): convert it first"),
        lambda out: merge({"a": A}),
    ),
    "no tensor": (
        lambda out: merge({"a": A | {"own": 3}}),
        advice("leave it out, and pass tensors alone"),
        lambda out: merge({"a": A}),
    ),
    "a date": (
        lambda out: merge([A, B], "task_arithmetic", scale=date(2026, 1, 1)),
        advice("{} is of type {}; use numbers, text or lists"),
        lambda out: merge([A, B], "task_arithmetic", scale=0.5),
    ),
    "a step that is no list": (
        lambda out: layer([U, V], before="norm_balance"),
        advice("{}: {} is no list of steps: write [name, {name: {parameters}}]"),
        lambda out: layer([U, V], before=["norm_balance"]),
    ),
    "data as stored": (
        lambda out: layer([U, V], "fisher", data=[U.abs(), V.abs()], before=["pact"], base=W),
        advice("and step '{}' needs oriented matrices: leave out one of them"),
        lambda out: (
            layer([U, V], "fisher", data=[U.abs(), V.abs()]),
            layer([U, V], before=["pact"], base=W),
        ),
    ),
    "a folder that cannot be called so": (
        lambda out: covmerge.compare(BASE, [A, B], [*EACH, *EACH.items()]),
        advice("'{}' cannot name a folder: give these values by --set"),
        lambda out: covmerge.compare(BASE, [A, B], [*EACH], parameters=EACH),
    ),
    "a model with no base": (
        lambda out: covmerge.inspect(None, {"a": A}),
        advice("{} is None: pass a folder, a file, org/name, a state dict or a module"),
        lambda out: covmerge.inspect(BASE, {"a": A}),
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_as_it_is_advised(name, tmp_path):
    wrong, said, right = CALLS[name]
    with pytest.raises(CovmergeError, match=said):
        wrong(tmp_path / "wrong")
    right(tmp_path / "out")


def test_a_long_merge_is_shortened():
    with pytest.warns(
        UserWarning, match=advice("take a smaller scale where the method has one, or an")
    ):
        layer([U, V], "task_arithmetic", scale=30.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer([U, V], "task_arithmetic", scale=0.5)


def test_the_dtype_of_rounded_updates_is_said():
    rounded = [LowRank(left=u[:, :2], right=u[:2]).dense().double() for u in (U, V)]
    said = advice(
        "Pass stored=torch.float32 if the update was rounded to it, and base= too if the weights"
    )
    with pytest.warns(UserWarning, match=said):
        layer(rounded, "actmat")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        layer(rounded, "actmat", stored=torch.float32)
        layer(rounded, "actmat", stored=torch.float64)
    assert not [one for one in told if "digits" in str(one.message)]


def test_a_file_of_many_names_is_split(tmp_path, monkeypatch):
    """Of a name's length: a header of more than 100 MB has hundreds of thousands."""
    monkeypatch.setattr("covmerge.files.checkpoints.layout.MAX_HEADER_BYTES", 200)
    with pytest.raises(CovmergeError, match=advice("{}: pass a smaller shard size")):
        merge({"a": A}, out=tmp_path / "out")
    merge({"a": A}, out=tmp_path / "out", shard_size=256, overwrite=True)


def test_a_pipe_is_no_model(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CovmergeError, match=advice("file nor a folder: pass one of them")):
        merge({"a": tmp_path / "pipe"})
    save_file(A, tmp_path / "a.safetensors")
    merge({"a": tmp_path / "a.safetensors"})


def test_tensors_of_which_processes_have_parts():
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in A.items()}
        said = advice(
            "is a {}, of which each process has a part: pass {name: tensor.full_tensor()}"
        )
        with pytest.raises(CovmergeError, match=said):
            merge({"a": parts, "b": B})
        found = merge({"a": {n: tensor.full_tensor() for n, tensor in parts.items()}, "b": B})
    finally:
        distributed.destroy_process_group()
    assert all(torch.equal(found.tensors[n], t) for n, t in merge({"a": A, "b": B}).tensors.items())


@pytest.mark.parametrize("name", ["out_dir", "out_folder", "output_path"])
def test_the_folder_is_called_out(name, tmp_path):
    with pytest.raises(CovmergeError, match=advice("merge takes no '{}'. Did you mean 'out'?")):
        merge([A, B], **{name: tmp_path / "out"})
    assert merge([A, B], out=tmp_path / "out").path == tmp_path / "out"


def test_patience_is_of_ranks(tmp_path):
    said = advice("--patience {} is of ranks, which wait for each other: give --executor ranks too")
    with pytest.raises(CovmergeError, match=said):
        merge([A, B], out=tmp_path / "out", patience=3.0)
    with pytest.raises(CovmergeError) as error:
        merge([A, B], out=tmp_path / "out", patience=3.0, executor="ranks")
    assert "which wait for each other" not in str(error.value)
