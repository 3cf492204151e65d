"""The list of mutations matches the code. `make mutants` runs the mutations, which takes minutes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTATIONS
from tests.mutants.mutation import Mutation
from tests.mutants.promises import Promise

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_every_mutation_applies_to_the_current_code(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    changed = mutation.apply(text)
    assert changed != text
    compile(changed, mutation.file, "exec")


@pytest.mark.parametrize("mutation", [each for each in MUTATIONS if "::" in each.test], ids=lambda each: each.name)
def test_the_test_of_every_mutation_exists(mutation: Mutation) -> None:
    file, _, name = mutation.test.partition("::")
    name = name.partition("[")[0]
    assert re.search(rf"^(def {name}\(|{name} = )", (ROOT / file).read_text(), re.MULTILINE), mutation.test


def test_every_promise_is_broken_by_a_mutation() -> None:
    assert set(Promise) == {mutation.promise for mutation in MUTATIONS}


def test_every_numbered_promise_is_listed_in_its_order() -> None:
    numbered = re.findall(r"^\d\. \*\*([^*]+)\*\*", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    beginnings = [" ".join(text.split()) for text in numbered]
    assert len(beginnings) == 9
    for beginning, promise in zip(beginnings, Promise, strict=False):
        assert beginning.startswith(promise) or promise.startswith(beginning)


@pytest.mark.parametrize("promise", Promise)
def test_every_promise_is_made_in_the_documentation(promise: Promise) -> None:
    pages = [ROOT / "docs" / "architecture.md", ROOT / "README.md"]
    text = " ".join(" ".join(page.read_text() for page in pages).replace("*", "").split())
    assert promise in text


def test_names_of_mutations_are_unique() -> None:
    assert [name for name, count in Counter(each.name for each in MUTATIONS).items() if count > 1] == []


@pytest.mark.parametrize("text", ["nothing of it", "old old"])
def test_a_mutation_whose_text_is_missing_or_ambiguous_is_refused(text: str) -> None:
    mutation = Mutation("a defect", Promise.WIRE, "module.py", "old", "new", "tests/unit/test_x.py")
    with pytest.raises(ValueError, match=r"module\.py: 'old' occurs"):
        mutation.apply(text)
