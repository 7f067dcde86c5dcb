"""docs/conformance.md names every rule, every intervention and every key of the vectors' formats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conformance_scenarios import MESSAGES, PLAIN, VALUED, load
from conformance_vectors import EXCHANGE_KEYS, KEYS
from mutant_worker import BUGS

HERE = Path(__file__).parent
PAGE = (HERE.parent.parent / "docs" / "conformance.md").read_text()
RULES = {
    rule
    for name in ("conformance_rules.py", "conformance_run.py")
    for rule in re.findall(r'(?:self\._broke|observer\.add|self\.add)\(\s*"(\w+)"', (HERE / name).read_text())
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rule_is_on_the_page(rule: str) -> None:
    assert f"`{rule}`" in PAGE


@pytest.mark.parametrize("word", sorted(PLAIN | VALUED | KEYS | EXCHANGE_KEYS | set(MESSAGES)))
def test_a_word_of_the_formats_is_on_the_page(word: str) -> None:
    assert re.search(rf"[`\"]{word}[`\"]", PAGE)


def test_every_intervention_is_used_and_every_scenario_says_why() -> None:
    scenarios = load()
    assert {action for scenario in scenarios for step in scenario.script for action in step.do} == PLAIN | VALUED
    assert all(scenario.why.endswith(".") for scenario in scenarios)


def test_the_number_of_bugs_is_the_pages() -> None:
    assert f"{len(BUGS)} ways to do it wrong" in PAGE
