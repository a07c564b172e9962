"""Denoises a batch with the textbook worker on several CPU devices, and prints what it gives as JSON."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np


def main() -> None:
    given = json.loads(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    from flax import nnx

    from jaxinfer.checkpoint.export import export_hf
    from jaxinfer.textbook.diffusion.worker import DiffusionWorker
    from tests.builders import random_model
    from tests.textbook.diffusion.builders import WAYS, batch_of, drive, worker_of
    from tests.textbook.diffusion.test_placement import config_of

    config = config_of(given["family"])
    model, result = random_model(config, seed=5), {}

    def denoised(name: str, server_args: Any, **more: Any) -> DiffusionWorker:
        worker = worker_of(model, server_args, **{**WAYS[given["way"]], **more})
        logits = np.asarray(worker.prefill(batch_of()).logits_output)
        tokens, state = drive(worker, batch_of())
        arrays = [*jax.tree.leaves(state.arrays), *jax.tree.leaves(nnx.state(worker.model)), state.cached_logits]
        result[name] = {
            "tokens": tokens,
            "iterations": state.iteration_counters,
            "logits": np.where(np.isfinite(logits), logits, 0).tolist(),
            "devices": sorted({str(device) for array in arrays for device in array.devices()}),
            "shard": state.arrays["kv"].k[0].addressable_shards[0].data.shape,
        }
        return worker

    if "device" in given:
        denoised("one", None, device=given["device"])
        denoised("same", None, device=jax.devices()[-1])
    else:
        size = given["size"]
        worker = denoised("one", SimpleNamespace(tp_size=size))
        again = DiffusionWorker(None, None, model=worker.model)  # which is sharded already
        assert again.model is worker.model
        for bad in ({"server_args": SimpleNamespace(tp_size=1)}, {"server_args": None, "device": "cpu"}):
            try:
                DiffusionWorker(**{"model_config": None, "model": worker.model, **bad})
            except ValueError as error:
                result.setdefault("errors", []).append(str(error))
        export_hf(model, config, given["directory"])
        loaded = DiffusionWorker(SimpleNamespace(tp_size=size, model_path=given["directory"]), None)
        pairs = [jax.tree.leaves(nnx.state(each.model)) for each in (loaded, worker)]
        result["as loaded"] = [
            own.sharding == other.sharding and bool((np.asarray(own) == np.asarray(other)).all())
            for own, other in zip(*pairs, strict=True)
        ]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
