"""The benchmark of objectives runs at tiny size, and its plain versions do what the loader's do."""

import json

import objectives
import pytest
import torch
from objective_oracle import uncorrupted


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_it_measures_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    objectives.main(rounds=1, seconds=0.01, tokens=100_000, batch_size=2, seq_len=64)
    entries = json.loads(capsys.readouterr().out.splitlines()[-1])["entries"]
    assert {entry["case"] for entry in entries} > {*objectives.OBJECTIVES, "mlm, transformers", "mlm, torch"}
    assert all(entry["tokens_per_s"]["median"] > 0 for entry in entries)


def test_plain_versions_hide_their_share() -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 50_000, (8, 512))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    inputs, labels = objectives.torch_mlm(batch)
    chosen = labels != -100
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.02)
    assert (objectives.torch_goldfish(batch) == -100).float().mean().item() == pytest.approx(0.25, abs=0.04)
    noisy, masked, p_mask = objectives.torch_diffusion(batch)
    assert torch.equal(noisy == objectives.MASK, masked)
    assert masked.float().mean().item() == pytest.approx(p_mask.mean().item(), abs=0.05)


def test_the_plain_spans_are_those_of_the_rule() -> None:
    ids = torch.randint(1, 50_000, (8, 512))
    inputs, labels, decoder_inputs = objectives.numpy_spans({"input_ids": ids})
    assert inputs.shape == (8, 512 - 77 + 26 + 1)
    assert labels.shape == decoder_inputs.shape == (8, 77 + 26 + 1)
    sentinels = range(objectives.MASK - 25, objectives.MASK + 1)
    for row, own, targets in zip(ids.tolist(), inputs.tolist(), labels.tolist(), strict=True):
        assert uncorrupted(own[:-1], targets[:-1], sentinels) == row
