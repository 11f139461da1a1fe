"""The trainer's own process: reads a verb, calls the trainer, writes the outcome. Started by ``placement``.

    python -m fourstroke.orchestration.trainer_process FD

``FD`` is an inherited socket. The process ends when the other side closes it, and is killed with its parent; it ignores
Ctrl-C, which the driver answers for everybody.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from fourstroke.algorithms.losses import bind_loss
from fourstroke.config import RunConfig
from fourstroke.errors import ActorDiedError, FourstrokeError, boundary
from fourstroke.orchestration.wire import pack, receive_frame
from fourstroke.trainer.engine import TorchTrainer
from fourstroke.types import Batch, Microbatch, decode, encode

_PR_SET_PDEATHSIG = 1


class TrainerServer:
    """Answers verbs with the bytes of nouns."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self._trainer = trainer
        self._verbs: dict[str, Callable[[list[bytes]], list[bytes]]] = {
            "start": self._start,
            "prepare": self._prepare,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "publish": self._publish,
            "save": self._save,
        }

    def answer(self, verb: str, parts: list[bytes]) -> bytes:
        """The frame that answers a verb: ``ok`` with nouns, or ``error`` with a class name and a sentence."""
        try:
            with boundary(f"trainer, {verb}", ActorDiedError):
                return pack("ok", self._verbs[verb](parts))
        except FourstrokeError as error:
            traceback.print_exc()  # into the log file of this process
            return pack("error", [type(error).__name__.encode(), str(error).encode()])

    def close(self) -> None:
        """Give back the trainer's buffers."""
        self._trainer.close()

    def _start(self, _: list[bytes]) -> list[bytes]:
        self._trainer.start()
        return []

    def _prepare(self, parts: list[bytes]) -> list[bytes]:
        return [encode(self._trainer.prepare(decode(parts[0], Batch)))]

    def _forward_backward(self, parts: list[bytes]) -> list[bytes]:
        return [encode(self._trainer.forward_backward(decode(parts[0], Batch), decode(parts[1], Microbatch)))]

    def _optim_step(self, _: list[bytes]) -> list[bytes]:
        return [encode(self._trainer.optim_step())]

    def _publish(self, parts: list[bytes]) -> list[bytes]:
        return [encode(self._trainer.publish(int(parts[0]), incarnation=0))]

    def _save(self, parts: list[bytes]) -> list[bytes]:
        self._trainer.export(parts[0].decode())
        return []


def main() -> None:
    """Serve one trainer until the driver hangs up."""
    # The parent may be killed without a chance to clean up; this process must not outlive it.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    first = receive_frame(connection)
    if first is None:
        return
    _, (config_json, model_path, publication_path) = first
    config = RunConfig.model_validate_json(config_json)
    trainer = TorchTrainer(
        config,
        model_path=Path(model_path.decode()),
        publication_path=Path(publication_path.decode()),
        loss=bind_loss(config.algorithm),
    )
    server = TrainerServer(trainer)
    while (frame := receive_frame(connection)) is not None:
        connection.sendall(server.answer(*frame))
    server.close()
    # Straight out: the interpreter's own shutdown would wait for torch's thread pools.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
