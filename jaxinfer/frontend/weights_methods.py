"""Methods of `LLM` on the weights of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.frontend.client import EngineClient


class WeightsMethods:
    """What a caller does with the weights of the models that its client runs."""

    client: EngineClient

    @property
    def weights_version(self) -> Any:
        """The version that the latest update was given, or the number of updates so far."""
        return self.client.core.weights.version

    def update_weights(self, weights: Any, version: Any = None, model: str = "target") -> None:
        """Replace the weights of a model; no program compiles again.

        Launches in flight land first. Running requests continue with the keys and values that they have, and their
        further tokens are sampled with the new weights; `CompletionOutput.weights_versions` says which token is of
        which. What is cached is of earlier weights, and no request finds it any more. What a diffusion model has not
        landed begins again from masks.

        Arrays are copied into the memory of those that the engine owns. Those that it was lent are let go, and the new
        ones take their place, without a copy where type and placement fit.

        Args:
            weights: an nnx module, its state or a nested dict of arrays with the same structure as the model; an
                iterator of (Hugging Face name, array), in any order; or a directory, as `LLM` takes one, which for a
                drafter is loaded whole first. Types of floats are cast to the engine's.
            version: any value that names these weights; None: the number of the update. A drafter's update leaves the
                target's version as it is.
            model: "target" or "drafter".

        Raises:
            ValueError: a leaf or a tensor is missing, unknown, or has another shape or type, or a directory is of
                another model. Nothing is replaced then, unless by an iterator: it is checked name by name, and a file
                may turn out to be damaged. After an update that fails half-way the engine keeps its requests and
                launches nothing until an update is complete.
            FileNotFoundError, CheckpointError, UnsupportedConfigError: the directory cannot be used.
        """
        self.client.update_weights(weights, version, model)

    def weights_digest(self, model: str = "target") -> str:
        """Return a digest of a model's weights: 64 hexadecimal digits, by path, place and bits of every value.

        It does not depend on how the weights are spread over devices, unless there are more of these than key/value
        heads. Computed on the devices.

        Raises:
            ValueError: there is no such model.
            RuntimeError: the weights are not on the device.
        """
        return self.client.core.weights.digest(model)

    def pause_generation(self, mode: str = "keep") -> None:
        """Launch nothing until `resume_generation`. `add_request` queues meanwhile; `generate`, `chat` and `stream`
        raise RuntimeError.

        Args:
            mode: "keep": requests stay as they are, and continue later. "wait": those that have begun run to their end
                first, in this call, and no other one begins. "abort": all end, with finish reason "abort".

        Raises:
            ValueError: there is no such mode.
            RuntimeError: "wait" would have no end, as nothing is launched; the pause has begun.
        """
        pausing = self.client.core.pausing
        pausing.begin(mode)
        while pausing.still_waits():
            self.client.step()

    def resume_generation(self, recompute_kv: bool = False) -> None:
        """Continue after a pause.

        Args:
            recompute_kv: requests that were kept continue from keys and values of the weights of now: their logits are
                those of a request whose prompt is all of their tokens so far. False: from the keys and values that
                they have.
        """
        self.client.core.pausing.resume(recompute_kv=recompute_kv)

    @property
    def is_paused(self) -> bool:
        """Whether `pause_generation` was called and `resume_generation` was not."""
        return self.client.core.pausing.is_paused

    @property
    def why_idle(self) -> str | None:
        """Why nothing is launched, in words: a pause, sleep, or weights that are gone; None: launches run."""
        return self.client.core.why_idle()

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV on the device, for a trainer in the same process.

        Requests survive and are computed again after waking up; nothing is cached any more. Arrays that were lent stay.
        JAX keeps the memory that it has taken of a GPU: another process gets none of it.

        Args:
            level: 1: weights go into the host's memory. 2: they are dropped, and read again from where they were
                loaded, or refused by name until `update_weights` if they were updated since.

        Raises:
            ValueError: there is no such level.
            RuntimeError: the engine sleeps already.
        """
        self.client.core.sleeping.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back what sleeps. Nothing is launched before weights and KV are there.

        Args:
            tags: "weights" of all models, "kv_cache", or both; None: both.

        Raises:
            ValueError: a tag is unknown.
        """
        self.client.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV are not on the device."""
        return bool(self.client.core.sleeping.missing)
