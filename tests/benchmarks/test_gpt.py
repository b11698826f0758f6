"""The demo's model: its size, its causality, and its loss against the plain one."""

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, ModelShape, parameter_groups
from hypothesis import given
from hypothesis import strategies as st
from output_loss import IGNORED_LABEL, output_loss

SHAPE = ModelShape(layers=2, heads=2, width=8, vocab_size=30, seq_len=12)


@pytest.fixture
def model() -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(SHAPE).eval()


def test_gpt2_124m_has_its_parameters() -> None:
    with torch.device("meta"):
        model = GPT(ModelShape(12, 12, 768, 50304, 1024))
    # 124,439,808 at OpenAI's 50,257 ids, and 47 rows of padding.
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808 + 47 * 768


def test_every_parameter_is_in_one_group_and_only_matrices_decay(model: GPT) -> None:
    decaying, others = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [names[id(parameter)] for parameter in (*decaying["params"], *others["params"])]
    assert sorted(found) == sorted(names.values())
    assert {names[id(parameter)].rsplit(".", 2)[1] for parameter in decaying["params"]} == {
        "query_key_value",
        "output",
        "input",
    }


@given(position=st.integers(0, SHAPE.seq_len - 1), other=st.integers(1, SHAPE.vocab_size - 1))
def test_a_token_changes_nothing_before_it_and_something_from_it_on(position: int, other: int) -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE).eval()
    ids = torch.randint(SHAPE.vocab_size, (1, SHAPE.seq_len))
    changed = ids.clone()
    changed[0, position] = (changed[0, position] + other) % SHAPE.vocab_size
    with torch.no_grad():
        before, after = model.hidden_states(ids)[0], model.hidden_states(changed)[0]
    torch.testing.assert_close(after[:position], before[:position])
    assert not torch.allclose(after[position], before[position])
    assert not torch.allclose(after[-1], before[-1])


def test_samples_depend_on_their_generator_alone(model: GPT) -> None:
    prompt = torch.tensor([3, 1])
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = model.generate(prompt, 20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again = model.generate(prompt, 20, generator=torch.Generator().manual_seed(1))
    other = model.generate(prompt, 20, generator=torch.Generator().manual_seed(2))
    assert first.tolist()[:2] == [3, 1]
    assert len(first) == 22
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_one_candidate_is_the_likeliest_id(model: GPT) -> None:
    ids = torch.tensor([3, 1, 4])
    with torch.no_grad():
        expected = (model.hidden_states(ids[None])[0, -1] @ model.token_embedding.weight.T).argmax()
    drawn = model.generate(ids, 1, generator=torch.Generator().manual_seed(1), top_k=1)
    assert drawn.tolist() == [3, 1, 4, int(expected)]


@given(
    rows=st.sampled_from([1, 2, 127, 128, 129, 300]),
    vocab_size=st.integers(1, 40),
    ignored=st.sampled_from([0.0, 0.5]),
    scale=st.sampled_from([1.0, 200.0]),
    seed=st.integers(0, 1000),
)
def test_the_sliced_loss_is_the_plain_loss(rows: int, vocab_size: int, ignored: float, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 6, generator=generator, dtype=torch.float64).mul_(scale).requires_grad_()
    weight = torch.randn(vocab_size, 6, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(vocab_size, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = IGNORED_LABEL
    labels[0] = 0  # the mean over no label at all is not a number

    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED_LABEL)
    expected_gradients = torch.autograd.grad(3 * expected, (hidden, weight))
    loss, losses = output_loss(hidden, weight, labels)
    gradients = torch.autograd.grad(3 * loss, (hidden, weight))

    torch.testing.assert_close(loss, expected)
    logits = (hidden @ weight.T).detach()
    torch.testing.assert_close(losses, F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none"))
    assert not losses.requires_grad
    torch.testing.assert_close(gradients, expected_gradients)
    with torch.no_grad():
        assert output_loss(hidden, weight, labels)[0] == loss
