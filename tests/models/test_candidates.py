"""Tokens chosen from a few logits of each rank are those the whole vocabulary gives; where few do not decide, all are gathered."""

import pytest
import torch

from ladder_residual.core.reduce import Reducer
from ladder_residual.models.candidates import GREEDY, Candidates, decisive_logits
from ladder_residual.models.loading import VocabularyHead
from tests.ranks import run_on_ranks
from tests.tiny_models import random_ids, shard_model, tiny_model

VOCAB = 509  # a prime
DECIDED = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 7},
    {"do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 1.7},
    {"do_sample": True, "top_k": 12, "min_p": 0.05, "temperature": 0.6},
]
GATHERED = [
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": False, "num_beams": 2},
    {"do_sample": True, "top_k": 0, "top_p": 0.9},
    {"do_sample": True, "top_k": 400},
    {"do_sample": False, "min_new_tokens": 5},
]


def _texts(model, options, batch=3):
    torch.manual_seed(11)
    return model.generate(random_ids(batch, 6), max_new_tokens=12, pad_token_id=0, **options).tolist()


class Counting(Reducer):
    """Widths of what is gathered."""

    def __init__(self, inner):
        self.inner, self.size, self.rank, self.widths = inner, inner.size, inner.rank, []

    def gather(self, local):
        self.widths.append(local.shape[-1])
        return self.inner.gather(local)


def _generate(world, family, dtype, all_options):
    """For each of the options: tokens of the whole model, tokens of the ranks, and the widest message of their logits."""
    model = tiny_model(family, vocab_size=VOCAB).to(dtype)
    whole = [_texts(model, options) for options in all_options]
    head = shard_model(model, world).get_output_embeddings()
    assert isinstance(head, VocabularyHead)
    results = []
    for options, expected in zip(all_options, whole, strict=True):
        head.reducer = Counting(world.reducer())
        results.append((expected, _texts(model, options), max(head.reducer.widths)))
    assert model(random_ids(2, 4)).logits.isfinite().all()  # outside of generate all logits are there
    return results


@pytest.mark.parametrize(("ranks", "family"), [(2, "llama"), (4, "granite")])
def test_the_same_tokens_from_few_numbers(ranks, family):
    for results in run_on_ranks(ranks, _generate, family, torch.float32, DECIDED + GATHERED):
        for index, (whole, few, width) in enumerate(results):
            assert whole == few
            assert width <= 2 * 21 if index < len(DECIDED) else width == -(-VOCAB // ranks)


@pytest.mark.parametrize(("family", "dtype"), [("gemma2", torch.float32), ("granite", torch.bfloat16)])
def test_logits_that_a_family_changes_are_gathered(family, dtype):
    """A cap turns minus infinity into a number; a scale of 3 in half precision makes equals of what differed."""
    for _, _, width in run_on_ranks(2, _generate, family, dtype, DECIDED[:2])[0]:
        assert width == -(-VOCAB // 2)


def _in_half_precision(world):
    """From few and from all logits of the same ranks: an all-reduce rounds, so one process is no judge here."""
    model = shard_model(tiny_model("llama", vocab_size=VOCAB).to(torch.bfloat16), world)
    few = [_texts(model, options) for options in DECIDED]
    model.needs = lambda candidates: None
    return few, [_texts(model, options) for options in DECIDED]


def test_half_precision_has_ties_and_the_same_tokens():
    for few, all_of_them in run_on_ranks(2, _in_half_precision):
        assert few == all_of_them


def _with_other_loops(world):
    """Whether a loop of the caller's sees all logits, whether a forward after a list of processors was made by itself does, and the
    narrowest message of a run with an assistant."""
    model, helper = (tiny_model("llama", vocab_size=VOCAB, seed=seed) for seed in (0, 1))
    ids = random_ids(1, 6)
    assisted = {"assistant_model": helper, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **assisted).tolist()
    head = shard_model(model, world).get_output_embeddings()
    head.reducer = Counting(world.reducer())
    assert model.generate(ids, **assisted).tolist() == expected
    narrowest = min(head.reducer.widths)
    seen = []

    def loop(model, input_ids, **_):
        seen.append(bool(model(input_ids).logits.isfinite().all()))
        return input_ids

    model.generate(ids, custom_generate=loop, max_new_tokens=2, pad_token_id=0)
    model._get_logits_processor(model.generation_config, input_ids_seq_length=6)
    return seen, bool(model(ids).logits.isfinite().all()), narrowest


def test_other_loops_than_transformers_own_get_all_logits():
    for found in run_on_ranks(2, _with_other_loops):
        assert found == ([True], True, -(-VOCAB // 2))


@pytest.mark.parametrize("needed", [GREEDY, Candidates(1, True), Candidates(5, True), Candidates(12, True)])
@pytest.mark.parametrize("distinct", [3, 40, 100_000])
def test_ties_are_kept_or_all_is_gathered(needed, distinct):
    """Whatever survives transformers' own top-k of all logits survives it here, also where many are equal."""
    generator = torch.Generator().manual_seed(distinct)
    whole = torch.randint(0, distinct, (64, VOCAB), generator=generator).float()
    halves = whole[:, :255], whole[:, 255:]
    decided = 0
    for row in range(len(whole)):
        mine = [half[row : row + 1] for half in halves]

        def both(message, mine=mine):
            count = message.shape[-1] // 2
            values, places = mine[1].max(-1, keepdim=True) if count == 1 else mine[1].topk(count)
            return torch.cat([message, values, (places + 255).float()], -1)

        found = decisive_logits(mine[0], 0, VOCAB, 2, needed, both)
        if found is None:
            continue
        decided += 1
        if needed == GREEDY:
            assert int(found.argmax()) == int(whole[row].argmax())
            continue
        last = whole[row].topk(needed.best).values[-1]
        kept = whole[row] >= last
        assert torch.equal(found[0] >= last, kept)
        assert torch.equal(found[0][kept], whole[row][kept])
    assert decided == len(whole) if needed == GREEDY or distinct > 1000 else decided < len(whole)
