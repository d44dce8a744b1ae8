"""A ring beside what else splits training: DDP, FSDP2, tensor parallelism, pipelines, compiled layers.

Each gives the loss and the gradients of one process. Who sums gradients over cp is said at each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="needs transformers")

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from burst_attention import Layout, Ring
from burst_attention.integrations.batch import shard_batch
from burst_attention.integrations.transformers import enable
from burst_attention.launch import run_processes
from burst_attention.train import parallel
from burst_attention.train.config import TrainConfig
from burst_attention.train.data import load_data, load_tokenizer
from burst_attention.train.loop import Trainer
from burst_attention.train.model import make_model, require_known_logits
from tests.integrations.tiny_models import tiny_model
from tests.train.exact import Plain, distance, full, require_same, sharded, tiny, unsharded
from tests.train.exact_matrix import SAME, Cell, name_of

GRADIENTS = 2e-5
Gradients = tuple[float, dict[str, Tensor]]


def one_process(config: TrainConfig) -> Gradients:
    """Loss and raw gradients of a step."""

    def body(ring: Ring) -> Gradients:
        plain = Plain(config)
        return plain.gradients(0), {name: full(p.grad) for name, p in plain.model.named_parameters()}

    return run_processes(body, 1)[0]


def require_gradients(found: Gradients, expected: Gradients) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert distance(found[1][name], gradient) < GRADIENTS, name


def rank_batches(config: TrainConfig, layout: Layout, replica: int, rank: int) -> list[dict[str, Any]]:
    """The shards of a step's sequences that a rank is given, with the number of labels of all replicas together."""
    data = load_data(config.data, load_tokenizer(config.tokenizer), config.tokens, config.seed)
    packed = [data.sequence(index) for index in range(config.accumulate * config.dp)]
    whole = [{"input_ids": each.input_ids[None], "documents": each.documents} for each in packed]
    labels = sum(config.tokens - len(each.documents) for each in packed)
    mine = [shard_batch(each, layout, rank) for each in whole[replica :: config.dp]]
    return [{**each, "num_items_in_batch": labels} for each in mine]


def wrapped(kind: str, model: Any, mesh: DeviceMesh) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    over = mesh["dp", "cp"]
    # Over two axes FSDP2 shards over the second and keeps copies along the first.
    over = over._flatten("dp_cp") if kind == "fsdp" else over
    for layer in model.model.layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_a_users_own_loop(kind: str, tmp_path: Path) -> None:
    """The wrapper averages over dp and cp, so the loss is multiplied by their number; two micro-batches are summed."""
    config = tiny(tmp_path, cp=2, dp=2, accumulate=2)

    def body(ring: Ring) -> Gradients:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        place = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
        model = enable(make_model(config, 257).train(), ring=Ring.from_mesh(mesh["cp"]))
        names = [name for name, _ in model.named_parameters()]
        model = wrapped(kind, model, mesh)
        total = torch.zeros(())
        first, last = rank_batches(config, Layout.zigzag(config.tokens, 2), *place)
        for batch in (first, last):
            if kind == "ddp":
                model.require_backward_grad_sync = batch is last
            else:
                model.set_requires_gradient_sync(batch is last)
            loss = model(**batch, use_cache=False).loss
            (loss * mesh.size()).backward()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item(), {name: full(p.grad) for name, p in zip(names, model.parameters(), strict=True)}

    expected = one_process(config)
    for found in run_processes(body, 4, timeout=300, ring_timeout=120):
        require_gradients(found, expected)


@pytest.mark.parametrize(
    "cell",
    [{"cp": 2, "dp": 2, "tp": 2}, {"cp": 2, "tp": 2, "model": "qwen3", "checkpointing": "selective"}],
    ids=name_of,
)
def test_tensor_parallelism_beside_them(cell: Cell, tmp_path: Path) -> None:
    """Norms are compared too: weights on different meshes are clipped together, by the norm of one process."""
    config = tiny(tmp_path, **{**SAME, "steps": 2, **cell})
    require_same(sharded(config), unsharded(config))


def test_what_sees_only_some_features_is_refused() -> None:
    """OLMo 2 norms the features of all heads together, which no rank of tp has."""
    layer = tiny_model("llama").model.layers[0]
    styles = parallel._styles(layer, 8)
    parallel._refuse_unknown(layer, styles)
    layer.self_attn.q_norm = nn.RMSNorm(32)
    assert parallel._styles(layer, 8).keys() == styles.keys()
    with pytest.raises(ValueError, match=r"does not know how to split self_attn.q_norm.weight of LlamaDecoderLayer"):
        parallel._refuse_unknown(layer, styles)
    layer.self_attn.q_norm = nn.RMSNorm(8)
    assert parallel._styles(layer, 8).keys() - styles.keys() == {"self_attn.q_norm"}


