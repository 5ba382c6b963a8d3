"""Requests of continuous batching in a server: counted, and cancelled when nobody waits."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from .requests import CBGenerateManager, Say


# What a batch has one of, made when it begins; the last five are of no account where nothing is sampled
_SHARED = "do_sample", "repetition_penalty", "sequence_bias", "stop_strings", "num_return_sequences"
_SAMPLING = "temperature", "top_k", "top_p", "min_p", "typical_p"


class BatchingManager(CBGenerateManager):  # type: ignore[misc]
    """
    Answers requests together, by Transformers' continuous batching.

    Args:
        model (`PreTrainedModel`): the model.
        config (`ContinuousBatchingConfig`): pages and batches.
        sampling (`GenerationConfig`): how tokens are chosen, for all requests.
        say (`Callable`): takes a line for each request.
    """

    def __init__(
        self, model: PreTrainedModel, config: ContinuousBatchingConfig, sampling: GenerationConfig, say: Say
    ) -> None:
        super().__init__(cb_config=config)
        self._sampling, self._say, self.counters = sampling, say, Counter[str]()
        made: Any = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=config)
        # Makes the pages: on the thread that is started, what is wrong with them would be the first request's matter
        made.warmup()
        self._register, self._cancel = made.register_result_handler, made.cancel_request
        made.register_result_handler, made.cancel_request = self._register_counted, self._cancel_counted
        self._cb = made
        made.start()

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Refuses a request whose tokens are to be chosen in another way than the batch's."""
        for name in _SHARED if not (self._sampling.do_sample or gen_config.do_sample) else (*_SHARED, *_SAMPLING):
            own, wanted = getattr(self._sampling, name), getattr(gen_config, name)
            if (own or None) != (wanted or None):
                raise ValueError(
                    f"`{name}` is {wanted}, but requests of a batch are sampled alike, here with {own}: leave it out, "
                    "start the server with `--temperature`, or without `--continuous-batching`"
                )

    async def generate_non_streaming(self, *args: Any, request_id: str, **options: Any) -> Any:
        """Answers at once, unless the client goes."""
        try:
            return await super().generate_non_streaming(*args, request_id=request_id, **options)
        except asyncio.CancelledError:
            self._cancel_counted(request_id)
            raise

    def free_share(self) -> float:
        """Tells how much of the pages no request holds."""
        return float(self._cb.batch_processor.cache.compute_free_capacity())

    def _register_counted(self, request_id: str, callback: Callable[[Any], None]) -> None:
        def count(output: Any) -> None:
            if output.is_finished() or output.error is not None:
                num_tokens, num_new = len(output.prompt_ids), len(output.generated_tokens)
                self.counters.update(requests=1, prompt_tokens=num_tokens, generated_tokens=num_new)
                self._say(f"{num_tokens} tokens, {num_new} generated{f': {output.error}' if output.error else ''}")
            callback(output)

        self._register(request_id, count)

    def _cancel_counted(self, request_id: str) -> None:
        self.counters.update(requests=1, cancelled=1)
        self._say("the client has gone")
        self._cancel(request_id)
        with self._cb.output_router._lock:
            self._cb.output_router.result_handlers.pop(request_id, None)
