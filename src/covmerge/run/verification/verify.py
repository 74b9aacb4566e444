"""Re-reading of an output, to check the claims of its manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.settings import Hint
from covmerge.base.text import counted, some
from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json, Role, TensorHeader
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import Checkpoint, Content, at_once
from covmerge.files.checkpoints.folder import open_file
from covmerge.files.checkpoints.layout import HEADS_FOLDER
from covmerge.files.checkpoints.manifest import NOT_KNOWN, pinned_source, read_manifest
from covmerge.files.checkpoints.open import Source, open_checkpoint, open_store
from covmerge.files.quantised.gguf_file import GGUF
from covmerge.files.quantised.packed import Packed
from covmerge.files.quantised.view import dequantised, open_plain
from covmerge.files.stores.remote import store_at
from covmerge.files.stores.store import Store, file_at
from covmerge.files.tensors.describe import describe_checkpoint
from covmerge.files.tensors.shown import same_values, seen_untied
from covmerge.maths.linalg.lapack import norm
from covmerge.plan.moe.architectures import ARCHITECTURES
from covmerge.plan.moe.view import mixed
from covmerge.plan.planning.slices import stacked
from covmerge.plan.recipe import Mixture, Slice
from covmerge.run.engine.entries import MOSTLY, rounding_said
from covmerge.run.engine.hashing import (
    Onlooker,
    ReadFiles,
    WeightsCheck,
    hashes_in,
    hashes_of,
    read_files,
)
from covmerge.run.engine.thread_count import use_threads
from covmerge.run.export.expert_models import find_masks
from covmerge.run.verification.files import Found, check_files, hash_files
from covmerge.run.verification.outcome import DIFFERS, Check, Verification

# Checks of a merged adapter.


def check_adapter(
    store: Store, manifest: Mapping[str, Any], written: Checkpoint
) -> tuple[Check, ...]:
    """Check an adapter that covmerge merged.

    The checks are coverage (each update of the manifest is there with its rank, each tensor that is held
    whole is there, and no other), finite values, any change of the base, and the task heads.
    """
    if not isinstance(written, AdapterCheckpoint):
        return (Check("coverage", ok=False, detail="there is no adapter in the folder"),)
    entries: Mapping[str, Mapping[str, Any]] = manifest["tensors"]
    places = [entry["adapter"] for entry in entries.values() if "adapter" in entry]
    # A tensor that is held whole has rank None.
    wanted = {
        name: place.get("rank")
        for place in places
        for name in (place["tensor"], *place.get("ties", ()))
    }
    ranks: dict[str, int | None] = {n: header.rank for n, header in written.low_rank.items()}
    sizes = _sizes(written)
    ranks |= dict.fromkeys(written.headers)
    wrong = sorted(n for n in {*ranks, *wanted} if ranks.get(n, 0) != wanted.get(n, 0))
    bad = [name for name, size in sizes.items() if not isfinite(size)]
    whole = [e for e in entries.values() if "adapter" in e and "rank" not in e["adapter"]]
    # Of a tensor that is held whole the adapter has the weights, and the manifest has the update.
    changed = any(e["merged_norm"] and e["rounding_loss"] < 1.0 for e in whole) or any(
        size for name, size in sizes.items() if ranks[name] is not None
    )
    strange = f"missing, unknown or of another rank: {some(wrong, 5)}"
    difference = "the updates are not all zero" if changed else "every update is zero"
    if not changed and any(e.get("left_out") and e["merged_norm"] for e in entries.values()):
        difference += f", and what changed has no place in it: {Hint('whole')} holds that whole"
    return (
        Check("coverage", not wrong, strange if wrong else _all_there(len(wanted))),
        Check("finite", not bad, some(bad, 5) or "no NaN or Inf"),
        Check(DIFFERS, changed, difference),
        _heads(store, manifest),
    )


def _sizes(written: AdapterCheckpoint) -> dict[str, float]:
    """Return norms of whole tensors, and bounds for updates, which are 0 or not finite if the update is."""

    def of_factors(name: str) -> float:
        factors = written.read_factors(name)
        return norm(factors.left) * norm(factors.right)

    def of_whole(name: str) -> float:
        return norm(written.read(name).float())

    # Factors are too thin to divide one sum among cores, so each core takes other tensors.
    with ThreadPool(torch.get_num_threads(), initializer=use_threads, initargs=(1,)) as pool:
        low_rank = dict(zip(written.low_rank, pool.map(of_factors, written.low_rank), strict=True))
        whole = dict(zip(written.headers, pool.map(of_whole, written.headers), strict=True))
    return low_rank | whole


_BLOCK_ELEMENTS = 2**20  # elements of a quantised tensor that are read at a time
_NO_BASE = "the recipe has no base"


def verify(folder: str | Path | Store, *, base: Checkpoint | Source | None = None) -> Verification:
    """Re-read an output of covmerge and check it.

    The checks are:

    - files: every file has its recorded hash, and no other weights lie beside them;
    - coverage: each tensor of the manifest, and no other, is there with its shape and dtype;
    - values are finite;
    - copied tensors equal the base's, and the output "differs from base";
    - the rounding loss of the output dtype;
    - the task heads, and masks.

    For an adapter, coverage compares the updates and their ranks.

    Args:
        folder: the output, by path or address, or the store that holds it.
        base: the base checkpoint, or a source as `merge` takes it. None opens the source that the
            manifest names, and fetches it if it is on the Hub. If that source cannot be opened, or has
            changed, the comparison uses the recorded norms and says so.

    Raises:
        InputError: the folder is not an output of covmerge, or `base` is not the base of the merge.
        CheckpointError: the store cannot be read.
    """
    store = store_at(folder) if isinstance(folder, str | Path) else folder
    if not callable(getattr(store, "names", None)):  # for callers without a type checker
        raise InputError(
            f"what is to be verified is a {type(folder).__name__}: pass the folder of an output, as "
            "result.path is of a merge to disk"
        )
    try:
        manifest = read_manifest(store)
        given = isinstance(base, str | Path | Mapping | nn.Module | tuple)
        start = open_checkpoint(base) if given else base
        if start is not None:
            _check_base(start, store, manifest)
        checks, found = examine(store, manifest, manifest.get("files", ()), base=start)
        files = check_files(store, manifest, found)
    except OSError as error:  # a server may fail at any moment
        raise CheckpointError(f"{store} cannot be read: {error.strerror or error}") from error
    return Verification(store.folder or store, (files, *checks))


def examine(
    store: Store,
    manifest: Mapping[str, Any],
    names: Iterable[str],
    *,
    base: Checkpoint | None = None,
    read: ReadFiles = read_files,
) -> tuple[tuple[Check, ...], Found]:
    """Read an output once; return all checks except that of the files' hashes, and these hashes.

    The files of `names` are hashed; weights are read too if coverage passes. Without a base, the source is
    opened that the manifest names, as in `verify`. `read` reads the files of weights, in this process or in
    those of the merge.
    """
    try:
        stored = open_store(str(store), store)
        output = dequantised(stored)
    except InputError as error:
        return (Check("coverage", ok=False, detail=str(error)),), hash_files(store, names)
    opened: Checkpoint | None = None
    try:
        if manifest["recipe"]["output"].get("format") == "adapter":
            return check_adapter(store, manifest, stored), hash_files(store, names)
        entries: Mapping[str, Mapping[str, Any]] = manifest["tensors"]
        coverage = _coverage(entries, output, stored.weight_names)
        missing = ""
        if manifest["recipe"]["base"] is None:
            base, missing = None, _NO_BASE
        elif base is None:
            try:
                opened = open_plain(pinned_source(manifest, "base", manifest["recipe"]["base"]))
                opened.materialize()
                if _is_another(opened, manifest):  # the path may hold another model by now
                    missing = f"the base at {opened.source} is another than was merged"
                else:
                    mixture = _mixed(seen_untied(opened, manifest.get("untied")), manifest)
                    slices = manifest["recipe"].get("slices", ())
                    base = stacked(list(map(Slice.model_validate, slices)), None, mixture)
            except InputError as error:
                base, missing = None, str(error)
        else:
            base = _mixed(seen_untied(base, manifest.get("untied")), manifest)
        apart = _of_tokens(manifest) if opened is not None else frozenset[str]()
        apart |= late_routers(manifest)
        values = _Values(manifest, base, missing, apart)
        weights = stored.weight_names if coverage.ok else ()
        quantisation = output.quantisation
        packed: Mapping[str, Packed] = {} if quantisation is None else quantisation.packed
        parts = {name for one in packed.values() for name in one.stored}
        parts |= frozenset() if quantisation is None else quantisation.unused
        check = WeightsCheck(store, values.seen.base is not None, apart, frozenset(parts))
        sizes = {name: _size(store, name) for name in weights}
        inspected = read(sizes, check, values.seen.base or output)
        found: Found = {
            name: hashes_in(inspected[name]) if name in inspected else hashes_of(store, name)
            for name in dict.fromkeys([*names, *weights])
        }
        values.take(inspected.values())
        if coverage.ok:
            values.inspect_rows(output, packed)  # read again, dequantised as for a client
        checks = [coverage, *(values.checks() if coverage.ok else ())]
        checks += [_rounding(manifest), _heads(store, manifest)]
        if "rescalers" in manifest:
            checks.append(_masks(store, list(manifest["rescalers"])))
        return tuple(checks), found
    finally:
        stored.close()
        if opened is not None:
            opened.close()


def _check_base(base: Checkpoint, store: Store, manifest: Mapping[str, Any]) -> None:
    """Raise if a base has other hashes than the merged one; a base in other files, or memory, passes."""
    known = _content_of_base(manifest).keys()
    if known >= {file.name for file in _weights_of(base)} and _is_another(base, manifest):
        raise InputError(
            f"{base.source} is not the base that {store} was merged over: pass that one"
        )


def _is_another(base: Checkpoint, manifest: Mapping[str, Any]) -> bool:
    """Return whether a base's weights have other hashes than recorded; other files may change."""
    recorded = _content_of_base(manifest)
    return bool(recorded) and any(
        file.hash(at_once) != recorded.get(file.name) for file in _weights_of(base)
    )


