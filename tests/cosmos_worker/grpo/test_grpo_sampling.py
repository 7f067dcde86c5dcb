from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cosmos_worker.grpo import vocab
from cosmos_worker.grpo.batches import collate, completion_log_probs
from cosmos_worker.grpo.config import GrpoSettings
from cosmos_worker.grpo.engine import Engine
from cosmos_worker.grpo.model import GrpoModel, KeyValueCache
from cosmos_worker.grpo.sampling import SampledTokens, generate
from cosmos_worker.grpo.weights import load_weights, save_weights

PROMPTS = ["1 + 1 =", "22 + 3", "a much longer prompt ="]
CPU = torch.device("cpu")


@pytest.fixture
def model(settings: GrpoSettings) -> GrpoModel:
    torch.manual_seed(0)
    model = GrpoModel(settings.model)
    with torch.no_grad():
        for parameter in model.parameters():
            # The initial policy is nearly uniform, whatever its input.
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def sample(
    model: GrpoModel, counts: list[int], *, temperature: float = 1.0, seed: int = 0
) -> list[list[SampledTokens]]:
    return generate(
        model,
        [vocab.encode_prompt(prompt) for prompt in PROMPTS],
        counts,
        max_new_tokens=9,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    )


def test_reading_with_a_cache_equals_reading_at_once(model: GrpoModel) -> None:
    tokens = torch.randint(5, vocab.VOCAB_SIZE, (3, 12))
    cache = KeyValueCache(model.config, rows=3, capacity=12, device=CPU)
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(tokens[:, :7], cache=cache)]
        for place in range(7, 12):
            everything = torch.ones(3, 1, 1, place + 1, dtype=torch.bool)
            positions = torch.full((3, 1), place)
            parts.append(model(tokens[:, place : place + 1], positions=positions, cache=cache, mask=everything))

    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_log_probabilities_are_those_the_learner_computes(model: GrpoModel, temperature: float) -> None:
    sampled = sample(model, [4, 0, 7], temperature=temperature)
    flat = [
        (vocab.encode_prompt(prompt), completion)
        for prompt, completions in zip(PROMPTS, sampled, strict=True)
        for completion in completions
    ]
    batch = collate([(prompt, completion.tokens) for prompt, completion in flat], CPU)
    with torch.no_grad():
        scores = completion_log_probs(model, batch, temperature)

    for row, mask, (_, completion) in zip(scores, batch.is_completion, flat, strict=True):
        assert row[mask].tolist() == pytest.approx(completion.logprobs, abs=1e-4)


def test_completions_are_whole_and_counted(model: GrpoModel) -> None:
    sampled = sample(model, [4, 0, 7])

    assert [len(completions) for completions in sampled] == [4, 0, 7]
    for completion in sampled[0] + sampled[2]:
        assert vocab.is_completion(completion.tokens)
        assert len(completion.tokens) == len(completion.logprobs) <= 9
        assert len(completion.tokens) == 9 or completion.tokens[-1] == vocab.END
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in completion.logprobs)


def test_the_seed_decides(model: GrpoModel) -> None:
    assert sample(model, [3, 3, 3], seed=1) == sample(model, [3, 3, 3], seed=1)
    assert sample(model, [3, 3, 3], seed=1) != sample(model, [3, 3, 3], seed=2)


def test_nothing_asked_is_nothing_sampled(model: GrpoModel) -> None:
    assert sample(model, [0, 0, 0]) == [[], [], []]


def test_a_prompt_beyond_the_context_is_refused(model: GrpoModel) -> None:
    with pytest.raises(ValueError, match="exceed the context of 48"):
        generate(
            model,
            [vocab.encode_prompt("x" * 40)],
            [1],
            max_new_tokens=9,
            temperature=1.0,
            generator=torch.Generator(),
        )


def test_an_engine_samples_from_the_weights_it_loaded(model: GrpoModel, settings: GrpoSettings, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(save_weights(model))
    engine = Engine(settings)
    assert engine.version is None
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate(["1"], [1], seed=0)

    engine.load(3, str(weights))
    generated = engine.generate(PROMPTS, [2, 2, 2], seed=5)

    assert engine.version == 3
    assert {completion.version for completions in generated for completion in completions} == {3}
    assert all(vocab.decode(completion.tokens) == completion.text for completion in generated[0])
    assert generated == engine.generate(PROMPTS, [2, 2, 2], seed=5)


def test_weights_that_do_not_load_leave_the_engine_as_it_was(
    model: GrpoModel, settings: GrpoSettings, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(save_weights(model))
    engine = Engine(settings)
    engine.load(1, weights)
    before = engine.generate(PROMPTS, [2, 2, 2], seed=5)

    other = GrpoSettings.from_dict({"model": {"width": 32, "heads": 2, "layers": 2, "context_tokens": 48}})
    weights.write_bytes(save_weights(GrpoModel(other.model)))
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.load(2, weights)
    with pytest.raises(FileNotFoundError):
        engine.load(2, tmp_path / "nothing")

    assert engine.version == 1
    assert engine.generate(PROMPTS, [2, 2, 2], seed=5) == before


def test_weights_survive_their_bytes(model: GrpoModel, settings: GrpoSettings) -> None:
    again = load_weights(save_weights(model), settings.model, CPU)

    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
