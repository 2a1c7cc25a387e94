"""The examples say what the code does: config files load, and their shape is the demo's."""

from pathlib import Path

import pytest
import yaml

from litellm_prefix_router.settings import load_settings_file

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_litellm_example_is_the_demo_s_configuration():
    from litellm_prefix_router.demo.stack import proxy_config

    written = yaml.safe_load((EXAMPLES / "litellm/config.yaml").read_text())
    replicas = [f"http://127.0.0.1:800{i}" for i in range(1, 5)]
    assert written == proxy_config(replicas, {"redis_url": "redis://127.0.0.1:6379/0"})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/config.yaml")), ids=lambda p: p.parent.name)
def test_settings_of_every_example_are_valid(path):
    load_settings_file(path)
