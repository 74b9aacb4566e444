"""Every message that advises something is followed by a test, or stands here with a reason.

A message is a string of the source, `{}` for values; see tests/advised.py. A pattern here is looked for
in "FILE: MESSAGE".
"""

import re
from collections import Counter

from tests.advised import advising, followed

REASONS = {
    "no advice: a page, a table, a name, a report's words": [
        r"^cli/(catalogue|show|plan|comparing|methods|inspecting)\.py: ",
        r"^cli/merging\.py: report: ",
        r"^methods/(other_names|__init__|esm|free|ctm)\.py: ",
        r"^methods/della\.py: MAGPRUNE",
        r"^methods/regmean\.py: average: no data",
        r"^steps/(norm_balance|pact)\.py: ",
        r"^plan/(rules|data)\.py: average \(",
        r"^comparison\.py: (list|sees)",
        r"^layer\.py: update \{\}, copy",
        r"^export/card\.py: ",
        r"^publish\.py: Merge by",
        r"^registry/declared\.py: list of these",
        r"^inspection/job\.py: ",
        r"^tensors/(modules|names|describe)\.py: ",
        r"^checkpoints/adapter_parameters\.py: '\{\}' \{\} \(rank",
        r"^statistics/(sequences\.py: tokens, p|collect\.py: run block by block)",
        r"^recipe/explain\.py: a mapping with",
        r"^testing/",
        r"^phrasing\.py: ",
        r"^judgement/judge\.py: --allow \{\}",
        r"^plan/serving\.py: ",
        r"^stores/local_destination\.py: take it first",
        r"^engine/(forecast\.py: look over|options\.py: there is)",
        r"^cli/collect\.py: (EXPERT, DATA|--base, --expert)",  # the front of a message
        r"^cli/flags\.py: --(weight|stats) \{\}: there is no such expert\.",
        r"^unsaid\.py: an adapter of adapters",
        r"^identifiers\.py|^errors\.py: did you mean",
    ],
    "the intact file is what is merged wherever nothing else is said": [
        r"fetch (it|them|the files?|its files|the checkpoint|the file) again",
        r"[Ff]etch the checkpoint again",
        r": (save|verify) it again$",
        r"^checkpoints/(pickle_bounds|unpickler|gguf_file)\.py: .*(cut short|where you trust it|twice|past)",
    ],
    "needs the network, or a server that lies": [
        r"^stores/(hub|hub_commit|page_server|object_server|remote\w*|retries|address|store)\.py: ",
        r"^(checkpoints/(hub|remote)|sources)\.py: .*(server|downloaded|Hub|right folder|are fetched)",
        r"^quantised/bitsandbytes\.py: download it",
    ],
    "needs a GPU": [r"^engine/(device_room|devices)\.py: "],
    "needs several machines or processes; tests/engine and tests/remote have what they do": [
        r"^engine/(cluster/|ranks/|serving|hardware)",
        r"^engine/options\.py: --(device|executor ray)",
        r"^engine/processes\.py: (a worker process could not start|two worker processes ended)",
        r"^rank_job\.py: |^job\.py: ranks share|^checkpoints/writer\.py: there is no",
        r"^checkpoints/staging\.py: (another process|the file system)",
        r"^cli/stages\.py: ranks share",
    ],
    "needs a machine with too little memory or disk, or a folder that others own": [
        r"^engine/(budget|room|forecast)\.py: |^memory\.py: |^unsaid\.py: to run the base",
        r"^stores/(disk|range_cache|scratch|lock)\.py: ",
        r"^statistics/(of_base|needed)\.py: ",
        r"^statistics/collect\.py: (pass (fewer|--batch-size)|collect on a larger)",
        r"^statistics/file\.py: delete it, and the next merge makes it again",
        r"^cli/outcome\.py: (no room|the memory)|^cli/options\.py: the cache folder",
    ],
    "needs something that changes a file meanwhile": [
        r"let whatever writes it finish, and start again|something else changed it",
    ],
    "needs a package to be missing, or broken": [
        r"pip install '?covmerge\[|pip install pandas|takes the package|^table\.py: |^reporting/extra\.py: ",
        r"^registry/packages\.py: |^cli/extensions\.py: |^registry/table\.py: .*(package|announced)",
        r"^cli/outcome\.py: code of another package",
    ],
    "to the author of a method, a step or a program, who sees at once whether it helped": [
        r"^registry/(declared|table)\.py: |^steps/registry\.py: |^methods/registry\.py: (method '\{\}' (needs|sees)|its)",
        r"^(checkpoints/(base|layout|writer|memory|strict_json|torch_file|module_file|adapter)|tensors/views)\.py: "
        r".*(rows inside|rename it|rename the tensor|cannot hold: convert|pass a state dict|contiguous|plan it|"
        r"open them again|open the checkpoint again|convert it$|which cannot be stored|together with its base|"
        r"such as 5GB)",
        r"^viewer/server\.py: the recipe of this choice",
    ],
    "needs a program that is no package: llama.cpp, mergekit's flags, a browser": [
        r"^plan/(gguf|quantise)\.py: .*(llama\.cpp|convert_hf_to_gguf|convert the model|Name a type)|Name a type$",
        r"^cli/theirs\.py: ",
        r"^viewer/",
    ],
    "an interrupted merge: tests/checkpoints/test_writer_journal.py and test_writer_kill.py go on, and start over": [
        r"^checkpoints/(journal|writer|staging)\.py: .*(--overwrite|--resume)",
        r"run again with --resume",
    ],
}


def test_every_advice_is_followed_or_has_a_reason():
    templates, tests = advising(), followed()
    reasons = [pattern for patterns in REASONS.values() for pattern in patterns]
    left = [
        f"{file}: {text}"
        for text, file in templates.items()
        if not any(words in text for words in tests)
        and not any(re.search(pattern, f"{file}: {text}") for pattern in reasons)
    ]
    assert not left, "\n".join(left)


def test_what_tests_follow_is_one_message():
    templates = advising()
    counts = {words: sum(words in text for text in templates) for words in followed()}
    assert not [words for words, count in counts.items() if count == 0]


def test_no_reason_is_left_over():
    lines = [f"{file}: {text}" for text, file in advising().items()]
    patterns = [pattern for patterns in REASONS.values() for pattern in patterns]
    counts = Counter(p for p in patterns for line in lines if re.search(p, line))
    assert not [pattern for pattern in patterns if not counts[pattern]]
