"""Control texts: what is built from a post, and that the texts are as bad as they should be."""

import pytest

from eval.control_texts import (
    CONTROLS,
    control_rows,
    control_texts,
    negated,
    swapped,
)
from stages.config.sections import format_post
from stages.data.builtin import UNWANTED_COST, facts_of, make_post, read_summary, score_summary
from tests.lib.control_posts import LONG_AND_ON_TOPIC, NEGATIVE_CONTROLS, QUERY, post

STORY = (
    "My wife was angry with me on Monday. We have 2 dogs and a cat of 12. I like long walks in the"
    " park near our house. Is she right?"
)
ABOUT = "My wife (23F) is angry on Monday, 2 weeks after Anna left. My wife's dogs too."


def texts_of_story(reference):
    query = QUERY.replace("First. Then\nmore.", STORY)
    return control_texts(post("a", reference, query), [])


def test_each_control_is_what_its_name_says():
    reference = "some words of a reference"
    same_reference = post("b", "some  words of a reference")
    other = post("c", "another")

    texts = control_texts(post("a", reference), [same_reference, other])

    assert list(texts) == list(CONTROLS) == ["reference", *NEGATIVE_CONTROLS]
    padded = texts.pop("padded")
    assert padded.startswith("some words of a reference. ")
    assert len(padded.split()) > 15
    assert texts == {
        "reference": "some words of a reference",
        "truncated": "some words",
        "first_sentence": "First.",
        "title": "A title",
        "other_post": "another",
        "repeated": "some words of a reference. some words of a reference",
        "contradicted": "",  # no sentence of the post is about the matter
        "swapped": "",  # no person, day or number
        "wrong_emphasis": "",  # no sentence of four words
    }


def test_a_post_without_such_a_text_has_no_control_of_it():
    rows = control_rows([post("a", "one", query="")])
    assert {name for name in rows if rows[name]} == {"reference", "repeated", "padded"}


# -- contradictions --------------------------------------------------------------------------------


def test_a_contradiction_is_a_sentence_of_the_post_with_not_at_its_verb():
    contradicted = texts_of_story(ABOUT)["contradicted"]
    assert contradicted == f"{ABOUT} My wife was not angry with me on Monday."


def test_a_contradiction_without_such_a_verb_has_another_fact():
    query = QUERY.replace("First. Then\nmore.", "The angry wife left on Monday.")
    contradicted = control_texts(post("a", "An angry one", query), [])["contradicted"]
    assert contradicted == "An angry one. The angry daughter left on Tuesday."


def test_not_follows_the_main_verb():
    assert negated("I'm 23 and tired.") == "I'm not 23 and tired."


@pytest.mark.parametrize(
    "sentence",
    ["I was not there.", "I'm just tired.", "Was she right?", "It is so.", "We met."],
)
def test_a_sentence_without_a_plain_opposite_is_not_negated(sentence):
    assert negated(sentence) == ""


# -- swapped facts ---------------------------------------------------------------------------------


def test_swapped_facts_are_ones_that_the_post_does_not_mention():
    """Wife becomes daughter, because a sister is mentioned, and Monday becomes Wednesday, because a
    Tuesday is. 23 becomes 34, and 2 becomes 6, because 5 is mentioned.
    """
    mentioned = f"{STORY} {ABOUT} my sister came on tuesday with 5 men"
    text = swapped("My wife (23F) is angry on Monday, 2 weeks. My wife's two dogs.", mentioned)
    assert text == "My daughter (34F) is angry on Wednesday, 6 weeks. My daughter's six dogs."


def test_names_are_swapped_and_ordinals_and_may_are_not():
    text = swapped("Anna and John came in May, the 1st.", mentioned="Emily")
    assert text == "Jessica and Mike came in May, the 1st."


def test_a_text_without_facts_stays_the_same():
    assert swapped("nobody did it", mentioned=STORY) == "nobody did it"


def test_a_number_with_more_digits_than_python_reads_stays_the_same():
    long = "9" * 5000
    assert swapped(f"{long} and 2 dogs", f"5 men, {long}") == f"{long} and 6 dogs"


def test_a_number_with_commas_keeps_them():
    assert swapped("It cost 1,000 dollars", mentioned="") == "It cost 1,500 dollars"


# -- wrong emphasis --------------------------------------------------------------------------------


def test_a_wrong_emphasis_is_long_and_true_and_misses_the_reference():
    text = texts_of_story("My wife is angry on Monday")["wrong_emphasis"]
    assert text == "I like long walks in the park near our house."


def test_a_post_that_says_nothing_else_has_no_wrong_emphasis():
    assert texts_of_story(STORY)["wrong_emphasis"] == ""


# -- the built-in world ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world():
    """200 posts of the built-in world, each with its control texts."""
    posts = []
    for number in range(200):
        row = make_post(f"toy3-validation-{number}")
        posts.append(post(row["id"], row["summary"], format_post(row)))
    posts_with_controls = []
    for number, row in enumerate(posts):
        other_posts = posts[number + 1 :] + posts[:number]
        posts_with_controls.append((row, control_texts(row, other_posts)))
    return posts_with_controls


def test_in_the_built_in_world_no_long_control_beats_a_right_reference(world):
    """The facts are the generator's, so the truth does not come from the module under test.

    A right reference says nothing wrong. With the event (3 facts) it says at least as much as two
    wanted facts and two others; otherwise even a bad text can say more.
    """
    right_references = 0
    for row, texts in world:
        facts = facts_of(row["id"])
        _, wrong = read_summary(row["reference"], facts)
        worth = score_summary(row["reference"], facts)
        if not wrong and worth >= 3 + 2 - 2 * UNWANTED_COST:
            right_references += 1
            for name in LONG_AND_ON_TOPIC:
                assert score_summary(texts[name], facts) < worth, (row["id"], name)
    assert right_references > 0.3 * len(world)


def test_in_the_built_in_world_a_swapped_reference_names_another_person(world):
    for row, texts in world:
        right, wrong = read_summary(texts["swapped"], facts_of(row["id"]))
        assert "who" not in right
        assert "who" in {slot for slot, _ in wrong}
