"""Every message that advises something is followed by a test, or stands here with a reason.

A message is a string of the source, `{}` for values; see tests/advised.py. A pattern here is looked for
in "FILE: MESSAGE".
"""

import re

from tests.advised import advising, followed, messages

REASONS = {
    "no advice: a page, a table, a name, a report's words, the front of another message": [
        r"^front/cli/(catalogue|show|plan|comparing|methods|inspecting)\.py: ",
        r"^maths/methods/(other_names|__init__|esm|free|ctm)\.py: ",
        r"^run/search/job\.py: --(objective|sampler)",
        r"^maths/layer\.py: update \{\}, copy",
        r"^run/export/(card\.py: |adapter\.py: (PEFT would|they are))",
        r"^front/publish\.py: Merge by",
        r"^run/inspection/job\.py: ",
        r"^files/tensors/(modules|names|describe)\.py: ",
        r"^plan/statistics/(generated\.py: tokens, p|collect\.py: run block by block)",
        r"^plan/statistics/written\.py: (--start (bos|chat)|leave out --start base, or name)",
        r"^plan/recipe/(varied\.py: A value|load\.py: write \[low)",
        r"^plan/recipe/(explain\.py: |varied\.py: \{\} has the keys|mergekit/reading\.py: \{\}: \{\} It)",
        r"^maths/testing/|^base/settings\.py: |^base/identifiers\.py: |^base/errors\.py: did you mean",
        r"^plan/planning/adapter\.py: (PEFT loads| +--max-lora|, and so do|it takes (ranks|nothing))",
        r"^plan/planning/data\.py: (--|`covmerge|, or (take|name))",
        r"^files/stores/destination\.py: take it first",
        r"^front/cli/flags\.py: --(weight|stats|methods) \{\}: |^front/cli/flags\.py: --method \{\} drops",
        r"^base/text\.py: keep such",
        r"^plan/planning/notes\.py: (\{\} complex|average)",
    ],
    "the intact file is what is merged wherever nothing else is said": [
        r"[Ff]etch (it|them|the files?|its files|the checkpoint) again",
        r": is it the right file\?$",
    ],
    "needs the network, or a server that lies": [
        r"^files/stores/(hub|servers|remote\w*|link|address|store)\.py: ",
        r"^files/quantised/packed\.py: download it|^front/publish\.py: ",
    ],
    "needs a GPU": [r"^run/engine/devices\.py: "],
    "needs several machines or processes; tests/engine and tests/remote have what they do": [
        r"^run/engine/(cluster/|ranks/|serving)",
        r"^run/engine/processes\.py: (a worker process could not start|two worker processes ended)",
        r"^front/rank_job\.py: |^front/job\.py: ranks share|^files/checkpoints/writer\.py: there is no",
        r"^files/checkpoints/staging\.py: (another process|the file system)",
        r"^front/cli/merging\.py: ranks share",
    ],
    "needs a second process at work, a file that was tampered with, or a strange folder: to name another": [
        r"^run/search/job\.py: .*(SQLite takes|another process searches|not of covmerge: name another)",
    ],
    "needs a machine with too little memory or disk, or a folder that others own": [
        r"^run/engine/budget\.py: ",
        r"^files/stores/(disk|lock|destination|paths)\.py: ",
        r"^plan/statistics/collect\.py: (pass (fewer|--batch-size)|collect on a larger)",
        r"^front/cli/outcome\.py: (no room|the memory)|^front/cli/options\.py: the cache folder",
        r"^front/cli/merging\.py: the peak memory|^files/checkpoints/trainer\.py: \{\} cannot be listed",
        r"^files/adapters/patterns\.py: .*(takes more than|cannot be started)",
    ],
    "needs something that changes a file meanwhile": [
        r"let whatever writes it finish, and start again|something else changed it",
    ],
    "needs a package to be missing, or broken": [
        r"pip install '?covmerge\[|takes the package|^base/table\.py: |^front/reporting/style\.py: ",
    ],
    "to the author of a method, a step or a program, who sees at once whether it helped": [
        r"^files/\w+/(base|layout|writer|memory|json_file|torch_file|checkpoint)\.py: .*"
        r"(rows inside|rename (it|the tensor)|hold: convert|contiguous|plan it|convert it$)",
        r"^files/(checkpoints|adapters)/.*(open (them|the checkpoint) again|with its base|such as 5GB)",
        r"^files/checkpoints/base\.py: .*be stored: convert",
        r"^files/tensors/views\.py: ",
        r"^run/engine/worker\.py: .*Please report",
        r"^maths/linalg/cholesky\.py: ",
    ],
    "needs a program that is no package: llama.cpp, mergekit's command, a browser": [
        r"^plan/.*/(gguf|quantise)\.py: .*(llama\.cpp|convert_hf_to_gguf|convert the model|Name a type)",
        r"^front/cli/commands\.py: (--|one device)|^front/viewer/|^files/quantised/gguf\.py: ",
    ],
    "the intact adapter over its own base: tests/adapters/test_types.py": [
        r"^files/adapters/(types/\w+|folds|config)\.py: ",
    ],
    "a part of an interrupted merge that no file shows, or Ctrl-C: tests/e2e/test_resume.py": [
        r"^files/checkpoints/writer\.py: \{\} ends at byte|run again with --resume",
    ],
    "a question, or something to look at or to decide, which nobody but the reader can": [
        r"^run/export/(parents|companions|adapter)\.py: ",
        r"^run/inspection/|^run/judgement/judge\.py: "
        r"(: a layer of its own|: \{\}\. Swapped|has other rows|did not change"
        r"|(equals|differs from) the base)",
        r"^front/reporting/",
        r"^run/experts\.py: ",
        r"^run/verification/(verify\.py: (were|: store)|files\.py: )",
        r"^plan/planning/ties\.py: .*merge experts that were trained without",
        r"^plan/planning/build\.py: .*were they collected|^plan/planning/data\.py: .*were they collected",
        r"^plan/planning/quantise\.py: .*no tensor is the weight",
    ],
}

# Words of single messages.
LISTED = {
    "happens with no model that transformers has: a layer without weight, without blocks or words": [
        "write ({}): pass a file of examples",
    ],
    "what a file lacks is collected: tests/statistics/test_advice.py, another kind": [
        "collect it again with `covmerge collect`",
        "them with `covmerge collect --kind {}`",
    ],
    "a check of a part whose whole has a test: its command says the same before": [
        "began: collect with the base named",
    ],
    "written over before it is read: transformers makes a tokenizer.json that it cannot read an error": [
        "library tokenizers: save the model anew",
    ],
}


def test_every_advice_is_followed_or_has_a_reason():
    patterns = [pattern for own in REASONS.values() for pattern in own]
    known = [*followed(), *(words for own in LISTED.values() for words in own)]
    left = [
        f"{file}: {text}"
        for text, file in advising().items()
        if not any(words in text for words in known)
        and not any(re.search(pattern, f"{file}: {text}") for pattern in patterns)
    ]
    assert not left, "\n".join(left)


def test_what_tests_follow_is_in_the_source():
    assert not [words for words in followed() if not any(words in text for text in messages())]


def test_no_reason_is_left_over():
    lines = [f"{file}: {text}" for text, file in advising().items()]
    patterns = [pattern for own in REASONS.values() for pattern in own]
    assert not [p for p in patterns if not any(re.search(p, line) for line in lines)]
    for words in (words for own in LISTED.values() for words in own):
        assert any(words in text for text in advising()), words
        assert not any(other in line for line in lines if words in line for other in followed())
