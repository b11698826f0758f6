"""The loader beside torchdata's `StatefulDataLoader`, and in torch.distributed.checkpoint."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from counting import CountingCorpus
from recipes import SEQ_LEN

from dali_pipes import TokenLoader

EPOCHS = 2
Make = Callable[[], Any]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """The rows of the corpus as a map-style data set."""

    def __init__(self, corpus: CountingCorpus) -> None:
        self._rows = torch.tensor(corpus.tokens[: (len(corpus.tokens) - 1) // SEQ_LEN * SEQ_LEN]).view(-1, SEQ_LEN)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self._rows[row]

    def __len__(self) -> int:
        return len(self._rows)


@pytest.fixture
def theirs(corpus: CountingCorpus) -> Make:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return lambda: StatefulDataLoader(Rows(corpus), batch_size=5, drop_last=True)


@pytest.fixture
def ours(corpus: CountingCorpus) -> Iterator[Make]:
    loaders: list[TokenLoader] = []

    def make() -> TokenLoader:
        loaders.append(TokenLoader(corpus=corpus.pattern, batch_size=5, seq_len=SEQ_LEN, shuffle=False, device="cpu"))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def first_ids(batch: Any) -> list[int]:
    ids = batch["input_ids"] if isinstance(batch, dict) else batch
    return [int(token) for token in ids[:, 0]]


def passes(loader: Any, count: int = EPOCHS) -> list[list[list[int]]]:
    return [[first_ids(batch) for batch in loader] for _ in range(count)]


def after_loading(make: Make, state: Any) -> list[list[list[int]]]:
    loader = make()
    loader.load_state_dict(state)
    return passes(loader)


@pytest.mark.needs("torchdata")
def test_the_rest_of_the_batches_is_that_of_a_stateful_data_loader(theirs: Make, ours: Make) -> None:
    """A state at every step of two epochs, loaded into a fresh loader that then runs two passes to their ends."""
    their_loader, our_loader = theirs(), ours()
    steps = len(our_loader)
    assert steps == len(their_loader) == 8
    assert after_loading(theirs, their_loader.state_dict()) == after_loading(ours, our_loader.state_dict())
    for _ in range(EPOCHS):
        for step, (their_batch, our_batch) in enumerate(zip(their_loader, our_loader, strict=True), 1):
            assert first_ids(their_batch) == first_ids(our_batch)
            their_rest = after_loading(theirs, their_loader.state_dict())
            our_rest = after_loading(ours, our_loader.state_dict())
            assert len(our_rest[0]) == (steps - step or steps)
            if step < steps:
                assert our_rest == their_rest
            else:  # behind the last batch theirs has still to notice the end: an empty pass
                assert their_rest[0] == []
                assert our_rest[0] == their_rest[1]
        assert after_loading(theirs, their_loader.state_dict()) == after_loading(ours, our_loader.state_dict())


@pytest.mark.needs("torchdata")
def test_breaking_off(theirs: Make, ours: Make) -> None:
    """The next `for` is a whole new pass for both, and a state saved before it goes on behind the break."""
    for make in (theirs, ours):
        whole = passes(make(), 1)[0]
        loader = make()
        for step, _ in enumerate(loader, 1):
            if step == 3:
                break
        state = loader.state_dict()
        assert passes(loader, 1) == [whole]
        assert after_loading(make, state) == [whole[3:], whole]


@pytest.mark.needs("torchdata")
def test_asking_for_an_iterator_uses_nothing_up(theirs: Make, ours: Make) -> None:
    """Trainers ask before they train. Theirs begins the pass again when it is asked twice; ours goes on."""
    for make, left_out in ((theirs, 0), (ours, 1)):
        loader, resumed = make(), make()
        next(iter(loader))
        resumed.load_state_dict(loader.state_dict())
        iter(resumed)
        assert passes(resumed, 1)[0] == passes(make(), 1)[0][left_out:]


@pytest.mark.needs("torchdata")
def test_it_is_stateful(ours: Make) -> None:
    from torch.distributed.checkpoint.stateful import Stateful
    from torchdata.stateful_dataloader import Stateful as TorchdataStateful

    loader = ours()
    assert isinstance(loader, Stateful)
    assert isinstance(loader, TorchdataStateful)