class Stage(nn.Module):
    """Some layers of a Llama, with the embedding or the head; what attention must know comes with each call."""

    def __init__(self, model: Any, first: bool, layout: Layout) -> None:
        super().__init__()
        self.model, self.first, self.layout = model, first, layout

    def forward(self, x: Tensor, position_ids: Tensor, documents: Tensor) -> Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(x) if self.first else x
        # A pipeline cuts tensors into micro-batches, and nothing else; lengths are filled up with zeros.
        lengths = tuple(length for length in documents[0].tolist() if length)
        angles = inner.rotary_emb(hidden, position_ids=position_ids)
        for layer in inner.layers[:1] if self.first else inner.layers[1:]:
            hidden = layer(
                hidden, position_ids=position_ids, position_embeddings=angles, layout=self.layout, documents=lengths
            )
        return hidden if self.first else self.model.lm_head(inner.norm(hidden))


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B], ids=["gpipe", "1f1b"])
def test_pipeline_stages_of_rings(schedule: Any, tmp_path: Path) -> None:
    """Four micro-batches with documents of their own are under way at once. Gradients are summed over cp by hand."""
    config = tiny(tmp_path, cp=2, accumulate=4, tokens=64)

    def body(ring: Ring) -> Gradients:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
        pp, cp = mesh["pp"].get_local_rank(), mesh["cp"].get_local_rank()
        layout = Layout.zigzag(config.tokens, 2)
        model: Any = enable(make_model(config, 257).train(), ring=Ring.from_mesh(mesh["cp"]))
        batches = rank_batches(config, layout, 0, cp)
        labels = batches[0]["num_items_in_batch"]
        ids, positions, targets = (
            torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "position_ids", "shift_labels")
        )
        documents = torch.zeros(len(batches), config.tokens, dtype=torch.int64)
        for row, batch in zip(documents, batches, strict=True):
            row[: len(batch["documents"])] = torch.tensor(batch["documents"])
        # Given shapes keep torch from finding them by a first call without data, which no ring could answer.
        hidden = torch.empty(1, ids.shape[1], 32, requires_grad=True)
        stage = PipelineStage(
            Stage(model, pp == 0, layout), pp, 2, torch.device("cpu"), group=mesh["pp"].get_group(),
            input_args=(ids[:1] if pp == 0 else hidden,),
            output_args=(hidden if pp == 0 else torch.empty(1, ids.shape[1], 257, requires_grad=True),),
        )  # fmt: skip

        def loss_of(logits: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / labels

        pipeline = schedule(stage, len(batches), loss_of, scale_grads=False)
        losses: list[Tensor] = []
        given = {"position_ids": positions, "documents": documents}
        if pp == 0:
            pipeline.step(ids, **given)
        else:
            pipeline.step(target=targets, losses=losses, **given)
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for value in (total, *gradients.values()):
            dist.all_reduce(value, group=mesh["cp"].get_group())
        return total.item(), gradients

    parts = run_processes(body, 4, timeout=300, ring_timeout=120)
    assert not parts[0][1].keys() & parts[2][1].keys()
    for first, last in ((parts[0], parts[2]), (parts[1], parts[3])):
        require_gradients((last[0], {**first[1], **last[1]}), one_process(config))


def compiled(config: TrainConfig, backend: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Train with compiled layers against one process; gives the number of graphs that each rank compiled."""
    counts = torch.multiprocessing.get_context("fork").Array("i", 8)
    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer: plain(layer, backend=backend))

    def count_at_the_end(trainer: Trainer) -> None:
        step = trainer._train_step

        def counted() -> Any:
            record = step()
            counts[dist.get_rank()] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            return record

        trainer._train_step = counted  # type: ignore[method-assign]

    require_same(sharded(config, count_at_the_end), unsharded(config))
    return list(counts)[: config.cp]


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.matrix)],
)
@pytest.mark.parametrize("checkpointing", ["none", pytest.param("selective", marks=pytest.mark.matrix)])
def test_compiled_layers(backend: str, checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """aot_eager traces, differentiates and splits as inductor does, and writes no C++."""
    config = tiny(tmp_path, **{**SAME, "steps": 2, "cp": 2, "compile": True, "checkpointing": checkpointing})
    assert min(compiled(config, backend, monkeypatch)) > 1


@pytest.mark.parametrize("shape", [{"logit_scale": 0.3}, {"logits_scaling": 7.0}], ids=["cohere", "granite"])
def test_families_that_scale_their_logits(shape: dict[str, Any], tmp_path: Path) -> None:
    family = "cohere" if "logit_scale" in shape else "granite"
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = tiny(tmp_path, **{**SAME, "steps": 1, "cp": 2, "model": family, "shape": {**shape, **ends}})
    require_same(sharded(config), unsharded(config))


def test_a_family_that_does_more_to_its_logits_is_refused() -> None:
    model = tiny_model("llama")
    require_known_logits(model)
    plain = type(model).forward
    model.forward = lambda **given: _tripled(plain(model, **given))
    with pytest.raises(ValueError, match="LlamaForCausalLM changes its logits in a way that is not known here"):
        require_known_logits(model)


def _tripled(output: Any) -> Any:
    output.logits = 3 * output.logits
    return output
