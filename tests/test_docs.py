"""What the documents point at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def test_every_failure_is_proved_by_a_test_that_exists():
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/failures.md").read_text(encoding="utf-8")))
    assert named
    assert sorted(name for name in named if f"def {name}(" not in code) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []
