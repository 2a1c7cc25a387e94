"""The reference of settings is complete and current, and mistakes are answered with one line."""

from pathlib import Path

import pytest

from litellm_prefix_router.cli.settings import _all_rows, settings_markdown
from litellm_prefix_router.settings import SettingsError, load_settings, load_settings_file

ROOT = Path(__file__).parents[2]


def test_the_reference_in_docs_is_what_the_command_prints():
    assert (ROOT / "docs/settings.md").read_text(encoding="utf-8") == settings_markdown()


def test_every_setting_of_the_router_says_what_it_is():
    assert [name for name, _, text in _all_rows() if "." not in name and not text] == []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"deadline": 5}, "settings: unknown setting 'deadline'; did you mean 'deadline_ms'?"),
        ({"deadline_ms": 0}, "settings: deadline_ms: Input should be greater than 0 (got 0)"),
        ({"envoy": {"salt_secret": 123456}}, "settings: envoy.salt_secret: Input should be a valid string"),
        ({"models": {"m": {"tokeniser": "x"}}}, "unknown setting 'models.m.tokeniser'; did you mean 'tokenizer'?"),
        ([1], "expected a mapping"),
    ],
)
def test_mistakes_are_one_line(values, line):
    with pytest.raises(SettingsError) as caught:
        load_settings(values)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_may_be_the_settings_or_a_litellm_config(tmp_path):
    plain = tmp_path / "plain.yaml"
    plain.write_text("deadline_ms: 7\n")
    assert load_settings_file(plain).deadline_ms == 7
    config = tmp_path / "config.yaml"
    config.write_text("model_list: []\ncallback_settings:\n  prefix_router:\n    deadline_ms: 8\n")
    assert load_settings_file(config).deadline_ms == 8
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [")
    for path, words in ((bad, "not valid YAML"), (tmp_path / "none.yaml", "cannot be read")):
        with pytest.raises(SettingsError, match=words):
            load_settings_file(path)


def test_the_environment_counts_below_what_is_given(monkeypatch):
    monkeypatch.setenv("PREFIX_ROUTER_DEADLINE_MS", "9")
    assert load_settings().deadline_ms == 9
    assert load_settings({"deadline_ms": 10}).deadline_ms == 10


def test_the_package_is_light(monkeypatch):
    import subprocess
    import sys

    code = (
        "import sys, litellm_prefix_router as p; p.PrefixRouter; p.Settings;"
        "print(sorted(m for m in ('litellm', 'grpc', 'starlette', 'torch') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
