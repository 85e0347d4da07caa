"""vLLM's senders between GPUs as far as they go without one: run with vLLM's interpreter, prints what they tell.

python builtin_senders.py CHECKPOINT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine, NCCLWeightTransferUpdateInfo

from rlcore.sampling.vllm.client import Address, ControlGroup, EngineControl
from rlcore.sampling.vllm.transfer import ControlClient, WeightSource, init_info, send_direct, world_sizes
from rlcore.sampling.vllm.weights import Weights

ASKED: list[tuple[str, Any]] = []


class Server(EngineControl):
    """A server of three workers."""

    def ask(self, path: str, payload: Any, *, seconds: float = 0.0) -> Any:
        ASKED.append((path, payload))
        return {"world_size": 3}


group = ControlGroup([Server(Address("127.0.0.1", 1), log_tail=str)])
sizes = world_sizes(group)
nccl, ipc = (init_info(kind, "127.0.0.1", sizes) for kind in ("nccl", "ipc"))
meeting = {name: getattr(nccl, name) for name in ("master_address", "master_port", "world_size")}
NCCLWeightTransferInitInfo(**meeting, rank_offset=1)  # both check what they are given
IPCWeightTransferInitInfo(packed=ipc.packed)
source, sent = WeightSource(torch.device("cpu")), []
sender = NCCLTrainerWeightTransferEngine(client=ControlClient(group, sizes), source=source)
# In the place of the broadcast, which needs a GPU: vLLM's own check of what is sent against what was announced.
sender._broadcast = lambda source, meta: sent.extend(name for name, _ in sender._checked_iter(source, meta))
send_direct(sender, source, Weights(path=Path(sys.argv[1])))
update = dict(ASKED)["/update_weights"]["update_info"]
NCCLWeightTransferUpdateInfo(**update)
found = {
    "routes": [path for path, _ in ASKED],
    "world_size": nccl.world_size,
    "sent": sent,
    "names": update["names"],
}
sys.stdout.write("FOUND " + json.dumps(found) + "\n")
