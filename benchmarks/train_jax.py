"""Train a small byte-level transformer in JAX, fed by `jax_batches`: `python benchmarks/train_jax.py --help`.

The text is that of `data/tinyshakespeare`, as bytes. The mesh has one axis, `data`: the parameters are on every device,
each of which gets `batch_size` rows a step; `jax.jit` adds the gradients up. The last line is one JSON line.
"""

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from decode import GPT2_END_OF_TEXT, load_pieces

from dali_pipes import LoaderConfig
from dali_pipes.adapters.jax import jax_batches

TEXT = Path(__file__).resolve().parent / "data" / "tinyshakespeare"
VOCABULARY = 256
END = 0
"""The byte that ends a document."""

Parameters = dict[str, Any]


def main(
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 400,
    devices: Annotated[int, typer.Option(min=1, help="CPU devices of the mesh.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per device and step.")] = 4,
    seq_len: Annotated[int, typer.Option(min=2, help="Bytes per row.")] = 64,
    width: Annotated[int, typer.Option(min=4, help="Width of the model, a multiple of 4.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 2,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-3,
    seed: Annotated[int, typer.Option(help="Seed of the parameters and of the order of the data.")] = 1,
    stop_after: Annotated[int | None, typer.Option(min=1, help="Interrupt and resume the run after this step.")] = None,
) -> None:
    """Train, print losses and the data wait; exit code 1 if the validation loss does not fall.

    With --stop-after, the loader is closed after that step and a new one loads its state; the losses stay the same.
    """
    mesh = mesh_of(devices)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train", "val"):
            write_bytes(TEXT / f"{name}.bin", Path(folder) / f"{name}.bin")
        settings = {"batch_size": batch_size, "seq_len": seq_len, "eos_id": END, "mask_boundaries": True, "quiet": True}
        training = LoaderConfig(corpus=f"{folder}/train.bin", repeat=True, seed=seed, **settings)
        validation = LoaderConfig(corpus=f"{folder}/val.bin", shuffle=False, **settings)
        parameters = jax.device_put(initial(seed, seq_len, width, layers), replicated)
        moments = jax.tree.map(jnp.zeros_like, (parameters, parameters))
        losses: list[Any] = []
        before = validation_loss(parameters, validation, mesh)
        print(f"{devices} devices, {devices * batch_size} x {seq_len} bytes per step; validation loss {before:.3f}")
        batches = jax_batches(training, mesh, labels="weights")
        began = time.perf_counter()
        for step in range(1, steps + 1):
            if stop_after is not None and step == stop_after + 1:
                state = batches.get_state()
                batches.close()
                batches = jax_batches(training, mesh, labels="weights")
                batches.set_state(state)
            rate = learning_rate * min(1.0, step / 20) * 0.5 * (1 + math.cos(math.pi * step / (steps + 1)))
            parameters, moments, loss = train_step(parameters, moments, next(batches), rate, step)
            losses.append(loss)
            if step % 20 == 0 or step == steps:
                print(f"step {step:>5}  loss {float(loss):.3f}  {batches.stats().rating_line()}")
        seconds, stats = time.perf_counter() - began, batches.stats()
        batches.close()
        after = validation_loss(parameters, validation, mesh)
    print(f"validation loss {after:.3f}; {seconds:.1f} s, data wait {stats.wait_line()}")
    summary = {
        "benchmark": "train_jax",
        "devices": devices,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(parameters)),
        "losses": [round(float(loss), 5) for loss in losses],
        "val_loss_before": before,
        "val_loss": after,
        "tokens_per_s": steps * devices * batch_size * seq_len / seconds,
        "data_wait_pct": stats.data_wait_pct,
        "seconds": seconds,
    }
    print(json.dumps(summary))
    if not after < before:
        raise typer.Exit(1)


def mesh_of(devices: int) -> Any:
    """A mesh of CPU devices, which are made here: nothing else has used JAX before, or only with this number."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    # A sum over CPU devices waits in a thread of a pool for the other devices. With as few threads as devices, or with
    # steps that are queued ahead, no thread may be left for them, and XLA aborts the program after a minute.
    os.environ.setdefault("NPROC", str(max(2 * devices, os.cpu_count() or 1)))
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def write_bytes(ids: Path, path: Path) -> None:
    """The text of GPT-2 ids as its bytes, each a uint16; a document ends with `END`."""
    pieces = load_pieces()
    pieces[GPT2_END_OF_TEXT] = bytes([END])
    text = b"".join(pieces[token] for token in np.fromfile(ids, "<u2"))
    np.frombuffer(text, np.uint8).astype("<u2").tofile(path)


def initial(seed: int, seq_len: int, width: int, layers: int) -> Parameters:
    """Parameters of a pre-norm transformer with learned positions, whose output matrix is the embedding's."""
    generator = np.random.default_rng(seed)
    shapes = {"qkv": (width, 3 * width), "mix": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}

    def normal(*shape: int) -> Any:
        return generator.standard_normal(shape, np.float32) / np.float32(math.sqrt(width))

    blocks = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(layers)]
    return {"tokens": normal(VOCABULARY, width), "positions": normal(seq_len, width), "blocks": blocks}


def logits_of(parameters: Parameters, ids: Any) -> Any:
    """ids (B, T) -> logits (B, T, 256)."""
    heads = 4
    hidden = parameters["tokens"][ids] + parameters["positions"][: ids.shape[1]]
    for block in parameters["blocks"]:
        qkv = (normed(hidden) @ block["qkv"]).reshape(*ids.shape, 3, heads, -1)
        mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        hidden += mixed.reshape(hidden.shape) @ block["mix"]
        hidden += jax.nn.gelu(normed(hidden) @ block["up"]) @ block["down"]
    return normed(hidden) @ parameters["tokens"].T


def normed(hidden: Any) -> Any:
    return hidden * jax.lax.rsqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)


def loss_sums(parameters: Parameters, batch: dict[str, Any]) -> tuple[Any, Any]:
    """The sum of the losses of the labels that count, and their number, over all devices."""
    picked = jnp.take_along_axis(logits := logits_of(parameters, batch["input_ids"]), batch["labels"][..., None], -1)
    losses = jax.nn.logsumexp(logits, -1) - picked[..., 0]
    return (losses * batch["loss_weights"]).sum(), batch["loss_weights"].sum()


def adam_step(parameters: Any, moments: Any, batch: dict[str, Any], rate: float, step: int) -> tuple[Any, Any, Any]:
    """A step of Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015)."""

    def mean_loss(parameters: Any) -> Any:
        total, count = loss_sums(parameters, batch)
        return total / count

    loss, gradients = jax.value_and_grad(mean_loss)(parameters)
    first = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, moments[0], gradients)
    second = jax.tree.map(lambda old, new: 0.98 * old + 0.02 * new**2, moments[1], gradients)
    rate = rate * jnp.sqrt(1 - 0.98**step) / (1 - 0.9**step)
    moved = jax.tree.map(lambda old, m, v: old - rate * m / (jnp.sqrt(v) + 1e-8), parameters, first, second)
    return moved, (first, second), loss


train_step, summed = jax.jit(adam_step), jax.jit(loss_sums)


def validation_loss(parameters: Any, config: LoaderConfig, mesh: Any) -> float:
    """The mean loss of one pass over the validation text, without the last rows that do not fill a step."""
    with jax_batches(config, mesh, labels="weights") as batches:
        totals = [summed(parameters, batch) for batch in batches]
    return float(sum(total for total, _ in totals) / sum(count for _, count in totals))


if __name__ == "__main__":
    typer.run(main)
