"""Skeletons: reading what models write, waves of points, the words of prompts, the merged answer."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.skeleton.plan import (
    Skeleton,
    SkeletonPoint,
    StreamedPointText,
    parse_outline,
    parse_skeleton,
    point_text,
)
from training.plans import draw_skeleton, draw_task

PLAN = """[PLAN]
1.<154><None>[-]Introduce the town
2.<90><Search>[1]Tell its history
3.<40><None>[1,2]Sum up
[END]"""


def points(text, budget=1000):
    return parse_skeleton(text, budget).points


def only_point(line):
    (point,) = points(f"[PLAN]\n{line}\n[END]")
    return point


def dependencies(*lines):
    plan = "\n".join(f"{number}.<40><None>[{ids}]Title" for number, ids in lines)
    return {point.id: point.dependencies for point in points(f"[PLAN]\n{plan}\n[END]")}


def ids(waves):
    return [[point.id for point in wave] for wave in waves]


def test_a_plan_is_read_with_all_its_parts():
    assert points(PLAN) == (
        SkeletonPoint(1, "Introduce the town", 154, None, (), 154),
        SkeletonPoint(2, "Tell its history", 90, "Search", (1,), 90),
        SkeletonPoint(3, "Sum up", 40, None, (1, 2), 40),
    )


def test_a_direct_answer_is_the_text_between_its_tags():
    skeleton = parse_skeleton("[DIRECT]\nThe mayor is Anna.\n[END] and more", 100)
    assert skeleton.is_direct and skeleton.answer == "The mayor is Anna."
    assert skeleton.points == () and skeleton.waves() == () and not skeleton.is_parallel


@pytest.mark.parametrize("text", ["Plain text", "1. One\n2. Two", "  Plain [END]\n", ""])
def test_a_text_without_tags_is_an_answer_as_a_whole(text):
    assert parse_skeleton(text, 100) == Skeleton(answer=text.strip())


def test_the_first_tag_counts():
    assert parse_skeleton("[DIRECT]Say [PLAN]\n1.<20><None>[-]No\n[END]", 100).answer is not None
    assert len(points("[PLAN]\n1.<20><None>[-]Say [DIRECT]\n[END]")) == 1
    assert len(points("Sure! Here it is:\n" + PLAN)) == 3


@pytest.mark.parametrize("ending", ["", "\n", "\n[END]", "\n[END]\n4.<20><None>[-]Too late"])
def test_the_body_goes_to_the_end_tag_or_the_end_of_the_text(ending):
    assert len(points(PLAN.removesuffix("\n[END]") + ending)) == 3


@pytest.mark.parametrize(
    "thought",
    ["<think>I could [PLAN]\n1.<9><None>[-]Wrong\n</think>", "\n <think></think>\n\n", "So [DIRECT]? No.</think>\n"],
)
def test_a_leading_thought_is_cut_even_where_the_prompt_opened_it(thought):
    assert points(thought + PLAN) == points(PLAN)


def test_the_tags_of_a_thought_that_never_ends_do_not_count():
    text = "<think>I could write [PLAN]\n1.<20><None>[-]One"
    assert parse_skeleton(text, 100) == Skeleton(answer=text)


def test_a_closing_tag_inside_an_answer_or_a_title_is_text():
    assert parse_skeleton("[DIRECT]\nClose it with </think> then.[END]", 100).answer == "Close it with </think> then."
    assert only_point("1.<20><None>[-]Explain </think>").title == "Explain </think>"


@pytest.mark.parametrize(
    ("line", "title", "length"),
    [
        ("1.<40><None>[-]Title", "Title", 40),
        ("1:<40><None>[-]Title", "Title", 40),
        ("1、<40><None>[-]标题", "标题", 40),
        ("1．（40）【-】标题", "标题", 40),
        ("１.<４０>Title", "Title", 40),
        ("  1 . < 40 > < None > [ - ] Title \r", "Title", 40),
        ("1.40<None>[-]Title", "Title", 40),
        ("1. 40 [-] Title", "Title", 40),
        ("1.40 Title", "Title", 40),
        ("1.<40>Title", "Title", 40),
        ("1.<None>[-]Title", "Title", None),
        ("1.[-]Title", "Title", None),
        ("1.[]Title", "Title", None),
        ("1. Title", "Title", None),
        ("1. 3 ways to cook", "3 ways to cook", None),
        ("1. [Optional] extras", "[Optional] extras", None),
        ("1.<40><None>[-]Title: <b> [x] 【y】", "Title: <b> [x] 【y】", 40),
        ("1.<99999999999999999999>Title", "<99999999999999999999>Title", None),
    ],
)
def test_a_line_may_lack_parts_or_spell_them_differently(line, title, length):
    point = only_point(line)
    assert (point.title, point.stated_length) == (title, length)
    assert point.tool is None and point.dependencies == ()


@pytest.mark.parametrize("written", ["[1,2]", "[1, 2]", "[1，2]", "【1、2】", "[ 1;2 ]", "[1,2,1]"])
def test_dependencies_may_be_separated_differently(written):
    lines = f"1.<40>One\n2.<40>Two\n3.<40><None>{written}Three"
    assert points(f"[PLAN]{lines}[END]")[2].dependencies == (1, 2)


@pytest.mark.parametrize(
    ("stated", "length"), [(0, 16), (15, 16), (16, 16), (17, 17), (200, 200), (201, 200), (10**8, 200)]
)
def test_lengths_are_kept_between_sixteen_and_the_budget(stated, length):
    (point,) = points(f"[PLAN]\n1.<{stated}><None>[-]Title\n[END]", budget=200)
    assert (point.length, point.stated_length) == (length, stated)


def test_the_budget_is_the_limit_even_below_sixteen_and_is_positive():
    assert points("[PLAN]\n1.<40>Title", budget=5)[0].length == 5
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        parse_skeleton(PLAN, 0)


def test_the_first_point_of_an_id_wins_and_points_without_a_title_are_dropped():
    read = points("[PLAN]\n1.<20><None>[-] \n1.<20><None>[-]First\n1.<20><None>[-]Second\n2.<20><None>[-]\n[END]")
    assert [(point.id, point.title) for point in read] == [(1, "First")]


def test_lines_that_are_no_points_are_passed_over():
    assert [point.id for point in points("[PLAN]\nHere:\n\n1. One\n- two\n3. Three\n[END]")] == [1, 3]


def test_a_plan_without_points_is_a_direct_answer():
    assert parse_skeleton("[PLAN]\nI have no plan.\n[END]", 100) == Skeleton(answer="I have no plan.")


def test_one_point_or_a_chain_of_points_is_not_parallel():
    assert not parse_skeleton("[PLAN]\n1.<20><None>[-]One\n[END]", 100).is_parallel
    assert not parse_skeleton(PLAN, 1000).is_parallel
    assert parse_skeleton(PLAN.replace("[1,2]", "[1]"), 1000).is_parallel


def test_dependencies_on_unknown_points_and_on_itself_are_removed():
    assert dependencies((1, "9"), (2, "1,2,3")) == {1: (), 2: (1,)}


def test_circles_are_broken_at_their_smallest_id():
    assert dependencies((1, "2"), (2, "1")) == {1: (), 2: (1,)}
    assert dependencies((3, "2"), (2, "1"), (1, "3")) == {3: (2,), 2: (1,), 1: ()}


def test_what_waits_for_a_circle_without_being_in_it_goes_on_waiting():
    assert dependencies((1, "3"), (2, "3"), (3, "2")) == {1: (3,), 2: (), 3: (2,)}


def test_waves_are_the_topological_levels():
    lines = [(1, "-"), (2, "-"), (3, "1"), (4, "2,3"), (5, "2")]
    plan = "\n".join(f"{number}.<40><None>[{before}]Title" for number, before in lines)
    assert ids(parse_skeleton(f"[PLAN]\n{plan}\n[END]", 100).waves()) == [[1, 2], [3, 5], [4]]


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 10), max_size=4)), min_size=1, max_size=10))
def test_waves_have_every_point_once_and_after_all_that_it_depends_on(lines):
    plan = "\n".join(f"{number}.<40><None>[{','.join(map(str, before))}]Title" for number, before in lines)
    skeleton = parse_skeleton(f"[PLAN]\n{plan}\n[END]", 100)
    done: set[int] = set()
    for wave in skeleton.waves():
        assert all(done.issuperset(point.dependencies) for point in wave)
        done.update(point.id for point in wave)
    assert done == {number for number, _ in lines} and sum(map(len, skeleton.waves())) == len(done)


@given(st.text(alphabet="[PLAN]DIRECTE<think>/ 12345.:、．（）【】-,None\nTitel\r\u3000\u2028", max_size=80))
def test_any_text_is_read_without_an_error(text):
    for skeleton in (parse_skeleton(text, 100), parse_skeleton("[PLAN]" + text, 100), parse_outline(text)):
        assert skeleton.is_direct or all(point.title == point.title.strip() != "" for point in skeleton.points)


@pytest.mark.parametrize(
    ("given_points", "answer", "message"),
    [
        ((), None, "points or an answer"),
        ((SkeletonPoint(1, "One"),), "text", "points or an answer"),
        ((SkeletonPoint(1, "One"), SkeletonPoint(1, "Two")), None, "different ids"),
        ((SkeletonPoint(1, "One", dependencies=(2,)),), None, "never are written"),
        ((SkeletonPoint(1, "One", dependencies=(1,)),), None, "never are written"),
    ],
)
def test_a_skeleton_that_cannot_be_written_is_refused(given_points, answer, message):
    with pytest.raises(ValueError, match=message):
        Skeleton(given_points, answer)


def test_an_outline_is_a_plain_numbered_list():
    text = "<think>1. no</think>Points:\n1. Use 2.5 liters\n2.Stir\n 3. Serve \n2. Again\n4.\nVersion 5. is not one"
    assert [(point.id, point.title) for point in parse_outline(text).points] == [
        (1, "Use 2.5 liters"),
        (2, "Stir"),
        (3, "Serve"),
    ]
    assert parse_outline(text).is_parallel


def test_a_text_without_numbered_lines_is_no_outline():
    assert parse_outline(" No list. ") == Skeleton(answer="No list.")


@pytest.mark.parametrize("seed", range(40))
def test_the_embedded_model_is_asked_in_the_words_of_its_training(seed):
    rng = random.Random(seed)
    trained = draw_skeleton(rng, draw_task(rng, held_out=bool(seed % 2)))
    skeleton = parse_skeleton(trained.plan(), 1000)
    reader = f"\nReader: {trained.task.reader}" if trained.task.reader else ""
    assert skeleton.cleaned() == trained.outline()
    for index, point in enumerate(skeleton.points):
        assert skeleton.ask_point(point) == trained.ask_point(index)
        assert skeleton.point_prompt(trained.task.phrase + reader, point) == trained.expansion_prompt(index)


def test_the_prompts_of_points_differ_in_their_last_line_only():
    skeleton = parse_skeleton(PLAN, 1000)
    prompts = [skeleton.point_prompt("write about the town", point).rpartition("\n") for point in skeleton.points]
    assert len({prompt[0] for prompt in prompts}) == 1 and len({prompt[2] for prompt in prompts}) == 3


def test_a_point_without_a_length_is_asked_for_without_one():
    skeleton = parse_outline("1. Begin")
    assert skeleton.ask_point(skeleton.points[0]) == "Write point 1: Begin."


@pytest.mark.parametrize(
    "text", ["A text.", "[ANSWER]A text.[END]", "<think>Hm.</think>\n[ANSWER] A text.\n[END] more", "A text. [END]"]
)
def test_the_text_of_a_point_has_no_frame(text):
    assert point_text(text) == "A text."


@pytest.mark.parametrize(
    "text",
    [
        "[ANSWER] A text. [END] more", "  [ANSWER]A text. ", "A text.\n\n", "[ANSWER]", "[ANSWER", "[END]", " ", "",
        "A [text] of [E and [END", "A text. [ANSWER] more", "<think>so</think> [ANSWER]A text.", "<think>so [END]",
        "< b", "[PLAN] A text",
    ],
)  # fmt: skip
def test_a_streamed_point_is_the_whole_points_text_in_any_pieces(text):
    for places in itertools.combinations(range(1, len(text)), 2):
        streamed, pieces = StreamedPointText(), [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
        found = [streamed.add(piece, is_last=number == len(pieces)) for number, piece in enumerate(pieces, start=1)]
        assert "".join(found) == point_text(text)
    letters = StreamedPointText()
    found = [letters.add(letter, is_last=False) for letter in text]
    assert "".join(found) + letters.add("", is_last=True) == point_text(text)


def test_text_that_is_certain_is_not_held_back():
    streamed = StreamedPointText()
    assert streamed.add("[ANSWER]A te", is_last=False) == "A te"
    assert streamed.add("xt. ", is_last=False) == "xt."
    assert streamed.add("[", is_last=False) == ""
    assert streamed.add("b] c", is_last=False) == " [b] c"


def test_texts_are_merged_in_the_order_of_the_plan():
    skeleton = parse_skeleton("[PLAN]\n2.<20><None>[1]Then\n1.<20><None>[-]First\n[END]", 100)
    assert skeleton.merge({1: "[ANSWER]One.[END]", 2: "Two."}) == "2. Then: Two.\n1. First: One."


def test_points_without_a_text_are_named_when_texts_are_merged():
    with pytest.raises(ValueError, match=r"points \[1, 3\] have no text"):
        parse_skeleton(PLAN, 1000).merge({2: "Two."})


def test_a_direct_answer_is_its_own_merged_text():
    assert Skeleton(answer="Yes.").merge({}) == "Yes."
