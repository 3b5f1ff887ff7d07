"""What the busiest rank of a replica computes, moves and sends in a step, and the seconds that this takes.

The counts follow the trainer: every read and write of its kernels, its integer sums inside a replica, its
exchange between replicas. Rates are what a device has been seen to achieve, given in the study; launches by
the host are taken to be hidden, as CUDA graphs hide them. One document a sequence.
"""

from dataclasses import dataclass

from ntp.parameters import parameter_specs
from ntp.planner.plans import Plans
from ntp.planner.study import Batch, Gpu, Job, Step
from ntp.units import UnitKind, count_units

_SUMS = 4  # of cut products in a layer: after o and down, and backward after q, k, v and after gate, up
_TABLE_SUMS = 2  # of a microbatch: the embedding, and backward after the head

# Bytes that the bfloat16 kernels of a layer read and write for a token, forward and backward.
_NORM = 16 + 20  # times hidden: two sums with the residual stream, each with its norm
_SWIGLU = 6 + 12  # times FFN width
_NORM_AGAIN, _SWIGLU_AGAIN = 4, 6  # where backward makes them again; a layer has two norms
_ROPE = 4 + 4  # times width of q and k
_FINISH = 6  # times hidden and sum: int32 in, bfloat16 out
_ROW_NORMS = (
    2  # times width of what enters attention's cut products; SwiGLU takes those of its results itself
)
_LOGITS = 8  # times vocabulary: written, read, their gradient written, read
# Bytes of an element.
_ACCUMULATE = 8  # of a microbatch: the float32 gradient is read and written
_UPDATE = 46  # of kept state: taking the gradient over, its norm, AdamW, rounding into place
_ZERO = 4  # of a stored element and group: the gradient's
_ADD = 12  # of an addition of two float32 gradients
_GRADIENT, _PARAMETER = 4, 2
_PACKED = 2  # a byte that is sent is read and written before


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What the busiest rank of a stage holds and computes for one token.

    Attributes:
        elements: stored elements of all layers, replicated ones left out.
        macs: multiply-adds of a forward pass outside attention, of all layers.
        heads, kv_heads, ffn, vocab: of one layer, and of the head.
    """

    layers: int
    elements: int
    macs: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


def heaviest_rank(job: Job, plans: Plans, degree: int) -> RankLoad:
    """The rank with most multiply-adds, in the stage with most of them: the last one, which has the head."""
    model, units = job.model, plans.units_at(degree)
    layers = count_units(model.num_hidden_layers, job.pp)
    per_layer = dict.fromkeys(UnitKind, 0)  # elements of a unit in one layer
    for spec in parameter_specs(model.model_copy(update={"num_hidden_layers": 1})):
        if spec.kind:
            per_layer[spec.kind] += spec.unit_elements
    block = model.vocab_unit * model.hidden_size
    queries = model.num_attention_heads // model.num_key_value_heads
    tables = 2 if job.pp == 1 and not model.tie_word_embeddings else 1
    loads: list[RankLoad] = []
    for kv, ffn, vocab in zip(units[UnitKind.KV], units[UnitKind.FFN], units[UnitKind.VOCAB], strict=True):
        body = layers * (kv * per_layer[UnitKind.KV] + ffn * per_layer[UnitKind.FFN])
        loads.append(
            RankLoad(
                layers=layers,
                elements=body + tables * vocab * block,
                macs=body + vocab * block,
                heads=kv * queries,
                kv_heads=kv,
                ffn=ffn * model.ffn_unit,
                vocab=vocab * model.vocab_unit,
            )
        )
    return max(loads, key=lambda load: (load.macs, load.heads))


@dataclass(frozen=True, slots=True)
class MicrobatchTime:
    """Seconds of forward and backward of one microbatch.

    Attributes:
        products: with weights.
        attention: scores and their use; backward computes the scores again.
        pointwise: everything that memory bounds.
        sums: of cut products in a replica: integers to the owners of rows, results back to all.
    """

    products: float
    attention: float
    pointwise: float
    sums: float

    def total(self, overlap: float) -> float:
        """Of all, where a share of communication is hidden behind computation."""
        return self.products + self.attention + self.pointwise + (1 - overlap) * self.sums


def microbatch_time(step: Step, job: Job, rank: RankLoad, degree: int) -> MicrobatchTime:
    """The parts of a microbatch on the busiest rank of a replica of this degree.

    A forward pass costs 2 FLOP a multiply-add, a backward pass twice that; causal attention half the square,
    and 2.5 times as much backward.
    """
    gpu, batch, model = step.gpu, job.batch, job.model
    tokens, flops = batch.micro_batch * batch.seq_len, gpu.peak_tflops * 1e12
    scores = 2 * tokens * batch.seq_len * model.head_dim * rank.heads * rank.layers
    forward = scores / (flops * gpu.attention_efficiency)
    backward = 2.5 * scores / (flops * gpu.attention_backward_efficiency)
    moved = tokens * _bytes_per_token(job, rank) + _ACCUMULATE * rank.elements
    elements = (_SUMS * rank.layers + _TABLE_SUMS) * tokens * model.hidden_size
    summed = elements * (step.sum_bytes + step.result_bytes)
    again = _computed_again(batch)
    return MicrobatchTime(
        products=(6 + 2 * again) * tokens * rank.macs / (flops * gpu.gemm_efficiency),
        attention=forward + backward + forward * (batch.recompute in ("attention", "block")),
        pointwise=moved / (gpu.hbm_gbytes_s * 1e9),
        sums=(1 + again / 2) * summed * (degree - 1) / degree / (gpu.nvlink_gbytes_s * 1e9),
    )


def _computed_again(batch: Batch) -> int:
    """Forward passes of a layer's products in backward; those of attention's inputs alone are left out."""
    return int(batch.recompute == "block")


def _bytes_per_token(job: Job, rank: RankLoad) -> int:
    hidden, head_dim = job.model.hidden_size, job.model.head_dim
    queries, keys = rank.heads * head_dim, rank.kv_heads * head_dim
    layer = (_NORM + _FINISH * _SUMS) * hidden + _SWIGLU * rank.ffn + _ROPE * (queries + keys)
    layer += _ROW_NORMS * (2 * queries + 2 * keys)
    if job.batch.recompute == "pointwise":
        layer += 2 * _NORM_AGAIN * hidden + _SWIGLU_AGAIN * rank.ffn
    return rank.layers * layer + _LOGITS * rank.vocab


@dataclass(frozen=True, slots=True)
class Spread:
    """How the state and the gradients of a job are spread over its replicas.

    Attributes:
        copies: of the optimizer's state, at most dp.
        groups: of microbatches that this replica computes, each with a gradient sum of its own.
        nodes: partial sums of gradients that this replica sends for one element.
        all_nodes: those of all replicas.
        uniform: all replicas have one degree. With as many copies as replicas nothing comes back then.
    """

    dp: int
    copies: int
    groups: int
    nodes: int
    all_nodes: int
    uniform: bool


def exchange_time(rank: RankLoad, spread: Spread, gbytes_s: float) -> float:
    """Seconds to send gradients to those who keep the state and to bring parameters back; none is hidden."""
    return _sent_bytes(rank, spread) / (gbytes_s * 1e9)


def _sent_bytes(rank: RankLoad, spread: Spread) -> float:
    gradients = _GRADIENT * spread.nodes * spread.copies
    parameters = 0 if spread.uniform and spread.copies == spread.dp else _PARAMETER
    return rank.elements * (spread.dp - 1) / spread.dp * (gradients + parameters)


def update_time(rank: RankLoad, spread: Spread, gpu: Gpu) -> float:
    """Seconds to add the gradients of groups and replicas, to update this rank's share, and to pack both."""
    kept = rank.elements * spread.copies / spread.dp
    folded = _ZERO * spread.groups + _ADD * (spread.groups - spread.nodes)
    moved = kept * (_UPDATE + _ADD * (spread.all_nodes - 1)) + folded * rank.elements
    moved += _PACKED * _sent_bytes(rank, spread)
    return moved / (gpu.hbm_gbytes_s * 1e9)
