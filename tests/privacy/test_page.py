"""docs/privacy.md: its plan is one, and every test that it names is there."""

import re
from pathlib import Path

from baffle.plan import load

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "privacy.md").read_text()


def test_the_plan_of_the_page_is_private(tmp_path: Path) -> None:
    [text] = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "my.toml").write_text(text)
    plan = load(str(tmp_path / "my.toml"))
    assert plan.privacy.on
    assert (plan.privacy.epsilon, plan.secure.floor) == (8, 90)


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 8
    assert [name for name in sorted(named) if f"def {name}(" not in written] == []
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/.]+)`", PAGE))
