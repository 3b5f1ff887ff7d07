"""State moves between any two plans: every element arrives, from a rank that has it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp.errors import PlanError
from ntp.parameters import parameter_specs
from ntp.plan import make_plan
from ntp.reshard import kept_slices
from ntp.state_moves import keepers, state_moves
from tests.shapes import LLAMA, make_config

SHAPE = {**LLAMA, "hidden_size": 512, "num_hidden_layers": 1, "qkv_bias": True}


def configuration(dp, tp, copies, standbys=0):
    return make_config(
        SHAPE, parallel={"dp": dp, "tp": tp, "standbys": standbys}, optimizer={"copies": copies}
    )


def state_of(plan, rank, specs):
    """What a rank keeps: (parameter, unit) -> its elements, nan where it keeps none."""
    kept = {}
    for spec in specs:
        for place, replica in enumerate(plan.replicas):
            for unit in keepers(plan, spec, replica).get(rank, ()):
                for start, stop in kept_slices(plan, spec, place):
                    if start < stop:
                        values = kept.setdefault(
                            (spec.name, unit), torch.full((spec.unit_elements,), torch.nan)
                        )
                        values[start:stop] = torch.arange(start, stop) + 7.0 * unit
    return kept


def move(old, new, alive, specs):
    """Carry the state along the moves and check that both sides agree on every piece."""
    plans = {rank: state_moves(old, new, alive, rank, specs) for rank in {*alive, *new.world}}
    assert len({(plan.missing, plan.travelling) for plan in plans.values()}) == 1
    from_others = [part for rank, plan in plans.items() for part in plan.receives if part.peer != rank]
    assert plans[min(plans)].travelling == sum(part.elements for part in from_others)
    missing = next(iter(plans.values())).missing
    before = {rank: state_of(old, rank, specs) for rank in alive}
    after = {rank: {} for rank in new.workers}
    for rank, mine in plans.items():
        for peer in plans:
            sent = [(p.spec.name, p.units, p.start, p.stop) for p in plans[peer].sends if p.peer == rank]
            got = [(p.spec.name, p.units, p.start, p.stop) for p in mine.receives if p.peer == peer]
            assert sent == got
        for part in mine.receives:
            for unit in part.units:
                key = part.spec.name, unit
                into = after[rank].setdefault(key, torch.full((part.spec.unit_elements,), torch.nan))
                piece = before[part.peer][key][part.start : part.stop]
                assert not piece.isnan().any(), "fetched from a rank that does not keep it"
                assert into[part.start : part.stop].isnan().all(), "delivered twice"
                into[part.start : part.stop] = piece
    return after, missing


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_state_survives_any_change_of_plan_that_leaves_a_copy(data):
    dp, tp = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    config = configuration(dp, tp, data.draw(st.integers(1, 2)), standbys=data.draw(st.integers(0, 1)))
    specs = parameter_specs(config.model)
    ranks = st.sets(st.integers(0, dp * tp - 1), max_size=2)
    try:
        old, new = make_plan(config, data.draw(ranks)), make_plan(config, data.draw(ranks), generation=1)
    except PlanError:
        return
    alive = set(old.workers) - set(new.failed)
    after, missing = move(old, new, alive, specs)
    if missing:
        assert old.copies == 1 or len(set(old.workers) & set(new.failed)) > 1
        return
    for rank in new.workers:
        expected = state_of(new, rank, specs)
        assert after[rank].keys() == expected.keys()
        for key, values in expected.items():
            assert torch.equal(after[rank][key].nan_to_num(-1), values.nan_to_num(-1)), key


def test_one_loss_needs_no_disk_with_two_copies():
    config = configuration(3, 4, copies=2)
    specs, old = parameter_specs(config.model), make_plan(config)
    for lost in range(12):
        assert move(old, make_plan(config, {lost}), set(range(12)) - {lost}, specs)[1] == ()


def test_a_lost_only_copy_is_named():
    config = configuration(2, 2, copies=1)
    specs = parameter_specs(config.model)
    _, missing = move(make_plan(config), make_plan(config, {3}), {0, 1, 2}, specs)
    assert "layers.0.down" in missing
