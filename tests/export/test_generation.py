"""Generation settings that the experts do not share with the base are told."""

import json

from covmerge.run.export.companions import notes_on_generation


def folder(path, **settings):
    path.mkdir()
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


def test_what_differs_is_named(tmp_path):
    base = folder(tmp_path / "base", temperature=0.7, top_p=0.9, transformers_version="4.0")
    same = folder(tmp_path / "same", temperature=0.7, top_p=0.9, transformers_version="5.0")
    other = folder(tmp_path / "other", temperature=0.2, eos_token_id=[1, 2])
    experts = {"same": same, "other": other, "in memory": None, "without": tmp_path}
    (note,) = notes_on_generation(base, experts)
    assert "expert 'other' differs in eos_token_id, temperature, top_p:" in note


def test_a_file_that_cannot_be_read_is_told_and_ends_nothing(tmp_path):
    base = folder(tmp_path / "base", temperature=0.7)
    broken = folder(tmp_path / "broken")
    (broken / "generation_config.json").write_text("{")
    (note,) = notes_on_generation(base, {"broken": broken})
    assert note.startswith("generation settings were not compared")
    assert list(notes_on_generation(None, {"broken": broken})) == []
