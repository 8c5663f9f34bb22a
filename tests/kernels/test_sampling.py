"""The contract of sampling, held by the plain version and by the compiled one; and the two against each other."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import native as compiled
from kernels.sampling import BAD_IDS, NOT_NUMBERS, NOTHING_LEFT, Choice, Request, native, reference, uniform

Floats = npt.NDArray[np.float32]
Sampler = Callable[..., list[Choice]]

VOCABULARIES = (1, 2, 15, 16, 17, 63, 255, 257, 5000)


def need_compiled() -> None:
    """Skip where the kernels cannot be compiled."""
    if not compiled.available():
        pytest.skip(f"no compiled kernels: {compiled.why_not()}")


@pytest.fixture(params=["reference", "native"])
def sample(request: pytest.FixtureRequest) -> Sampler:
    """One implementation."""
    if request.param == "reference":
        return reference.sample
    need_compiled()
    return native.sample


@pytest.fixture
def team() -> Iterator[int]:
    """Two threads."""
    need_compiled()
    library = compiled.library()
    library.hr_team_new.restype = native.ctypes.c_void_p
    library.hr_team_free.argtypes = [native.ctypes.c_void_p]
    library.hr_team_free.restype = None
    made = library.hr_team_new(2, 100)
    yield made
    library.hr_team_free(made)


def noise(vocab: int = 5000, seed: int = 1, rows: int = 1, scale: float = 3.0) -> Floats:
    """Normal logits `[rows, vocab]`."""
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def probabilities(logits: Floats, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Softmax of one row in float64."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


def draws(sample: Sampler, logits: Floats, request: Request, count: int, seed: int = 1) -> collections.Counter[int]:
    """Ids of `count` draws from one row, at the points of a seed's first outputs."""
    requests = [replace(request, point=uniform(seed, 0, i)) for i in range(count)]
    return collections.Counter(c.id for c in sample(logits[None], requests, [0] * count))


def one(sample: Sampler, logits: Floats, **fields: Any) -> Choice:
    """One draw from one row."""
    (choice,) = sample(logits[None], [Request(**fields)])
    return choice


