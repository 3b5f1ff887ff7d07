"""The list of mutations fits the code and the design document; two of them are tried.

All of them: `python -m tests.mutations`.
"""

import ast
from pathlib import Path

import pytest

from tests.mutations import ROOT, load_mutations, mutated, table, try_mutation

MUTATIONS = {f"{mutation.rule}: {mutation.change}": mutation for mutation in load_mutations()}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_applies_and_its_test_exists(name: str):
    mutation = MUTATIONS[name]
    ast.parse(mutated(mutation))
    file, _, function = mutation.test.partition("::")
    assert f"def {function}(" in Path(ROOT / file).read_text(encoding="utf-8")


def test_the_design_document_has_the_table():
    assert table() in (ROOT / "ntp" / "DESIGN.md").read_text(encoding="utf-8"), "tests.mutations --table"


@pytest.mark.parametrize(
    "name", ["weight gradients: one GEMM over all local units", "optimizer: torch's fused AdamW"]
)
def test_a_broken_rule_is_caught(name: str):
    outcome = try_mutation(MUTATIONS[name])
    assert outcome.caught, outcome.why