def _weights_of(base: Checkpoint) -> list[Content]:
    return [file for file in base.contents() if not file.early]


def _content_of_base(manifest: Mapping[str, Any]) -> Mapping[str, str]:
    content: Mapping[str, str] = manifest.get("sources", {}).get("base", {}).get("content", {})
    return {name: said for name, said in content.items() if not str(said).startswith(NOT_KNOWN)}


def _size(store: Store, name: str) -> int:
    try:
        size, *_ = file_at(store, name).stamp()
    except FileNotFoundError:  # removed since it was opened: reading it gives the error
        return 0
    return size


def _heads(store: Store, manifest: Mapping[str, Any]) -> Check:
    """Check that every task head of the manifest is there, can be read, and has its tensors."""
    wrong: list[str] = []
    heads: Mapping[str, list[str]] = manifest["heads"]
    for expert, names in heads.items():
        try:
            file = file_at(store, f"{HEADS_FOLDER}/{expert}.safetensors")
            head = open_file(str(file), file)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        if set(head.headers) != set(names):
            wrong.append(f"heads/{expert}.safetensors holds {sorted(head.headers)}, not {names}")
        head.close()
    good = f"{len(heads)} task heads kept" if heads else "no task heads"
    return Check("heads", not wrong, "; ".join(wrong) or good)