def random_request(rng: np.random.Generator, vocab: int) -> Request:
    """Parameters of all sorts, the ends of their ranges included."""
    fields: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.0, 2.0])),
        "top_k": int(rng.choice([-1, -1, 1, 2, 40, 1000, vocab, vocab + 5])),
        "top_p": float(rng.choice([1.0, 1.0, 0.95, 0.5, 0.1, 1e-9])),
        "min_p": float(rng.choice([0.0, 0.0, 0.05, 1.0])),
        "point": float(rng.random()),
    }
    if rng.random() < 0.5:
        fields["presence_penalty"], fields["frequency_penalty"] = rng.uniform(-2, 2, 2).tolist()
        fields["repetition_penalty"] = float(rng.choice([1.0, 1.3, 0.7]))
        fields["prompt_ids"] = rng.integers(0, vocab, 50).tolist()
        fields["output_ids"] = rng.integers(0, min(30, vocab), 60).tolist()
    if rng.random() < 0.3:
        fields["logit_bias"] = {int(i): float(rng.uniform(-100, 100)) for i in rng.integers(0, vocab, 5)}
    if rng.random() < 0.2:
        fields["allowed_ids"] = rng.integers(0, vocab, 9).tolist()
    if rng.random() < 0.2:
        fields["forbidden_ids"] = rng.integers(0, vocab, 3).tolist()
    return Request(**fields)


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_greedy_takes_the_most_likely_and_the_lowest_of_equals(sample: Sampler, vocab: int) -> None:
    """Below a temperature of 1e-5, or with top-k 1; wherever the maximum lies."""
    for at in {0, vocab // 3, vocab - 1}:
        logits = np.full(vocab, -1.0, np.float32)
        logits[[at, vocab - 1]] = 5.0

        for fields in ({"temperature": 0.0}, {"temperature": 9e-6}, {"top_k": 1}):
            assert one(sample, logits, point=0.99, **fields).id == at


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_logprob_is_the_models_own(sample: Sampler, vocab: int) -> None:
    """Before temperature, filters, penalties, bias and masks."""
    logits = noise(vocab)[0]
    wanted = np.log(probabilities(logits))
    free = vocab // 2

    for request in (
        Request(temperature=0.0),
        Request(temperature=0.5, top_k=3, point=0.7),
        Request(temperature=0.0, logit_bias={free: 100.0}, presence_penalty=2.0, output_ids=[free]),
        Request(allowed_ids=[free]),
    ):
        (choice,) = sample(logits[None], [request])
        assert choice.error is None
        assert choice.logprob == pytest.approx(wanted[choice.id], abs=1e-6)
    assert one(sample, logits, allowed_ids=[free]).id == free


# --- draws ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_draws_follow_the_distribution(sample: Sampler) -> None:
    """8,000 draws from four tokens at temperature 2 lie within 5 standard deviations."""
    logits = np.array([0.0, 2.0, -1.0, 1.0], np.float32)

    counts = draws(sample, logits, Request(temperature=2.0), 8000, seed=11)

    for token, p in enumerate(probabilities(logits, 2.0)):
        assert abs(counts[token] - 8000 * p) < 5 * math.sqrt(8000 * p * (1 - p))


@pytest.mark.slow
def test_top_k_top_p_and_min_p_keep_what_they_say(sample: Sampler) -> None:
    """Each filter's support, from the sorted distribution written out."""
    logits = noise()[0]
    p = probabilities(logits)
    order = np.argsort(-logits, kind="stable").tolist()
    nucleus: list[int] = []
    for token in order:
        nucleus.append(token)
        if p[nucleus].sum() >= 0.7:
            break
    few = order[:40]
    half_of_few = few[: 1 + int((np.cumsum(p[few]) < 0.5 * p[few].sum()).sum())]

    assert set(draws(sample, logits, Request(top_k=3), 400)) == set(order[:3])
    seen = set(draws(sample, logits, Request(top_p=0.7), 1000))
    assert seen <= set(nucleus) and len(seen) > min(len(nucleus), 300) // 2
    assert set(draws(sample, logits, Request(top_k=40, top_p=0.5), 2000)) == set(half_of_few)
    assert set(draws(sample, logits, Request(min_p=0.1), 1000)) <= set((p >= 0.1 * p.max()).nonzero()[0].tolist())
    assert set(draws(sample, logits, Request(min_p=1.0), 20)) == {order[0]}
    assert set(draws(sample, logits, Request(top_p=1e-9), 20)) == {order[0]}
    assert set(draws(sample, logits, Request(top_k=1), 20)) == {order[0]}


@pytest.mark.slow
def test_of_equal_logits_the_lower_ids_are_kept(sample: Sampler) -> None:
    """Where all are equal: half of the mass is the lower half of the ids, ten are the first ten."""
    logits = np.zeros(4000, np.float32)

    drawn = draws(sample, logits, Request(top_p=0.5), 500, seed=3)

    assert max(drawn) < 2000 and len(drawn) > 300
    assert set(draws(sample, logits, Request(top_k=10), 400, seed=3)) == set(range(10))
    assert max(draws(sample, logits, Request(min_p=1.0), 500, seed=3)) > 3000


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_every_id_has_its_own_part_of_the_unit_interval(sample: Sampler, vocab: int) -> None:
    """In order of ids: a point just inside a part draws its id, the ends 0 and almost 1 included."""
    logits = noise(vocab, scale=0.5)[0]
    borders = np.concatenate([[0.0], probabilities(logits).cumsum()])
    ids = sorted({0, 1 % vocab, vocab // 2, vocab - 1})
    points = [(borders[i] + borders[i + 1]) / 2 for i in ids]

    chosen = sample(logits[None], [Request(point=float(at)) for at in [*points, 0.0, 1 - 2**-53]], [0] * (len(ids) + 2))

    assert [c.id for c in chosen] == [*ids, 0, vocab - 1]


def test_tokens_without_weight_are_never_drawn(sample: Sampler) -> None:
    """A logit of minus infinity, and one so low that its weight vanishes; also at the ends of the interval."""
    logits = np.full(50, -np.inf, np.float32)
    logits[[3, 9]] = 0.0, -2000.0

    for fields in ({}, {"top_k": 30}, {"top_p": 0.999}, {"min_p": 0.5}, {"temperature": 2.0}):
        assert {one(sample, logits, point=at, **fields).id for at in (0.0, 0.5, 1 - 2**-53)} == {3}


# --- penalties, bias, masks -----------------------------------------------------------------------


def test_penalties_are_those_of_the_formula(sample: Sampler) -> None:
    """The least change of another logit that wins is found on either side of the penalized one."""
    fields: dict[str, Any] = {"prompt_ids": [1, 4], "output_ids": [0, 2, 2, 2], "temperature": 0.0}
    cases = [
        # id, its logit, penalties, what is left of it
        (2, 5.0, {"frequency_penalty": 0.5}, 3.5),
        (2, 5.0, {"presence_penalty": 0.5}, 4.5),
        (2, 5.0, {"presence_penalty": -0.5, "frequency_penalty": 1.0}, 2.5),
        (2, 5.0, {"repetition_penalty": 2.0, "presence_penalty": 1.0}, 1.5),
        (2, -4.0, {"repetition_penalty": 2.0}, -8.0),
        (1, 5.0, {"presence_penalty": 2.0, "frequency_penalty": 2.0}, 5.0),  # only outputs count here
        (1, 5.0, {"repetition_penalty": 1.25}, 4.0),  # prompts count here
        (3, 5.0, {"repetition_penalty": 9.0, "presence_penalty": 2.0}, 5.0),  # never seen
    ]
    for token, logit, penalties, left in cases:
        for other, wanted in ((left + 1e-3, 7), (left - 1e-3, token)):
            logits = np.full(9, -100.0, np.float32)
            logits[[token, 7]] = logit, other
            assert one(sample, logits, **fields, **penalties).id == wanted


def test_bias_is_added_after_penalties(sample: Sampler) -> None:
    """And a bias of 100 decides between common logits."""
    logits = np.array([4.0, 1.0, 0.0], np.float32)

    assert one(sample, logits, temperature=0.0, logit_bias={2: 100.0}).id == 2
    assert one(sample, logits, temperature=0.0, logit_bias={0: -100.0}).id == 1
    # 4 / 2 - 1.5 = 0.5 is below 1; (4 - 1.5) / 2 = 1.25 would not be.
    fields: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 2.0, "prompt_ids": [0]}
    assert one(sample, logits, logit_bias={0: -1.5}, **fields).id == 1


def test_masks_leave_only_what_they_allow(sample: Sampler) -> None:
    """Allowed ids bound every draw, forbidden ones are taken away, also from those; a bias does not bring them back."""
    logits = noise(300)[0]

    assert set(draws(sample, logits, Request(temperature=2.0, allowed_ids=[7, 299, 0]), 300)) <= {0, 7, 299}
    assert set(draws(sample, logits, Request(allowed_ids=[7, 299], forbidden_ids=[7]), 20)) == {299}
    banned = int(logits.argmax())
    biased = Request(temperature=0.0, forbidden_ids=[banned], logit_bias={banned: 100.0})
    assert set(draws(sample, logits, biased, 1)) == {int(np.argsort(-logits)[1])}


def test_extreme_penalties_stay_numbers(sample: Sampler) -> None:
    """Repetition penalties near nothing and very large ones; logits that are minus infinity stay so."""
    logits = np.array([5.0, 4.0, -3.0, -np.inf], np.float32)

    for penalty, wanted in ((1e-300, 0), (1e300, 1)):
        for temperature in (0.0, 1.0):
            choice = one(
                sample, logits, temperature=temperature, repetition_penalty=penalty, prompt_ids=[0, 2, 3], point=0.5
            )
            assert (choice.id, choice.error) == (wanted, None)
            assert math.isfinite(choice.logprob)


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_of_their_row(sample: Sampler, bad: float, vocab: int) -> None:
    """Wherever one stands, greedy or not, edited or not; rows beside it choose as ever."""
    for at in sorted({0, vocab // 2, vocab - 1}):
        logits = noise(vocab, rows=3)
        logits[1, at] = bad
        kinds = [Request(temperature=0.0), Request(point=0.3), Request(forbidden_ids=[at], top_k=2)]
        requests, rows = [k for k in kinds for _ in range(3)], [0, 1, 2] * 3
        if vocab == 1:
            requests, rows = requests[:6], rows[:6]

        chosen = sample(logits, requests, rows)

        for row, request, choice in zip(rows, requests, chosen, strict=True):
            if row == 1:
                assert (choice.id, choice.error) == (-1, NOT_NUMBERS)
            else:
                assert choice == sample(logits[row : row + 1], [request])[0]
                assert choice.error is None


def test_rows_without_anything_to_choose_are_errors(sample: Sampler) -> None:
    """Nothing but minus infinity from the model; and a mask that leaves nothing."""
    nothing = np.full(20, -np.inf, np.float32)
    logits = noise(20)[0]

    assert one(sample, nothing).error == NOT_NUMBERS
    assert one(sample, logits, allowed_ids=[4], forbidden_ids=[4]).error == NOTHING_LEFT
    assert one(sample, logits, allowed_ids=[4], forbidden_ids=[4], temperature=0.0).id == -1


@pytest.mark.parametrize("bad", [-1, 20, 2**31 - 1, 2**31, 2**32 + 3, -(2**40)])
def test_ids_outside_the_vocabulary_are_an_error_of_their_row(sample: Sampler, bad: int) -> None:
    """None of them touches memory that is not its own; the row after it is sampled as alone."""
    logits = noise(20, rows=2)
    wrong: list[dict[str, Any]] = [
        {"logit_bias": {bad: 1.0}},
        {"allowed_ids": [1, bad]},
        {"forbidden_ids": [bad]},
        {"presence_penalty": 1.0, "output_ids": [3, bad, 3]},
        {"repetition_penalty": 2.0, "prompt_ids": [bad]},
    ]
    good = Request(presence_penalty=1.0, output_ids=[3, 3], temperature=0.0)
    for fields in wrong:
        first, second = sample(logits, [Request(**fields), good])

        assert (first.id, first.error) == (-1, BAD_IDS)
        assert second == sample(logits[1:], [good])[0]


def test_what_is_no_matrix_of_float32_is_refused_by_the_compiled_version() -> None:
    """So is a row that there is not: nothing outside the logits is ever read."""
    need_compiled()
    logits = noise(20, rows=4)

    for wrong in (logits[0], logits[:, ::2], logits.astype(np.float64)):
        with pytest.raises(ValueError, match="contiguous float32"):
            native.sample(wrong, [Request()])
    for rows in ([4], [-1], [0, 1]):
        with pytest.raises(IndexError):
            native.sample(logits, [Request()], rows)
    assert native.sample(logits, []) == []


# --- nothing else matters -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_result_is_the_same_alone_and_in_any_batch(sample: Sampler) -> None:
    """Bit for bit: beside others, in another order, drawn twice from one row; logits are not altered."""
    rng = np.random.default_rng(5)
    logits = noise(997, rows=6)
    before = logits.copy()
    requests = [random_request(rng, 997) for _ in range(40)]
    rows = rng.integers(0, 6, 40).tolist()

    alone = [sample(logits[row : row + 1], [request])[0] for row, request in zip(rows, requests, strict=True)]

    order = rng.permutation(40).tolist()
    mixed = sample(logits, [requests[i] for i in order], [rows[i] for i in order])
    assert sample(logits, requests, rows) == alone
    assert mixed == [alone[i] for i in order]
    assert np.array_equal(logits, before)


@pytest.mark.slow
def test_threads_change_nothing(team: int) -> None:
    """A team gives each row the result that one thread gives it."""
    rng = np.random.default_rng(6)
    logits = noise(3001, rows=8)
    requests = [random_request(rng, 3001) for _ in range(64)]
    rows = rng.integers(0, 8, 64).tolist()

    assert native.sample(logits, requests, rows, team=team) == native.sample(logits, requests, rows)


def margin(logits: Floats, request: Request) -> float:
    """How far the point is from the nearest border between two ids, relative to the distance of a whole draw."""
    if request.greedy:
        return 1.0
    moved = [replace(request, point=min(max(request.point + d, 0.0), 1 - 2**-53)) for d in (-1e-9, 1e-9)]
    low, high = reference.sample(logits[None], moved, [0, 0])
    return 1.0 if low.id == high.id else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [7, 997, 49_152])
def test_both_versions_choose_the_same(vocab: int) -> None:
    """At least 999 of 1,000 random requests, and all whose point is 1e-9 or more from a border between ids."""
    need_compiled()
    rng = np.random.default_rng(7)
    count = differing = 0
    for number in range(100 if vocab < 1000 else 30):
        logits = noise(vocab, seed=number, rows=3, scale=float(rng.choice([0.01, 0.5, 1.0, 3.0, 6.0])))
        if number % 3 == 0:
            logits = np.round(logits * 2) / 2  # many equal ones
        requests = [random_request(rng, vocab) for _ in range(12)]
        rows = rng.integers(0, 3, 12).tolist()
        plain, fast = reference.sample(logits, requests, rows), native.sample(logits, requests, rows)
        for row, request, wanted, got in zip(rows, requests, plain, fast, strict=True):
            count += 1
            assert wanted.error == got.error
            if wanted.id != got.id:
                differing += 1
                assert margin(logits[row], request) < 1.0, (request, wanted, got)
            else:
                assert got.logprob == pytest.approx(wanted.logprob, abs=1e-6)
    assert differing <= count / 1000


# --- random numbers -------------------------------------------------------------------------------


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 1000), st.integers(0, 100000))
def test_uniform_numbers_lie_in_the_unit_interval(seed: int, choice: int, index: int) -> None:
    """Zero may occur, one may not; the purpose gives another number."""
    assert 0.0 <= uniform(seed, choice, index) < 1.0
    assert uniform(seed, choice, index) != uniform(seed, choice, index, "draft")


def test_uniform_numbers_are_what_they_were() -> None:
    """Fixed values: a replay by another version of this program must draw the same."""
    assert [uniform(*args) for args in GOLDEN_POINTS] == list(GOLDEN_POINTS.values())


def points(seed: int, choice: int, first: int) -> Sequence[float]:
    return [uniform(seed, choice, i) for i in range(first, first + 20)]


def test_a_point_depends_on_seed_choice_and_index() -> None:
    """Each of them changes the sequence; negative seeds and large ones are seeds."""
    assert points(1, 0, 0) == points(1, 0, 0)
    several = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (-1, 0, 0), (2**63, 0, 0)]
    assert len({tuple(points(*each)) for each in several}) == 6


GOLDEN_POINTS = {
    (0, 0, 0): 0.7785902568316141,
    (7, 0, 3): 0.7299483216660124,
    (-7, 2, 100): 0.2735842613977545,
    (2**63, 1, 0): 0.6548057578407444,
}
