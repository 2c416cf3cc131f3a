"""When a gain in reward is there, and what has been spent by then, by hand."""

from types import SimpleNamespace

from reports.ablations_page import delays, pace_table, pace_told
from reports.parts.reached import update_of_gain


def curve(rewards):
    """Rows of updates."""
    return [{"objective/scores": reward} for reward in rewards]


def test_the_update_of_a_runs_own_gain():
    # From 2 to 12, the mean of the last four of 20: the target is 11. Updates 8 to 12 have a mean
    # of 10, and 9 to 13 one of 12.
    assert update_of_gain(curve([2.0] * 8 + [12.0] * 12)) == 13
    assert update_of_gain(curve([2.0] * 4 + [10.0] * 6 + [12.0] * 10)) == 13  # (2 * 10 + 36) / 5
    assert update_of_gain(curve([2.0] + [1.0] * 19)) is None


def seeds(name, *rising, critic_updates=0):
    """Runs of 30 updates whose reward rises at once, in the update that is given for each seed."""
    settings = {"ppo": {"critic_updates": critic_updates}}
    curves = [curve([0.0] * (at - 1) + [1.0] * (31 - at)) for at in rising]
    runs = [
        SimpleNamespace(seed=seed, settings=settings, rows=lambda _, rows=rows: rows)
        for seed, rows in enumerate(curves)
    ]
    return SimpleNamespace(name=name, runs=runs, pair=SimpleNamespace(runs=runs))


def test_the_page_tells_with_which_switches_ppo_learns_slower_and_faster():
    default = seeds("tiny", 10, 11, 13)
    slow, fast, unclear = seeds("a", 15, 17, 20), seeds("b", 5, 7, 10), seeds("c", 9, 11, 14)
    others = [slow, fast, unclear, seeds("d", 20, 22)]  # two seeds say too little
    late = delays(default, others)
    # Student's t: 6 and -4 over 1 / sqrt(3), p = 0.0091 and 0.0202; Holm makes 0.027 and 0.040.
    assert pace_told(late) == "PPO learns slower with a; faster with b (after Holm's correction)."
    assert pace_told(delays(default, [unclear])) == ""
    many = dict.fromkeys("stuv", late["a"])
    assert pace_told(many) == "PPO learns slower with 4 switches (after Holm's correction)."
    rows = pace_table(default, others, late).texts
    # All five updates have to have risen, so the ends are 14, 15 and 17; with a 19, 21 and 24.
    assert rows[0] == ["default", "3 of 3", "15.3 [11.5, 19.1]", "–", "–"]
    # Later by 5, 6 and 7: 6 +- 4.303 / sqrt(3).
    assert rows[1] == ["a", "3 of 3", "21.3 [15.1, 27.6]", "+6.0", "[+3.5, +8.5]"]
    assert rows[3][3:] == ["+0.0", "[-2.5, +2.5]"]


def test_the_table_of_paces_says_of_how_many_seeds_it_is():
    default, turned = seeds("tiny", 10, 11, 13), seeds("a", 15, 17, 20)
    fallen = curve([1.0] * 20 + [0.0] * 10)
    default.runs[0].rows = lambda _: fallen
    rows = pace_table(default, [turned], delays(default, [turned])).texts
    # The ends are 15 and 17; those of both seeds are 21 and 24 with the switch.
    assert rows[0] == ["default", "2 of 3", "16.0 [3.3, 28.7]", "–", "–"]
    assert rows[1][:2] == ["a", "3 of 3"]
    assert rows[1][3] == "+6.5"


def test_a_pace_that_is_clear_by_itself_alone_is_not_told_of_many():
    """By itself p = 0.0202; with two switches that are not clear 3 * 0.0202 = 0.061."""
    late = {"b": [-5.0, -4.0, -3.0]}
    assert pace_told(late) == "PPO learns faster with b."
    assert pace_told(late | {"c": [-1.0, 0.0, 1.0], "d": [-1.0, 0.0, 2.0]}) == ""


def test_updates_of_the_critic_alone_are_no_slowness_of_the_policy():
    """All need 5 updates of the policy; the default has 8 of the critic before them."""
    default = seeds("tiny", 13, 14, 16, critic_updates=8)
    without = seeds("no-critic-updates", 5, 6, 8)
    assert delays(default, [without]) == {"no-critic-updates": [0.0, 0.0, 0.0]}
    rows = pace_table(default, [without], delays(default, [without])).texts
    assert [row[2][:4] for row in rows] == ["10.3", "10.3"]  # (9 + 10 + 12) / 3