def _all_there(count: int) -> str:
    return f"{f'all {count} tensors are' if count > 1 else 'its one tensor is'} there, and no other"


def _mixed(base: Checkpoint, manifest: Mapping[str, Any]) -> Checkpoint:
    recipe = manifest["recipe"]
    moe = recipe.get("moe")
    if moe is None:
        return base
    return mixed(Mixture.model_validate(moe), {None: base}, list(recipe["experts"]))[None]


def _of_tokens(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Return tensors whose rows may be other tokens than the base's, guessed from the manifest alone."""
    decided: Mapping[str, Any] = manifest.get("vocabulary") or {}
    roles = (Role.EMBEDDING, Role.OUTPUT, Role.BIAS)
    return frozenset(
        name
        for name, entry in manifest["tensors"].items()
        if entry["shape"][:1] == [decided.get("rows")] and entry["role"] in roles
    )


def late_routers(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Return routers computed from experts or a run of the base; the stored base has none to compare."""
    recorded = manifest["recipe"].get("moe")
    if recorded is None or not (moe := Mixture.model_validate(recorded)).late:
        return frozenset()
    architecture = ARCHITECTURES[moe.architecture]
    return frozenset(
        name
        for name in manifest["tensors"]
        if architecture.is_gate(name) or architecture.is_shared_gate(name)
    )


def _masks(store: Store, experts: list[str]) -> Check:
    wrong: list[str] = []
    for expert in experts:
        try:
            find_masks(store, expert)
        except (InputError, CheckpointError) as error:
            wrong.append(str(error))
    good = f"those of {counted(len(experts), 'expert')} are as they were written"
    return Check("masks", not wrong, "; ".join(wrong) or good)


def _coverage(
    entries: Mapping[str, Mapping[str, Any]], output: Checkpoint, files: Sequence[str]
) -> Check:
    headers: Mapping[str, TensorHeader] = output.headers
    wrong = [f"'{name}' is not in the manifest" for name in headers if name not in entries]
    strange = [name for name in files if not name.endswith((".safetensors", GGUF))]
    if strange:
        wrong.append(f"{strange[0]} is no file of weights that covmerge writes")
    if not files:
        wrong.append("an adapter lies where a model was written")
    wrong += _badly_tied(output)
    for name, entry in entries.items():
        if name not in headers:
            wrong.append(f"'{name}' is missing")
            continue
        header = headers[name]
        found = (list(header.shape), str(header.dtype).removeprefix("torch."))
        if found != (entry["shape"], entry["dtype"]):
            wrong.append(
                f"'{name}' is {found[1]} {found[0]}, not {entry['dtype']} {entry['shape']}"
            )
    detail = some(wrong, 5, between="; ") or _all_there(len(entries))
    return Check("coverage", not wrong, detail)


def _badly_tied(output: Checkpoint) -> Iterator[str]:
    """Say where config.json and the stored tensors contradict each other about ties."""
    found = describe_checkpoint(output)
    if found.lacks_head is not None:
        yield f"'{found.lacks_head}' is not stored, and config.json ties it to no other tensor"
    for name, info in found.tensors.items():
        tied = info.tied_to
        if tied is not None and tied in output.headers and not same_values(output, name, tied):
            yield f"'{name}' differs from '{tied}', and config.json says that they are tied"


class _Values:
    """The findings on all tensors: which are not finite, and which differ from the base's."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        base: Checkpoint | None,
        missing: str,
        apart: Collection[str],
    ) -> None:
        entries: Mapping[str, Mapping[str, Any]] = manifest["tensors"]
        self._entries = entries
        self._allowed: Collection[str] = manifest["recipe"].get("allow", ())
        vocabulary: Mapping[str, Any] = manifest.get("vocabulary") or {}
        self._given_by: Sequence[str] = vocabulary.get("given_by", ())
        self._missing = missing
        self._apart = apart
        if base is not None:
            headers = base.headers
            other = [
                n
                for n, e in entries.items()
                if n not in headers or (n not in apart and list(headers[n].shape) != e["shape"])
            ]
            if other:
                base = None
                self._missing = f"the base is another by now: '{other[0]}' is not as it was there"
        self.seen = Onlooker(base, apart)
        if base is not None:
            self.seen.changed |= {name for name in apart if entries[name].get("merged_norm")}

    def take(self, results: Iterable[Json]) -> None:
        """Add the results of `WeightsCheck` on files."""
        for found in results:
            fields = cast("Mapping[str, Any]", found)
            self.seen.not_finite.update(fields.get("not_finite", ()))
            self.seen.changed.update(fields.get("changed", ()))

    def inspect_rows(self, output: Checkpoint, names: Iterable[str]) -> None:
        """Read tensors of the output and check them.

        Raises:
            InputError: the output, or the base, could not be read.
        """
        for name in names:
            header = output.headers[name]
            for rows in header.row_blocks(_BLOCK_ELEMENTS):
                self.seen.inspect(header, rows, output.read(name, rows))
        if self.seen.error is not None:
            raise self.seen.error

    @property
    def lost(self) -> list[str]:
        """Return tensors that were copied unrounded from the base, and differ from the base's."""
        return sorted(
            n for n in self.seen.changed if n not in self._rounded and not self._is_merged(n)
        )

    @property
    def _rounded(self) -> set[str]:
        """Return tensors that were copied from the base, and changed by rounding to a quantised format."""
        return {
            name
            for name, entry in self._entries.items()
            if "quantised" in entry and entry["quantised"]["error"] and not self._is_merged(name)
        }

    def _is_merged(self, name: str) -> bool:
        return "merged_norm" in self._entries[name]

    @property
    def _why_equal(self) -> str:
        if any("quantised" in entry for entry in self._entries.values()):
            return (
                "rounding to the quantised format leaves nothing of the update: write a higher format, or "
                f"keep layers plain ({Hint('keep')})"
            )
        if "unchanged-expert" in self._allowed:
            return "what was allowed lets an expert be unchanged beside others, and none of these changed"
        return "were the experts trained?"

    def checks(self) -> list[Check]:
        """Return the checks, after all tensors were read."""
        entries = self._entries
        if self.seen.base is None:
            changed = sum(bool(entry.get("merged_norm")) for entry in entries.values())
            against = ", by recorded norms (the base is not at hand)"
        else:
            changed, against = len(self.seen.changed), ""
        bad = sorted(self.seen.not_finite)
        checks = [Check("finite", not bad, some(bad, 5) or "no NaN or Inf")]
        if self._missing == _NO_BASE:
            return checks
        if changed:
            verb = "differs" if changed == 1 else "differ"
            detail = (
                f"{changed} of {counted(len(entries), 'tensor')} {verb} from the base's{against}"
            )
        elif self._given_by:
            given = some(self._given_by, quoted=True)
            detail = f"rows of tokens are those of {given}, and not the base's"
        else:
            detail = f"every tensor equals the base's{against}: {self._why_equal}"
        checks.append(Check(DIFFERS, bool(changed or self._given_by), detail))
        if self.seen.base is None:
            detail = f"not compared: {self._missing}"
            return [*checks, Check("copied", ok=True, detail=detail, made=False)]
        beside = f"; {len(self._apart)} have rows of other tokens or experts" if self._apart else ""
        beside += f"; {len(self._rounded)} are rounded copies" if self._rounded else ""
        detail = some(self.lost, 5) or f"tensors copied from the base equal it{beside}"
        return [*checks, Check("copied", not self.lost, detail)]


def _rounding(manifest: Mapping[str, Any]) -> Check:
    if manifest["recipe"]["base"] is None:
        return Check("rounding", ok=True, detail=f"not compared: {_NO_BASE}", made=False)
    totals = manifest["totals"]
    loss = float(totals["rounding_loss"])
    packed: Mapping[str, Any] | None = totals.get("quantised")
    if packed is not None and "lost" in packed:  # the loss of other tensors is negligible beside it
        left, lost = packed["kept"], packed["lost"]
        detail = f"{left:.2%} of the update is left in quantised tensors, beside noise of {lost:.2%} of it"
        return Check("rounding", ok=True, detail=detail, noted=lost >= 1.0)
    return Check(
        "rounding",
        loss < 1.0,
        rounding_said(totals)
        + (f": store it in float32 ({Hint('out_dtype', 'float32')})" if loss > 0.1 else ""),
        noted=loss >= MOSTLY or totals.get("arithmetic_loss", 0.0) >= 1.0,
    )
