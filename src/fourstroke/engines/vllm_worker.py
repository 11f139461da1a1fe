"""What vLLM loads inside its own process: the executor, the weight transfer engine, and one more call of the worker.

    driver process                    | vLLM's core process
    VllmEngine -> AsyncLLM -- zmq --> | CoreExecutor -> worker -> SharedMemoryTransfer -> weights.receive

vLLM finds :class:`CoreExecutor` and :class:`WorkerExtension` by import path, in arguments that it documents for that,
so nothing needs to be installed as a plugin. Imported by the driver too: importing it changes nothing.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from fourstroke.observability import die_with_parent, give_back_heap
from fourstroke.types import Publication, WeightVersion, decode, encode
from fourstroke.weights.manifest import checkpoint_shapes
from fourstroke.weights.receive import Receiver

BACKEND = "shared_memory"

_LAST = -1000


class CoreExecutor(UniProcExecutor):
    """Runs the worker in the core's process.

    On CPU vLLM asks for a worker process of its own, since that is where it binds OpenMP threads to cores. The two
    processes then poll for each other and one of the cores is lost; here threads are left to the system instead, and
    their number is set by the call below.
    """

    def _init_executor(self) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            die_with_parent(parent.pid)
        # The driver answers Ctrl-C for all of its processes; the core would stop in the middle of its work.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Once vLLM has taken itself apart, leave: the interpreter's own end would take seconds, in libraries' clean-up.
        multiprocessing.util.Finalize(None, os._exit, args=(1,), exitpriority=_LAST)
        settings: dict[str, Any] = self.vllm_config.additional_config
        if settings["log_path"] is not None:
            _log_into(Path(settings["log_path"]))
        if settings["num_threads"] is not None:
            torch.set_num_threads(settings["num_threads"])
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
        super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        # vLLM's own choice is a file in the system's folder, which stays there when the process is killed.
        _, rank, local_rank = super()._distributed_args()
        return f"file://{self.vllm_config.additional_config['scratch']}/rendezvous", rank, local_rank


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the driver tells the worker once: an encoded ``WeightVersion``, that of the weights just loaded."""

    held: bytes


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What the driver tells the worker of new weights: an encoded ``Publication``."""

    publication: bytes


class SharedMemoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads publications out of shared memory: all is verified, then all is loaded.

    The whole update happens in ``receive_weights``, because vLLM's ``start_weight_update`` is the place to take the old
    weights apart, which must not happen to a publication that is then refused. Tensors are loaded by vLLM's own reload,
    which repacks them as the CPU backend needs and copies them, so that none looks into shared memory afterwards.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Note what is held and what a publication must hold, from the checkpoint that vLLM loaded."""
        self.held = decode(init_info.held, WeightVersion)
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        self._receiver = Receiver(checkpoint_shapes(Path(self.model_config.model)), dtype=dtype)

    def start_weight_update(self) -> None:
        """Nothing yet: see the class."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Verify and load a publication; one of the version that is held already is left alone.

        Raises:
            PublicationError: It is not what it must be; nothing was loaded.
        """
        publication = decode(update_info.publication, Publication)
        if publication.version == self.held:
            return
        tensors = self._receiver.receive(publication, held=self.held)
        reload_weights(
            self.vllm_config, self.model, weights_iterator=tensors, weights_path=None, is_checkpoint_format=True
        )
        self._repack_output_matrix()
        # The new weights stand beside the old until these are freed; without this the heap keeps both, and holes.
        give_back_heap()
        self.held = publication.version

    def _repack_output_matrix(self) -> None:
        """Have an output matrix that is tied to the embedding follow it.

        A checkpoint holds the two once, so vLLM's reload sees no weight for the output matrix and keeps what the CPU
        backend packed at start: everything is new but the last layer. Where nothing is packed this changes nothing.
        """
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)

    def finish_weight_update(self) -> None:
        """Nothing left: see the class."""

    def shutdown(self) -> None:
        """Nothing to give back: the mapping ends with the process."""


class WorkerExtension:
    """Methods that vLLM adds to its worker class, called over ``collective_rpc``."""

    weight_transfer_engine: SharedMemoryTransfer
    vllm_config: Any
    device: torch.device
    get_model: Callable[[], Any]

    def held_version(self) -> bytes:
        """The encoded version that the worker now holds: of the last publication that it verified and loaded."""
        return encode(self.weight_transfer_engine.held)

    def score_rows(self, ids: list[list[int]]) -> list[list[float]] | None:
        """Log-probability of each token but the first of rows of one length, at temperature 1.

        The model itself runs, with attention among the rows' own tokens in place of that over the cache: no request is
        needed, none that runs is touched, and what has been loaded is all that the numbers depend on. None on a rank
        that has no logits; no rows where a layer attends in a way of its own (MLA, linear attention).
        """
        if not all(isinstance(layer, Attention) for layer in _attention_layers(self.vllm_config)):
            return []
        model = self.get_model()
        rows_BT = torch.tensor(ids, device=self.device)
        num_rows, length = rows_BT.shape
        with (
            torch.inference_mode(),
            _attention_within_rows(self.vllm_config, num_rows=num_rows),
            set_forward_context(None, self.vllm_config, num_tokens=rows_BT.numel()),
        ):
            hidden = model(
                input_ids=rows_BT.flatten(), positions=torch.arange(length, device=self.device).repeat(num_rows)
            )
            logits = model.compute_logits(hidden)
        if logits is None:
            return None
        logprobs_BTV = logits.view(num_rows, length, -1)[:, :-1].float().log_softmax(-1)
        picked: list[list[float]] = logprobs_BTV.gather(-1, rows_BT[:, 1:, None])[..., 0].tolist()
        return picked


def _attention_layers(vllm_config: Any) -> list[Any]:
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, AttentionLayerBase)]


@contextmanager
def _attention_within_rows(vllm_config: Any, *, num_rows: int) -> Iterator[None]:
    """Have every attention layer see the rows of this forward pass alone, which must all have one length."""

    def forward(layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, output: Tensor, **__: Any) -> Tensor:
        query, key, value = (each.view(num_rows, -1, *each.shape[1:]).transpose(1, 2) for each in (query, key, value))
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=layer.impl.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output.copy_(attended.transpose(1, 2).reshape(output.shape))

    layers = _attention_layers(vllm_config)
    for layer in layers:
        layer.impl.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.impl.forward


def _log_into(path: Path) -> None:
    """Send what any library prints in this process into the log, so that a person's terminal stays calm."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
