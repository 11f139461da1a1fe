"""One member of a request on its way through vLLM: a request of vLLM's own, and one more after each cut.

    waits -- add --> in vLLM -- take --> whole
      ^                         '------> cut: goes on behind the tokens that it has --.
      '-------------------------------------------------------------------------------'

Members are requests of their own, so that one which is cut need not wait for its siblings. When to add, and what to do
with a cut, is the engine's to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fourstroke.engines.parts import join_parts, member_seed
from fourstroke.types import Completion, SampleRequest, StopReason, VersionRun

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

_STOPS = {"stop": StopReason.FINISHED, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


class Member:
    """One completion of a request, in vLLM.

    Args:
        llm: vLLM's asynchronous engine.
        request: The request that this is a member of.
        index: Which of its completions, from 0.
        name: Name in vLLM, which no other member has or had.
        engine: Name of the engine, for the completion.

    Example:
        >>> member = Member(llm, request, index=0, name="g0/17", engine="vllm-0")  # doctest: +SKIP
        >>> await member.add(cache_salt=None)  # doctest: +SKIP
        >>> await member.take()  # doctest: +SKIP
        >>> member.is_whole, member.completion.ids  # doctest: +SKIP
    """

    def __init__(self, llm: AsyncLLM, request: SampleRequest, *, index: int, name: str, engine: str) -> None:
        self._llm = llm
        self._request = request
        self._index = index
        self._name = name
        self._engine = engine
        self._parts: list[Completion] = []
        self._collector: RequestOutputCollector | None = None

    @property
    def is_added(self) -> bool:
        """Whether vLLM has it and has not answered yet."""
        return self._collector is not None

    @property
    def is_whole(self) -> bool:
        """Whether the completion has come to its end."""
        return bool(self._parts) and self._parts[-1].stop is not StopReason.ABORTED

    @property
    def has_no_token(self) -> bool:
        """Whether it is in vLLM and, as far as vLLM has said, was not computed there yet."""
        processor = self._llm.output_processor
        names = processor.external_req_ids.get(self._name, ())
        return any(processor.request_states[name].is_prefilling for name in names)

    @property
    def completion(self) -> Completion:
        """All parts as one; legal once it is whole."""
        assert self.is_whole, self._name
        return join_parts(self._parts)

    async def add(self, *, cache_salt: str | None) -> None:
        """Hand it to vLLM, behind everything that was added before.

        Args:
            cache_salt: Requests share cached prefixes only with those of the same salt.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        assert not self.is_added, self._name
        request, ids = self._request, [token for part in self._parts for token in part.ids.tolist()]
        parameters = SamplingParams(
            max_tokens=request.max_tokens - len(ids),
            temperature=request.temperature,
            seed=member_seed(request.seed, member=self._index, num_tokens=len(ids)),
            stop_token_ids=list(request.stop_ids),
            # The stop ids of the request alone end a completion.
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # Nobody else holds these.
            skip_clone=True,
        )
        prompt = tokens_input(request.prompt_ids.tolist() + ids, cache_salt=cache_salt)
        self._collector = await self._llm.add_request(self._name, prompt, parameters)

    async def take(self) -> None:
        """Wait until vLLM has come to the end of what was added, or has cut it."""
        from vllm import RequestOutput

        assert self._collector is not None, self._name
        output = await self._collector.get()
        self._collector = None
        assert isinstance(output, RequestOutput), output
        (sampled,) = output.outputs
        self._parts.append(self._part(sampled))

    async def abort(self) -> None:
        """Cut it: vLLM stops working on it, and ``take`` gets what there is. Does nothing to one that is not there."""
        await self._llm.abort(self._name)

    def _part(self, output: CompletionOutput) -> Completion:
        ids = np.array(output.token_ids, dtype=np.int32)
        assert output.logprobs is not None, output
        sampled = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = np.array([position[token].logprob for token, position in sampled], dtype=np.float32)
        # vLLM labels every step with the version that it was told at the last update, and reports runs of one label.
        # There are none only where nothing was sampled: a request that was cut before its first token.
        spans = output.weight_versions or []
        versions = tuple(VersionRun(version=int(span.version), num_tokens=span.end - span.start) for span in spans)
        return Completion(
            ids=ids,
            # A probability that rounds to 1 can come out a hair above 0.
            logprobs=np.minimum(logprobs, 0.0),
            versions=versions,
            stop=_STOPS[output.finish_reason or ""],
            engine=self._engine,
        )
